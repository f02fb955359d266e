"""What is no tensor is refused in words, on every backend and before any rank waits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import shoal
from pools import Team

WRONG = {"list": [1, 2], "number": 3.0, "array": np.ones(2), "long": list(range(100))}
CALLS = [
    "all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "reduce_scatter",
    "all_to_all", "send", "recv",
]  # fmt: skip


def make_wrong_calls(name: str) -> dict[str, str]:
    world = shoal.world()
    other = (world.rank + 1) % world.size
    more: dict[str, Any] = {"send": {"dst": other}, "recv": {"src": other}}
    said = {}
    for kind, value in WRONG.items():
        with pytest.raises(TypeError) as caught:
            getattr(world, name)(value, **more.get(name, {}))
        said[kind] = str(caught.value)
    if name in ("all_gather", "scatter", "reduce_scatter", "all_to_all"):
        with pytest.raises(TypeError, match=rf"{name}\(\) takes a tensor; got list"):
            getattr(world, name)(torch.ones(2), out=[0.0])
    assert world.all_reduce(torch.ones(1)).item() == world.size  # nobody waits for anything
    return said


@pytest.mark.parametrize("name", CALLS)
def test_a_type_error_says_what_it_takes(team: Team, name: str) -> None:
    for said in team.run(make_wrong_calls, name):
        assert said["list"].startswith(f"{name}() takes a tensor; got list [1, 2]. Make one with")
        assert "got float 3.0" in said["number"]
        assert "got ndarray array([1., 1.])" in said["array"]
        assert "got one of type list" in said["long"]
        assert "all_gather_object()" in said["list"]


@pytest.fixture(
    params=[("memory", 2), ("shm", 2), ("gloo", 2), pytest.param(("mpi", 3), marks=pytest.mark.mpi)]
)
def team(request: pytest.FixtureRequest) -> Team:
    return Team(*request.param)


def give_none(name: str) -> str:
    with pytest.raises(TypeError) as caught:
        getattr(shoal.world(), name)(None)
    return str(caught.value)


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_none_is_no_tensor(name: str) -> None:
    assert Team("shm", 2).run(give_none, name) == [f"{name}() takes a tensor; got None"] * 2
