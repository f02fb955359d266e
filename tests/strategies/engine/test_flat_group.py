"""The states of a group: which may follow which."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shoal
from shoal.strategies.engine.flat_group import FlatGroup, GroupState
from shoal.strategies.engine.gather_buffers import GatherBuffer


def group(strategy: str, **options: object) -> FlatGroup:
    """The only group of a model on one of two ranks."""
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    wrapped, _ = shoal.as_distributed(model, optimizer, strategy=strategy, **options)
    (found,) = wrapped.engine.groups
    assert isinstance(found, FlatGroup)
    return found


def impossible_states() -> list[str]:
    """What a sharded group refuses, state by state."""
    sharded, refused = group("zero3"), []

    def refuse(change: str, **options: object) -> None:
        with pytest.raises(AssertionError, match=f"group 0 is {sharded.state}, so not"):
            getattr(sharded, change)(**options)
        refused.append(f"{sharded.state} {change}")

    refuse("to_present")
    refuse("to_concealed", keep=False)
    sharded.to_coming(GatherBuffer.allocate(sharded))
    refuse("to_coming", buffer=GatherBuffer.allocate(sharded))
    refuse("to_exposed", masters=torch.zeros(0))
    sharded.to_failed()
    sharded.to_coming(GatherBuffer.allocate(sharded))
    sharded.whole.zero_()
    sharded.to_hidden()
    refuse("to_exposed", masters=torch.zeros(0))
    sharded.to_present()
    refuse("to_coming", buffer=GatherBuffer.allocate(sharded))
    assert sharded.state is GroupState.PRESENT
    return refused


def test_a_state_follows_only_some_others() -> None:
    assert shoal.run(impossible_states, 2, "memory")[0] == [
        "absent to_present",
        "absent to_concealed",
        "coming to_coming",
        "coming to_exposed",
        "hidden to_exposed",
        "present to_coming",
    ]


def states_of_full_parameters() -> list[GroupState]:
    """Before, inside of, and after `full_parameters`, in mixed precision."""
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    wrapped, _ = shoal.as_distributed(model, optimizer, strategy="zero3", mixed_precision="bf16")
    (found,) = wrapped.engine.groups
    states = [found.state]
    with wrapped.full_parameters():
        states.append(found.state)
    return [*states, found.state]


def test_full_parameters_expose_masters() -> None:
    states = shoal.run(states_of_full_parameters, 2, "memory")[0]
    assert states == [GroupState.ABSENT, GroupState.EXPOSED, GroupState.ABSENT]
