"""Operations that pass for element-wise are: each element of the result has its own operands."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.optim.proof.following import MIXED, Level, Mark, Marks
from shoal.optim.proof.rules import Effect, rule_for

aten = torch.ops.aten


def _overloads(prefix: str) -> list[Any]:
    """All operations of torch whose name begins with this, but those that write to ``out``."""
    full = (name.removeprefix("aten::") for name in torch._C._dispatch_get_all_op_names())
    names = {name.partition(".")[0] for name in full if name.startswith(prefix)}
    return [
        getattr(getattr(aten, name), each)
        for name in sorted(names)
        for each in getattr(aten, name).overloads()
        if not each.endswith("out")
    ]


FOREACH = [each for each in _overloads("_foreach_") if rule_for(each).effect is Effect.ELEMENT_WISE]


def _arguments(operation: Any, tensors: list[Tensor]) -> list[Any]:
    """Positive numbers for all that must be given, other ones for other arguments."""
    given: dict[str, Any] = {"bool": False, "Tensor": torch.tensor(0.5)}
    return [
        [each / (1 + place) for each in tensors]
        if str(argument.type) == "List[Tensor]"
        else [0.5] * len(tensors)
        if "List[" in str(argument.type)
        else given.get(str(argument.type), 0.5)
        for place, argument in enumerate(operation._schema.arguments)
        if not argument.kwarg_only
    ]


PER_INDEX = [
    getattr(aten, f"_foreach_{name}").Tensor
    for name in ("addcdiv", "addcdiv_", "addcmul", "addcmul_")
]
"""They take a tensor with a number for each index, which no optimizer of torch does."""


@pytest.mark.parametrize("operation", [o for o in FOREACH if o not in PER_INDEX], ids=str)
def test_for_each_element_by_element(operation: Any) -> None:
    """What is cut up gives the same as the whole, at every index."""

    def run(tensors: list[Tensor]) -> list[Tensor]:
        arguments = _arguments(operation, tensors)
        return operation(*arguments) or arguments[0]  # type: ignore[no-any-return]

    whole = [torch.linspace(0.1, 0.9, 6), torch.linspace(0.2, 0.8, 4)]
    first, second = run([each[:2] for each in whole]), run([each[2:] for each in whole])
    joined = [torch.cat(pair) for pair in zip(first, second, strict=True)]
    torch.testing.assert_close(run(whole), joined)


def test_reductions_are_not() -> None:
    for operation in (
        aten._foreach_norm.Scalar, aten._foreach_max.default, aten.sum.default, aten.cumsum.default,
        aten.flip.default, aten.sort.default, aten.max.default, aten.mm.default, aten.t.default,
        aten.view.default, aten.index_select.default, aten.stack.default, aten.softmax.int,
    ):  # fmt: skip
        assert rule_for(operation).effect is Effect.COMBINES, operation


def test_numbers_that_leave() -> None:
    for operation in (
        aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default,
        aten.masked_select.default, aten.index.Tensor, aten.is_nonzero.default,
    ):  # fmt: skip
        assert rule_for(operation).effect is Effect.LEAVES, operation


def test_draws() -> None:
    for operation in (
        aten.normal_.default, aten.randn_like.default, aten.bernoulli.default, aten.rand.default,
        aten.native_dropout.default, aten.rrelu.default, aten.multinomial.default,
    ):  # fmt: skip
        assert rule_for(operation).effect is Effect.DRAWS, operation


def test_all_that_steps_fused_is_known() -> None:
    stepping = [each for each in _overloads("_fused_") if each._schema.name.endswith("_")]
    assert stepping
    for operation in stepping:
        rule = rule_for(operation)
        assert rule.effect is Effect.ELEMENT_WISE, operation
        assert rule.is_by_index


def test_an_operation_of_somebody_else_may_do_anything() -> None:
    with torch.library._scoped_library("shoal_rules_test", "DEF") as library:
        library.define("add(Tensor a) -> Tensor")
        assert rule_for(torch.ops.shoal_rules_test.add.default).effect is Effect.COMBINES


def test_marks_belong_to_memory() -> None:
    marks, memory = Marks(), torch.zeros(10)
    marks.begin([(memory[:4], Mark(0, Level.DATA)), (memory[4:8], Mark(1, Level.DATA))])
    assert marks.find(memory[1:3]) == Mark(0, Level.DATA)
    assert marks.find(memory[4:8].view(2, 2).t()) == Mark(1, Level.DATA)
    assert marks.find(memory[3:5]) == Mark(MIXED, Level.DATA)
    assert marks.find(memory[8:]) is None
    other = torch.zeros(3)
    marks.write(other[1:], Mark(0, Level.UNIFORM))
    assert marks.find(other) == Mark(0, Level.UNIFORM)
    del other
    marks.forget_dead()
    assert len(marks._memories) == 1
