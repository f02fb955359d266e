"""Parameters of split layers are used by their layers only: equal to one process, or an error.

Each module here comes by a weight in another way. Some are found when the plan is made, and stay
whole; in others only a forward can tell, and that raises.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.errors import ShoalError
from shoal.strategies.tensor import draft
from shoal.strategies.tensor.plan.user_plan import plan_from_patterns
from shoal.strategies.tensor.split_parameter import ReadGuard
from strategies.tensor.trial.test_split_trial import HIDDEN, SEQUENCES, WIDTH, Pair, trained

LIMIT = {"timeout": 40}
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")


class Plain(Pair):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.fc1(x))


class Functional(Pair):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.linear(x, self.fc1.weight, self.fc1.bias))


class Transposed(Pair):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.fc1(x)) + x @ self.fc1.weight.t().mean(1, keepdim=True)


class ByName(Pair):
    def forward(self, x: Tensor) -> Tensor:
        key = "we" + "ight"
        return self.fc2(self.fc1(x)) * getattr(self.fc1, key).norm()


class AllParameters(Pair):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.fc1(x)) + sum(each.pow(2).sum() for each in self.parameters())


class StateDict(Pair):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.fc1(x)) + next(iter(self.state_dict(keep_vars=True).values())).norm()


class Kept(Pair):
    """Kept before the layers were split, where nothing looks like a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = [self.fc1.weight]

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.fc1(x)) + self.kept[0].norm()


class WithLambda(Pair):
    def __init__(self) -> None:
        super().__init__()
        self.penalty = lambda: self.fc1.weight.norm()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.fc1(x)) + self.penalty()


class WithPartial(Pair):
    def __init__(self) -> None:
        super().__init__()
        self.project = functools.partial(F.linear, weight=self.fc1.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.project(x) + self.fc1(x))


class WithoutBinding(Pair):
    """Calls the class, and so goes around the layer."""

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(nn.Linear.forward(self.fc1, x))


class WithNoSource(Pair):
    """Made on the fly: there is no source, only code."""


exec(
    "def forward(self, x):\n    return self.fc2(self.fc1(x)) + self.fc1.weight.norm()",
    made := {},
)
WithNoSource.forward = made["forward"]


class InC(Pair):
    """A forward that is no function of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = functools.partial(operator.call, self._compute)

    def _compute(self, x: Tensor) -> Tensor:
        return helper(self, self.fc2(self.fc1(x)))


def project(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.t()


class WithScript(Pair):
    def __init__(self) -> None:
        super().__init__()
        self.project = torch.jit.script(project)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.project(x, self.fc1.weight) + self.fc1(x))


class WithSize(Pair):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.fc1(x)) / len(self.fc1.weight)


def helper(block: Any, x: Tensor) -> Tensor:
    return x * block.fc2.weight.abs().max()


class WithHelper(Pair):
    def forward(self, x: Tensor) -> Tensor:
        return helper(self, self.fc2(self.fc1(x)))


class Replaced(Pair):
    """Layers whose forward is not that of their class any more."""

    def __init__(self) -> None:
        super().__init__()
        self.fc2.forward = functools.partial(self._scaled, self.fc2)

    @staticmethod
    def _scaled(layer: nn.Linear, x: Tensor) -> Tensor:
        return F.linear(x, layer.weight * 2, layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.fc1(x))


class OwnForward(Pair):
    """A block whose forward was replaced by one that reads."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = lambda x: self.fc2(self.fc1(x)) + self.fc1.weight.norm()


class Tied(nn.Module):
    """A head that is no layer, of an embedding that has a layer as well."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(9, WIDTH), nn.Linear(WIDTH, 9, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.tokens(x[..., 0].abs().long().clamp(max=8))
        return self.head(hidden) + hidden @ self.tokens.weight.T


class WeightNormed(Pair):
    """Its weight is computed, and is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.utils.parametrizations.weight_norm(self.fc1)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.fc1(x)) + self.fc1.weight.norm()


class InAnEmbedding(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + next(iter(self.parameters())).mean(0)


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = InAnEmbedding(9, WIDTH), nn.Linear(WIDTH, 9)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.tokens(x[..., 0].abs().long().clamp(max=8)))


class FromAbove(nn.Module):
    """The block itself is fine; a module that it is in reads."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Plain()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.inner.fc1.weight.norm()


class FromAboveUnseen(FromAbove):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + sum(each.norm() for each in self.parameters())


class Later(Pair):
    """A branch that no trial takes."""

    is_late = False

    def forward(self, x: Tensor) -> Tensor:
        result = self.fc2(self.fc1(x))
        return result + helper(self, x) if self.is_late else result


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.jit.script(nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU()))
        self.fc = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.inner(x))


def hooked() -> nn.Module:
    """A hook without source that has the weight of another layer."""
    module, seen = Plain(), {}
    exec("hook = lambda layer, inputs, out: out + next(layer.parameters()).norm()", seen)
    module.fc1.register_forward_hook(seen["hook"])
    return module


def hooked_backward() -> nn.Module:
    module = Plain()
    scale = functools.partial(lambda weight, layer, inputs, outputs: None, module.fc1.weight)
    module.fc2.register_full_backward_hook(scale)
    return module


READERS: list[Callable[[], nn.Module]] = [
    Functional, Transposed, ByName, AllParameters, StateDict, Kept, WithLambda, WithPartial,
    WithoutBinding, WithNoSource, InC, WithScript, WithSize, WithHelper, Replaced, OwnForward, Tied,
    WeightNormed, Embedded, FromAbove, FromAboveUnseen, hooked, hooked_backward,
]  # fmt: skip
RAISING = {Embedded, FromAboveUnseen}
"""What no plan can know of: found when the model runs."""


@pytest.mark.parametrize("build", READERS, ids=lambda build: build.__name__)
def test_equal_to_one_process_or_an_error(build: Callable[[], nn.Module]) -> None:
    if build in RAISING:
        with pytest.raises(ShoalError, match="without calling the layer: it is split"):
            shoal.run(trained, 2, "memory", args=(build, SEQUENCES, True), **LIMIT)
        return
    outputs, gradients = trained(build, SEQUENCES, is_split=False)
    for found, own in shoal.run(trained, 2, "memory", args=(build, SEQUENCES, True), **LIMIT):
        torch.testing.assert_close(found, outputs)
        torch.testing.assert_close(own, gradients)


def is_late(zero: int) -> Tensor:
    model = shoal.as_distributed(Later(), strategy="tensor", tensor=2, zero=zero)
    inputs = torch.ones(2, WIDTH)
    model(inputs).sum().backward()
    model.module.is_late = True
    return model(inputs)


@pytest.mark.parametrize(("zero", "ranks"), [(0, 2), (3, 4)])
def test_a_branch_that_is_taken_later_raises(zero: int, ranks: int) -> None:
    assert [layer.name for layer in draft(Later(), 2).layers] == ["fc1", "fc2"]
    with pytest.raises(ShoalError, match=r"uses fc2\.weight without calling the layer"):
        shoal.run(is_late, ranks, "memory", args=(zero,), **LIMIT)


def test_what_is_the_same_for_a_part_may_be_asked() -> None:
    class Asking(Pair):
        def forward(self, x: Tensor) -> Tensor:
            x = x.to(self.fc1.weight.dtype).to(next(self.parameters()).device)
            assert self.fc1.bias is not None
            assert isinstance(self.fc2.weight, Tensor)
            return self.fc2(self.fc1(x))

    assert [layer.is_alone for layer in draft(Asking(), 2).layers] == [False, False]
    outputs, gradients = trained(Asking, SEQUENCES, is_split=False)
    for found, own in shoal.run(trained, 2, "memory", args=(Asking, SEQUENCES, True), **LIMIT):
        torch.testing.assert_close(found, outputs)
        torch.testing.assert_close(own, gradients)


def test_parameters_are_plain_outside_of_forward_also_after_an_error() -> None:
    def check() -> None:
        model = shoal.as_distributed(Later(), strategy="tensor")
        model.module.is_late = True
        with pytest.raises(ShoalError, match="without calling"):
            model(torch.ones(2, WIDTH))
        assert {type(each) for each in model.parameters()} == {nn.Parameter}
        assert model.fc1.weight.norm() > 0
        model.module.is_late = False
        model(torch.ones(2, WIDTH)).sum().backward()
        assert {type(each) for each in model.parameters()} == {nn.Parameter}

    shoal.run(check, 2, "memory", **LIMIT)


def test_inputs_with_a_class_of_their_own_are_heeded() -> None:
    seen = []

    class Logged(Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func.__name__)
            return super().__torch_function__(func, types, args, kwargs)

    weight, inputs = nn.Parameter(torch.ones(3, 2)), torch.ones(4, 2)
    guard = ReadGuard({"weight": weight})
    guard.begin()
    for each in (inputs, inputs.as_subclass(Logged)):
        with guard.own_forward(weight, each):
            assert type(F.linear(each, weight)) is type(each)
        with pytest.raises(ShoalError, match="uses weight without calling the layer"):
            F.linear(each, weight)
    guard.end()
    assert type(weight) is nn.Parameter
    assert "linear" in seen


def test_a_plan_that_splits_what_is_read_is_refused() -> None:
    for build in (Functional, ByName, AllParameters, Kept, WithPartial):
        with pytest.raises(ValueError, match="reads weights of its layers"):
            plan_from_patterns(build(), 2, {"fc1": "column"})


def test_a_module_of_torchscript_has_no_layers() -> None:
    assert draft(Scripted(), 2).layers == []


def test_a_class_of_parameters_stays_whole() -> None:
    class Own(nn.Parameter):
        pass

    module = Plain()
    module.fc1.weight = Own(module.fc1.weight.data)
    assert "a class of their own" in draft(module, 2).notes["fc1"]
