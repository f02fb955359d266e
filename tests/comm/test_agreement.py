"""Decisions that all ranks make together."""

from __future__ import annotations

import math

import pytest
import torch

import shoal
from pools import Team
from shoal.errors import MismatchError


def usual():
    world = shoal.world()
    last = world.rank == world.size - 1
    return [
        world.agree(last),
        world.agree(False),
        world.agree(float(world.rank)),
        world.agree(world.rank),
        world.agree(torch.tensor(world.rank + 0.5)),
        world.agree(torch.tensor([last])),
    ]


def test_a_bool_is_any_and_a_number_the_mean(team: Team) -> None:
    mean = (team.size - 1) / 2
    for answer in team.run(usual):
        assert answer == [True, False, mean, mean, mean + 0.5, True]
        assert type(answer[0]) is bool


def ways():
    world = shoal.world()
    rank, last = world.rank, world.rank == world.size - 1
    return {
        "all": world.agree(last, "all"),
        "max": world.agree(rank, "max"),
        "min": world.agree(torch.tensor(rank), "min"),
        "fraction": world.agree(last, "mean"),
        "first": world.agree({"rank": rank}, "first"),
        "same": world.agree(["a", 1], "same"),
        "tensor": world.agree(torch.arange(3), "same").tolist(),
        "nan": math.isnan(world.agree(math.nan, "same")),
    }


def test_every_way(several: Team) -> None:
    for answer in several.run(ways):
        assert answer == {
            "all": False,
            "max": several.size - 1,
            "min": 0,
            "fraction": 1 / several.size,
            "first": {"rank": 0},
            "same": ["a", 1],
            "tensor": [0, 1, 2],
            "nan": True,
        }


def test_the_mean_is_the_same_to_the_last_bit(several: Team) -> None:
    results = several.run(lambda: shoal.world().agree(0.1 * 3 ** shoal.world().rank).hex())
    assert len(set(results)) == 1


@pytest.mark.parametrize("how", ["mean", "max", "min"])
def test_not_a_number_is_not_lost(how: str) -> None:
    """Python's own max depends on where the NaN stands."""

    def ask(values):
        return shoal.world().agree(values[shoal.world().rank], how)

    for bad in range(3):
        values = [math.nan if rank == bad else float(rank) for rank in range(3)]
        assert all(map(math.isnan, shoal.run(ask, 3, "memory", (values,))))


def errors_of(question):
    with pytest.raises(MismatchError) as caught:
        question(shoal.world())
    shoal.world().barrier()  # everybody was told, so everybody can go on
    return str(caught.value)


@pytest.mark.parametrize(
    ("question", "words"),
    [
        (lambda w: w.agree(w.rank // 2, "same"), "ranks 0, 1: 0; rank 2: 1"),
        (lambda w: w.agree(torch.full((3,), w.rank), "same"), "rank 1: tensor([1, 1, 1])"),
        (lambda w: w.agree([torch.full((3,), w.rank)], "same"), "must have the same value"),
        (lambda w: w.agree(1.0, "max" if w.rank else "min"), "rank 0: min; ranks 1, 2: max"),
        (lambda w: w.agree(w.rank == 0 or 1.0, "max"), "rank 0: bool; ranks 1, 2: float"),
    ],
)
def test_ranks_that_differ(question, words) -> None:
    for message in shoal.run(errors_of, 3, "memory", (question,)):
        assert words in message


@pytest.mark.parametrize(
    ("value", "how", "error", "words"),
    [
        ("text", None, TypeError, '"first"'),
        (torch.ones(2), None, TypeError, "Tensor"),
        ("text", "max", TypeError, "needs a bool or a number"),
        (1, "any", TypeError, "compare it first"),
        (True, "most", ValueError, "any, all, same"),
    ],
)
def test_what_cannot_be_agreed_on(value, how, error, words) -> None:
    with pytest.raises(error, match=words):
        shoal.run(lambda: shoal.world().agree(value, how), 1, "memory")


def test_early_stopping() -> None:
    """Every rank stops after the same step, though only one has seen enough."""

    def train():
        world = shoal.world()
        for step in range(100):
            if world.agree(world.rank == 2 and step == 7):
                return step
        return None

    assert shoal.run(train, 4, "memory") == [7] * 4
