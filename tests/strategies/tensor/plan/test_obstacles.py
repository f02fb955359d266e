"""What keeps layers whole: code that reads weights, and hooks."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.strategies.tensor import draft
from shoal.strategies.tensor.plan.obstacles import (
    hook_reads_weights,
    reads_weight_of,
    reads_weights,
)
from shoal.strategies.tensor.plan.user_plan import plan_from_patterns
from strategies.tensor.tasks import FeedForward
from strategies.tensor.trial.test_split_trial import HIDDEN, SEQUENCES, WIDTH, Pair, trained


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.layers = nn.Linear(4, 4), nn.ModuleList([nn.Linear(4, 4)])


class Harmless(Outer):
    """Talks of self.head.weight, and asks for what a part has in common with the whole."""

    def forward(self, x: Tensor) -> Tensor:
        # self.head.weight.norm() would be a read
        assert self.head.bias is not None
        assert isinstance(self.head.weight, torch.Tensor)
        return self.head(x.to(self.head.weight.dtype)), "head.weight"

    def init_all(self) -> None:
        self.head.weight.data.zero_()


class ByAttribute(Outer):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.head.weight


class ByGetattr(Outer):
    def forward(self, x: Tensor) -> Tensor:
        return x @ getattr(self.head, "weight")  # noqa: B009


class ByIndex(Outer):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.layers[0].weight


class InASuperClass(ByAttribute):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Overridden(ByAttribute):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


class NotPython(Outer):
    forward = operator.itemgetter(0)


def patched() -> nn.Module:
    module = Harmless()
    module.forward = lambda x: x @ module.head.weight
    return module


@pytest.mark.parametrize("build", [ByAttribute, ByGetattr, InASuperClass, NotPython, patched])
def test_code_that_reads(build: Any) -> None:
    assert reads_weights(build())
    assert reads_weight_of(build(), "head")


@pytest.mark.parametrize("build", [Harmless, Overridden])
def test_code_that_does_not_read(build: Any) -> None:
    assert not reads_weights(build())
    assert not reads_weight_of(build(), "head")


def test_layers_by_number() -> None:
    assert reads_weight_of(ByIndex(), "layers.0")
    assert not reads_weight_of(ByIndex(), "head")


def test_only_modules_around_a_block() -> None:
    module = nn.ModuleDict({"block": ByAttribute()})
    assert reads_weight_of(module, "block.head")
    assert not reads_weight_of(module, "block.head", "block")
    assert not reads_weight_of(ByAttribute(), "head", "")


def test_hooks() -> None:
    weight = nn.Parameter(torch.ones(2))
    assert not hook_reads_weights(lambda layer, inputs: None)
    assert hook_reads_weights(lambda layer, inputs: layer.weight.norm())
    assert hook_reads_weights(lambda layer, inputs: next(layer.parameters()).norm())
    assert hook_reads_weights(lambda layer, inputs: weight.norm())
    assert hook_reads_weights(functools.partial(lambda kept, layer, inputs: None, weight))
    assert hook_reads_weights(operator.itemgetter(0))


class Named(Pair):
    """Found by the names of its layers, and tried."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class Unknown(nn.Module):
    """Found by the sizes of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.act, self.two = nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.act(self.one(x)))


def in_a_row() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))


def scaled(tensor: Tensor) -> Tensor:
    """Every feature depends on all of them."""
    return tensor / (1 + tensor.norm(dim=-1, keepdim=True))


def after_forward(column: nn.Module, act: nn.Module, row: nn.Module) -> None:
    act.register_forward_hook(lambda _, inputs, output: scaled(output))


def after_the_column(column: nn.Module, act: nn.Module, row: nn.Module) -> None:
    column.register_forward_hook(lambda _, inputs, output: scaled(output))


def before_forward(column: nn.Module, act: nn.Module, row: nn.Module) -> None:
    row.register_forward_pre_hook(lambda _, inputs: (scaled(inputs[0]),))


def after_backward(column: nn.Module, act: nn.Module, row: nn.Module) -> None:
    row.register_full_backward_hook(lambda _, inputs, outputs: (scaled(inputs[0]),))


def before_backward(column: nn.Module, act: nn.Module, row: nn.Module) -> None:
    act.register_full_backward_pre_hook(lambda _, outputs: (scaled(outputs[0]),))


def with_a_weight(column: nn.Module, act: nn.Module, row: nn.Module) -> None:
    column.register_forward_pre_hook(lambda layer, inputs: (inputs[0] * layer.weight.norm(),))


def of_a_gradient(column: nn.Module, act: nn.Module, row: nn.Module) -> None:
    for parameter in (*column.parameters(), *row.parameters()):
        parameter.register_hook(lambda gradient: gradient / gradient.norm())


def _normalize(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.div_(parameter.grad.norm())


def of_what_was_accumulated(column: nn.Module, act: nn.Module, row: nn.Module) -> None:
    column.get_parameter("weight").register_post_accumulate_grad_hook(_normalize)


HOOKS: list[Callable[..., None]] = [
    after_forward, after_the_column, before_forward, after_backward, before_backward,
    with_a_weight, of_a_gradient, of_what_was_accumulated,
]  # fmt: skip
BUILDERS: list[Callable[[], nn.Module]] = [in_a_row, Named, Unknown]


def hooked(build: Callable[[], nn.Module], hang: Callable[..., None]) -> Callable[[], nn.Module]:
    def build_hooked() -> nn.Module:
        module = build()
        layers = dict(module.named_children())
        column, row = (part for part in layers.values() if isinstance(part, nn.Linear))
        (act,) = (part for part in layers.values() if isinstance(part, nn.GELU))
        hang(column, act, row)
        return module

    return build_hooked


def check_equal(build: Callable[[], nn.Module]) -> None:
    outputs, gradients = trained(build, SEQUENCES, is_split=False)
    for found, own in shoal.run(trained, 2, "memory", args=(build, SEQUENCES, True), timeout=40):
        torch.testing.assert_close(found, outputs)
        torch.testing.assert_close(own, gradients)


@pytest.mark.parametrize("hang", HOOKS, ids=lambda hang: hang.__name__)
@pytest.mark.parametrize("build", BUILDERS, ids=lambda build: build.__name__)
def test_hooks_get_what_they_get_in_one_process(
    build: Callable[[], nn.Module], hang: Callable[..., None]
) -> None:
    check_equal(hooked(build, hang))


def test_what_hooks_keep_is_whole() -> None:
    """Nothing that is compared depends on it, and still somebody looks at it."""

    def keep() -> list[Any]:
        module, seen = Named(), []
        module.act.register_forward_hook(lambda _, inputs, output: seen.append(output.shape))
        model = shoal.as_distributed(module, strategy="tensor")
        seen.clear()
        model(torch.ones(2, WIDTH))
        return seen

    assert shoal.run(keep, 2, "memory") == [[(2, HIDDEN)]] * 2


def test_gradients_are_summed_before_hooks_of_replicated_parameters_get_them() -> None:
    def build() -> nn.Module:
        module = FeedForward(WIDTH, HIDDEN)
        module.slope.register_hook(lambda gradient: gradient / (1 + gradient.abs()))
        return module

    assert draft(build(), 2).blocks[0].partial == ("slope",)
    check_equal(build)


def test_the_plan_tells_of_hooks() -> None:
    def notes(build: Callable[[], nn.Module], hang: Callable[..., None]) -> dict[str, str]:
        return draft(hooked(build, hang)(), 2).notes

    alone = "is computed whole, only its weights are split: hooks in it would get parts of"
    for build in (in_a_row, Named):
        assert notes(build, before_forward)[""].startswith(alone)
    for hang in HOOKS:
        assert notes(Unknown, hang) == {"": "might be split without the hooks in it"}
    assert notes(Named, of_what_was_accumulated)["fc1"].startswith("stays whole: its parameters")
    assert notes(Named, with_a_weight)[""] == "stays whole: its code reads its layers' weights"


def test_blocks_that_look_alike_but_for_hooks() -> None:
    module = nn.Sequential(Named(), Named(), Named())
    module[1].act.register_forward_hook(lambda _, inputs, output: scaled(output))
    assert [layer.is_alone for layer in draft(module, 2).layers] == [False] * 2 + [True] * 2 + [
        False
    ] * 2


def test_attention_and_vocabularies_whose_parameters_have_hooks_stay_whole() -> None:
    attention = nn.MultiheadAttention(WIDTH, 4)
    attention.out_proj.weight.register_hook(lambda gradient: gradient / gradient.norm())
    assert draft(attention, 2).layers == []
    module = nn.ModuleDict({"tokens": nn.Embedding(9, WIDTH), "head": nn.Linear(WIDTH, 9)})
    module["tokens"].weight.register_hook(lambda gradient: gradient / gradient.norm())
    plan = draft(module, 2)
    assert [layer.name for layer in plan.layers] == ["head"]
    assert plan.notes["tokens"].startswith("stays whole: its parameters have hooks")


def test_hooks_around_a_region_change_nothing() -> None:
    module = Named()
    module.register_forward_hook(lambda _, inputs, output: scaled(output))
    assert not any(layer.is_alone for layer in draft(module, 2).layers)
    check_equal(lambda: module)


def test_a_plan_that_gives_hooks_parts_is_refused() -> None:
    patterns = {"one": "column", "two": "row"}
    module = hooked(Unknown, of_a_gradient)()
    with pytest.raises(ValueError, match="one cannot be split: its parameters have hooks"):
        plan_from_patterns(module, 2, {"one": "column"})
    with pytest.raises(ValueError, match="one cannot be split: its parameters have hooks"):
        plan_from_patterns(module, 2, patterns)
    several = TwoInputs()
    several.act.register_forward_hook(lambda _, inputs, output: scaled(output))
    with pytest.raises(ValueError, match="one and two cannot be split together: hooks"):
        plan_from_patterns(several, 2, patterns)


class TwoInputs(Unknown):
    """Cannot be tried."""

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return super().forward(x) * scale
