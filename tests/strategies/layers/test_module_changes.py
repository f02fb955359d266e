"""A module that was changed in place becomes what it was, but for what its user has done since."""

from __future__ import annotations

import contextlib

import torch
from torch import nn

from shoal.strategies.layers.module_changes import ModuleChanges
from shoal.torch_internals.modules import buffers_of, parameters_of


class Other(nn.Linear):
    """What a strategy makes of a layer."""


def make() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model[2].width = 4
    return model


def change(model: nn.Sequential) -> None:
    """All that strategies do to a module."""
    first, norm, last = model
    first.__class__ = Other
    vars(first)["forward"] = lambda *args: args
    first.weight.data = first.weight.data[:2]
    first.weight.register_hook(lambda gradient: gradient * 0)
    model.register_forward_pre_hook(lambda *_: None)
    last.width = 2
    vars(last)["bias"] = parameters_of(last).pop("bias")
    vars(norm)["running_mean"] = buffers_of(norm).pop("running_mean")


def test_what_was_changed_is_undone() -> None:
    model = make()
    names, parameters = list(model.state_dict()), list(model.parameters())
    mean = model[1].running_mean
    changes = ModuleChanges(model)
    with changes.noted():
        change(model)
    assert list(model.state_dict()) != names
    changes.undo()
    assert list(model.state_dict()) == names
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert model[1].running_mean is mean
    assert type(model[0]) is nn.Linear
    assert model[2].width == 4
    assert not model._forward_pre_hooks
    assert "forward" not in vars(model[0])
    assert "bias" not in vars(model[2])
    assert [tuple(each.shape) for each in parameters[:2]] == [(4, 3), (4,)]
    assert not any(each.any() for each in parameters)
    model(torch.ones(2, 3)).sum().backward()  # with shapes and hooks of before
    assert parameters[-1].grad is not None


def test_what_a_user_has_done_since_stays() -> None:
    model = make()
    removed = model[0].register_forward_hook(lambda *_: None)
    changes = ModuleChanges(model)
    with changes.noted():
        change(model)
    removed.remove()
    model.eval()
    model[2].note = "mine"
    seen: list[str] = []
    model[2].register_forward_hook(lambda *_: seen.append("module"))
    model[2].weight.register_hook(lambda _: seen.append("weight"))
    changes.undo()
    assert not model[0]._forward_hooks
    assert not model.training
    assert model[2].note == "mine"
    model(torch.ones(2, 3)).sum().backward()
    assert seen == ["module", "weight"]


def test_an_error_in_the_middle_is_undone_as_well() -> None:
    model = make()
    names = list(model.state_dict())
    changes = ModuleChanges(model)
    with contextlib.suppress(RuntimeError), changes.noted():
        change(model)
        raise RuntimeError
    changes.undo()
    assert list(model.state_dict()) == names
    assert type(model[0]) is nn.Linear
    changes.undo()  # there is nothing to undo any more
    assert list(model.state_dict()) == names
