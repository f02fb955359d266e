"""What each of torch's operations does with the data of its operands.

[Note: what is known of operations]
Torch tags operations that work element by element (``pointwise``), that draw random numbers, and
whose result or shape is a number that leaves the tensors. The tags miss some writes in place,
copies and masks, which are listed here, and all of ``_foreach_*`` and ``_fused_*``. An operation
that is neither tagged nor listed may combine all elements of all its operands.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Any, NamedTuple

import torch

from shoal.torch_internals.tensors import schema_of

_UNTAGGED = frozenset(
    [
        "_to_copy", "abs_", "alias", "clone", "copy", "copy_", "detach", "detach_", "fill", "fill_",
        "lift", "lift_fresh", "masked_fill", "masked_fill_", "rsub", "xlogy_", "zero", "zero_",
        "_foreach_copy", "_foreach_copy_", "_foreach_zero", "_foreach_zero_",
        "_fused_adagrad", "_fused_adagrad_", "_fused_adam", "_fused_adam_", "_fused_adamw",
        "_fused_adamw_", "_fused_sgd", "_fused_sgd_",
    ]
)  # fmt: skip
"""Element by element without the tag."""
_FOREACH = "_foreach_"
# Named like operations that have the tag: the largest of a tensor, not of two tensors.
_REDUCING = frozenset(["_foreach_max", "_foreach_mm", "_foreach_norm", "_foreach_powsum"])
# What fused kernels call the numbers of steps; some say that they write to them.
_COUNTERS = "state_steps"
_LEAVING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Effect(Enum):
    """What an operation does with the elements of its operands."""

    ELEMENT_WISE = auto()
    """Each element of the result depends on the same element of the operands."""
    MASKS = auto()
    """As `ELEMENT_WISE`, if the index is a mask and one number is written."""
    LIKE = auto()
    """It looks at the shape of its operand only."""
    DRAWS = auto()
    """It draws random numbers."""
    LEAVES = auto()
    """A number computed from the elements leaves the tensors."""
    REPLACES_MEMORY = auto()
    """A tensor gets other memory."""
    COMBINES = auto()
    """Anything else: each element of the result may depend on all of all operands."""


_NAMED = {
    "index_put": Effect.MASKS,
    "index_put_": Effect.MASKS,
    "set_": Effect.REPLACES_MEMORY,
    **dict.fromkeys(["zeros_like", "ones_like", "full_like", "empty_like"], Effect.LIKE),
    **dict.fromkeys(["new_zeros", "new_ones", "new_full", "new_empty"], Effect.LIKE),
    "new_empty_strided": Effect.LIKE,
}


_SHOWN = {"_local_scalar_dense": "item"}
"""What users call them."""


class Rule(NamedTuple):
    """What is known of one overload of an operation."""

    name: str  # what users call it
    effect: Effect  # what it does
    is_by_index: bool  # whether its operands are lists of which each index is on its own
    written: tuple[tuple[int, str], ...]  # the arguments that it writes to, by index and by name


_RULES: dict[int, tuple[Any, Rule]] = {}
"""By identity, because operations take long to hash; each is kept with its rule."""


def rule_for(operation: Any) -> Rule:
    """What is known of an operation, as a dispatch mode gets it."""
    known = _RULES.get(id(operation))
    if known is None:
        known = _RULES[id(operation)] = operation, _made_rule(operation)
    return known[1]


def _made_rule(operation: Any) -> Rule:
    schema = schema_of(operation)
    name = schema.name.partition("::")[2]
    is_known = schema.name.startswith("aten::")  # others may have any name
    return Rule(
        _SHOWN.get(name, name),
        _effect(operation, name) if is_known else _foreign_effect(operation),
        is_known and (name.startswith(_FOREACH) or (name in _UNTAGGED and "_fused_" in name)),
        tuple(
            (index, argument.name)
            for index, argument in enumerate(schema.arguments)
            if argument.alias_info is not None
            and argument.alias_info.is_write
            and argument.name != _COUNTERS
        ),
    )


def _effect(operation: Any, name: str) -> Effect:
    found = _foreign_effect(operation)
    if found is not Effect.COMBINES:
        return found
    if name in _NAMED:
        return _NAMED[name]
    is_element_wise = (
        torch.Tag.pointwise in operation.tags or name in _UNTAGGED or _is_tagged_for_each(name)
    )
    return Effect.ELEMENT_WISE if is_element_wise else Effect.COMBINES


def _foreign_effect(operation: Any) -> Effect:
    """What tags and types say, also for operations that are not torch's own."""
    schema, tags = schema_of(operation), set(operation.tags)
    takes_generator = any("Generator" in str(argument.type) for argument in schema.arguments)
    if torch.Tag.nondeterministic_seeded in tags or takes_generator:
        return Effect.DRAWS
    returns = {str(each.type) for each in schema.returns}
    if tags & _LEAVING or returns - {"Tensor", "List[Tensor]", "Optional[Tensor]"}:
        return Effect.LEAVES
    return Effect.COMBINES


def _is_tagged_for_each(name: str) -> bool:
    """Whether ``_foreach_*`` does to each tensor of its list what has the tag."""
    if not name.startswith(_FOREACH) or name in _REDUCING:
        return False
    packet = getattr(torch.ops.aten, name.removeprefix(_FOREACH).rstrip("_"))
    return any(torch.Tag.pointwise in getattr(packet, each).tags for each in packet.overloads())
