"""What ranks must do together is the same over every transport, and so is the error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import leaks
import pools
import shoal
from shoal.errors import MismatchError, ShoalError
from shoal.launch.function.forkserver.forkserver import fork_server
from strategies.loops import (
    assert_same,
    data,
    each,
    gathered,
    local,
    momentum,
    one_step,
    seeded,
    whole_state,
    wrapped,
)

transports = pytest.mark.parametrize("backend", ["memory", "shm", "gloo"])


def evaluate(model: Any) -> None:
    with torch.inference_mode():
        model(torch.ones(2, 7, dtype=torch.double))


def call_without_backward(model: Any) -> None:
    model(torch.ones(2, 7, dtype=torch.double))


def change(model: Any) -> None:
    next(model.parameters()).data.mul_(0.5)


def change_all_of_it(model: Any) -> None:
    parameter = next(model.parameters())
    parameter.data = parameter.data * 0.5


def ask_for_state(model: Any) -> None:
    model.state_dict()


def done_by_one_rank(deed: Callable[[Any], None], strategy: str) -> None:
    model, optimizer = wrapped(strategy)
    one_step(model, optimizer, local(0))
    if shoal.world().rank == 0:
        deed(model)
    one_step(model, optimizer, local(1))


@transports
@pytest.mark.parametrize(
    "deed", [evaluate, call_without_backward, change, change_all_of_it, ask_for_state]
)
def test_what_one_rank_does_alone_is_refused(deed: Callable[[Any], None], backend: str) -> None:
    fork_server()
    leaks.baseline()
    with pytest.raises(MismatchError):
        shoal.run(done_by_one_rank, 2, backend, args=(deed, "zero3"), timeout=20)


def written_late(strategy: str) -> Any:
    model, optimizer = wrapped(strategy)
    memory = next(model.parameters()).data
    one_step(model, optimizer, local(0, items=12))
    memory.mul_(0.5)
    try:
        one_step(model, optimizer, local(1, items=12))
    except ShoalError as error:
        return str(error)
    return model.state_dict()


def written_late_alone() -> Any:
    model = seeded()
    optimizer = momentum(model)
    memory = next(model.parameters()).data
    one_step(model, optimizer, data(0, items=12))
    memory.mul_(0.5)
    one_step(model, optimizer, data(1, items=12))
    return whole_state(model)


@transports
@each
def test_memory_of_before_a_step_is_never_written_to_in_vain(strategy: str, backend: str) -> None:
    for found in pools.Team(backend, 2).run(written_late, strategy):
        if strategy in ("zero3", "fsdp"):
            assert "ask for .data anew after each step" in found
        else:
            assert_same(found, written_late_alone())


def read_late(strategy: str) -> bool:
    """What is only read, or let go of, does no harm."""
    model, optimizer = wrapped(strategy)
    memory = [parameter.data for parameter in model.parameters()]
    for step in range(3):
        one_step(model, optimizer, local(step, items=12))
        memory[0].sum()
    memory.clear()
    one_step(model, optimizer, local(3, items=12))
    return not any(group.changes.referenced for group in model.engine.groups)


@transports
@gathered
def test_memory_of_before_a_step_may_be_held(strategy: str, backend: str) -> None:
    assert all(pools.Team(backend, 2).run(read_late, strategy))
