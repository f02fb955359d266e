"""Modules and classes of layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from needs import needs
from shoal.torch_internals import modules


def test_a_modules_own_members_can_be_changed() -> None:
    module = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
    assert list(modules.children_of(module)) == ["0", "1"], needs("modules have a dict of children")
    del modules.parameters_of(module[0])["bias"]
    modules.buffers_of(module[1])["running_mean"] = torch.full((1,), 7.0)
    assert not hasattr(module[0], "bias"), needs("modules look parameters up in a dict")
    assert module[1].running_mean == 7, needs("modules look buffers up in a dict")
    assert modules.OWN_PARAMETERS in vars(module), needs("the dict of parameters has its name")


def test_buffers_are_persistent_or_not() -> None:
    module = nn.Module()
    module.register_buffer("kept", torch.zeros(1))
    module.register_buffer("dropped", torch.zeros(1), persistent=False)
    found = [name for name in modules.buffers_of(module) if modules.is_persistent(module, name)]
    assert found == list(module.state_dict()) == ["kept"], needs("modules know persistent buffers")


def test_members_are_listed_with_their_full_names() -> None:
    def members(module: nn.Module) -> Iterator[tuple[str, Any]]:
        yield from modules.parameters_of(module).items()

    model = nn.Sequential(nn.Linear(1, 1))
    found = list(modules.named_members(model, members, "", True, True))
    assert found == list(model.named_parameters()), needs("members are listed as parameters are")


def test_all_hooks_of_a_module_are_found() -> None:
    module = nn.Linear(1, 1)
    assert modules.hooks_of(module) == [], needs("a module has no hooks at first")
    hooks: list[Any] = [lambda *_: None for _ in range(4)]
    module.register_forward_pre_hook(hooks[0])
    module.register_forward_hook(hooks[1])
    module.register_full_backward_pre_hook(hooks[2])
    module.register_full_backward_hook(hooks[3])
    assert modules.hooks_of(module) == hooks, needs("hooks lie in four dicts of a module")


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_the_call_of_a_module_can_be_replaced() -> None:
    module = nn.Linear(1, 1)
    setattr(module, modules.CALL, lambda _: "called")
    assert module(1) == "called", needs(f"a module is called through {modules.CALL}")
    assert not modules.is_compiled(module), needs("a plain module does not look compiled")
    module.compile(backend="eager")
    assert modules.is_compiled(module), needs("module.compile() can be told")
    setattr(module, modules.COMPILED_CALL, lambda _: "compiled")
    assert module(1) == "compiled", needs("a compiled module is called through what compiled it")
    assert modules.is_compiled(torch.compile(nn.Linear(1, 1))), needs("torch.compile can be told")


def test_a_module_can_use_other_tensors_and_ties_stay() -> None:
    module = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    module[1].weight = module[0].weight
    own = module[0].weight
    with modules.with_parameters(module, {"0.weight": torch.full((1, 1), 3.0)}):
        assert module(torch.ones(1)) == 9, needs("tied parameters are replaced together")
    assert module[0].weight is module[1].weight is own, needs("parameters come back")


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(2), nn.BatchNorm2d(2), nn.SyncBatchNorm(2)])
def test_batch_norms_have_a_class_and_check_their_input(layer: nn.Module) -> None:
    assert isinstance(layer, modules.BatchNorm), needs("batch norms have a common class")
    with pytest.raises(ValueError, match="expected"):
        modules.check_input_dim(layer, torch.zeros(1))


def test_dropouts_have_a_class() -> None:
    layers = [nn.Dropout(), nn.Dropout2d(), nn.AlphaDropout(), nn.FeatureAlphaDropout()]
    assert all(isinstance(each, modules.Dropout) for each in layers), needs("a class of dropouts")


def test_missing_keys_are_told_as_torch_does() -> None:
    found = nn.Linear(1, 1).load_state_dict({}, strict=False)
    expected = modules.IncompatibleKeys(["weight", "bias"], [])
    assert found == expected, needs("load_state_dict returns missing and unexpected keys")


def test_extra_state_has_its_name() -> None:
    class Extra(nn.Module):
        def get_extra_state(self) -> int:
            return 1

    assert list(Extra().state_dict()) == [modules.EXTRA_STATE], needs("extra state has its name")


def test_attention_tells_its_projection_and_has_a_reset() -> None:
    one, three = nn.MultiheadAttention(4, 2), nn.MultiheadAttention(4, 2, kdim=2)
    assert modules.has_one_projection(one), needs("attention says that it has one projection")
    assert not modules.has_one_projection(three), needs("attention says that it has three")
    found = any(hasattr(one, name) for name in modules.RESETS)
    assert found, needs("attention has a method that initialises its parameters")


def test_masks_of_truth_become_numbers() -> None:
    mask = modules.additive_mask(torch.tensor([True, False]), "attn_mask", torch.float32)
    assert mask is not None
    assert mask.tolist() == [float("-inf"), 0], needs("masks become numbers")
    assert modules.additive_mask(None, "attn_mask", torch.float32) is None, needs("no mask is none")


def test_the_second_half_of_a_transformers_layer_can_be_called() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0)
    rows = torch.randn(3, 4)
    expected = layer.linear2(torch.relu(layer.linear1(rows)))
    assert torch.equal(modules.feed_forward(layer)(rows), expected), needs("layers have two halves")
