"""A child that a rank has forked has all of its memory, and is not the rank."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

import shoal
from pools import Team


def in_child(act: Callable[[], Any]) -> str:
    """What came of it in a forked child: the type and text of its error."""
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            act()
            said = "no error"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writable, said.encode())
        os._exit(0)
    os.close(writable)
    with os.fdopen(readable) as answer:
        said = answer.read()
    os.waitpid(child, 0)
    return said


def call_in_a_child(name: str) -> tuple[str, float]:
    world = shoal.world()
    works = {
        "barrier": world.barrier,
        "all_reduce": lambda: world.all_reduce(torch.ones(2)),
        "send": lambda: world.send(torch.ones(1), dst=(world.rank + 1) % world.size),
        "split": lambda: world.split(0),
        "fail": lambda: (world.fail(ValueError("in the child")), world.barrier()),
        "shutdown": lambda: (world.shutdown(), world.barrier()),
    }
    total = world.all_reduce(torch.ones(2))[0].item()
    said = in_child(works[name]) if world.rank == 0 else ""
    return said, total + world.all_reduce(torch.ones(1)).item()


@pytest.mark.parametrize("name", ["barrier", "all_reduce", "send", "split", "fail", "shutdown"])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_child_cannot_take_part(several: Team, name: str) -> None:
    """It is told so, and its rank goes on as if nothing had happened."""
    results = several.run(call_in_a_child, name)
    assert "ClosedError: process " in results[0][0]
    assert "was forked from rank 0 and cannot take part in its place" in results[0][0]
    assert [total for _, total in results] == [2.0 * several.size] * several.size


def wait_in_a_child() -> tuple[str, float]:
    """For work that a thread carries out, which the child does not have."""
    world = shoal.world()
    if world.rank == 0:
        work = world.all_reduce(torch.ones(1), async_op=True)
        said = in_child(work.wait)
        world.barrier()
        return said, work.wait().item()
    total = world.all_reduce(torch.ones(1)).item()
    world.barrier()
    return "", total


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_child_does_not_wait_for_its_parents_threads(several: Team) -> None:
    if several.backend == "memory":
        pytest.skip("no threads carry out work over memory")
    results = several.run(wait_in_a_child)
    assert "ClosedError: " in results[0][0]
    assert [total for _, total in results] == [float(several.size)] * several.size
