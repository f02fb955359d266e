"""Decides what kind an optimizer is of: it is known, proved, or declared by the user.

Torch's own optimizers are known, and so are a few others. Any other is proved to be what it is, by
following the data through its steps. What cannot be proved needs everything, so that any optimizer
is right by default.

A step that goes by which parameter it has in hand (``p is self.first``, ``self.scales[id(p)]``), or
by an attribute that was written on it (``p.lr_scale``), does something else with any stand-in. No
operation shows that, so such an optimizer is given the parameters themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shoal.optim.kinds import Kind
from shoal.optim.proof.judgement import Judgement
from shoal.optim.proof.known import look_up
from shoal.optim.proof.proving import prove
from shoal.optim.proof.watching import names_written_on
from shoal.optim.state import has_more_to_save
from shoal.torch_internals.optimizers import has_own_step
from shoal.torch_internals.trees import tree_leaves

_OF_TORCH = {"param_groups", "state", "defaults"}


def find_kind(optimizer: Optimizer) -> Kind:
    """The finest division that leaves the result unchanged, up to rounding.

    Example:
        >>> find_kind(torch.optim.AdamW([nn.Parameter(torch.zeros(2))])).value
        'element-wise'
    """
    return judge(optimizer).kind


def judge(
    optimizer: Optimizer, parameters: Sequence[Sequence[nn.Parameter]] | None = None
) -> Judgement:
    """The kind of an optimizer, and how it is known.

    ``parameters`` are the user's, where the optimizer has something else in their place.

    Example:
        >>> print(judge(torch.optim.AdamW([nn.Parameter(torch.zeros(2))])))
        element-wise: torch's own AdamW
    """
    if has_own_step(optimizer):
        return Judgement(Kind.GLOBAL, "its `step` was replaced on the object", may_draw=True)
    if has_more_to_save(optimizer):
        return Judgement(
            Kind.GLOBAL, "its `state_dict` has more than the state of parameters", may_draw=True
        )
    known = look_up(optimizer)
    if known is not None:
        return known
    groups = optimizer.param_groups
    own = parameters or [group["params"] for group in groups]
    looks = _tells_apart_by(optimizer, [each for group in own for each in group])
    if looks is not None:
        return Judgement(Kind.GLOBAL, looks, may_draw=True)
    found = [prove(optimizer, group, each) for group, each in zip(groups, own, strict=True)]
    if not found:
        return Judgement(Kind.GLOBAL, "it has no parameters")
    return _together(found)


def judge_or_believe(optimizer: Optimizer, kind: Kind | str | Judgement | None) -> Judgement:
    """What was decided already, what the user declares, or what `judge` finds.

    A declared kind is believed; whether the steps draw random numbers is found out all the same.
    """
    if isinstance(kind, Judgement):
        return kind
    found = judge(optimizer)
    if kind is None:
        return found
    # An optimizer of which no small copy can be stepped may draw, too.
    may_draw = found.draws or (found.may_draw and not found.kind.is_divisible)
    return Judgement(Kind(kind), "declared by you", draws=found.draws, may_draw=may_draw)


def _together(found: Sequence[Judgement]) -> Judgement:
    """The coarsest of all parameter groups, with what is known of any."""
    order = list(Kind)
    coarsest = max(found, key=lambda each: order.index(each.kind))
    names = {name for each in found for name in each.marked_state}
    return Judgement(
        coarsest.kind,
        coarsest.reason,
        is_watched=coarsest.is_watched,
        draws=any(each.draws for each in found),
        may_draw=any(each.may_draw for each in found),
        written_options=frozenset().union(*(each.written_options for each in found)),
        marked_state={
            name: any(each.marked_state.get(name, False) for each in found) for name in names
        },
    )


def _tells_apart_by(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> str | None:
    """By what the optimizer could tell parameters apart, in words; None for nothing."""
    written = names_written_on(parameters)
    if written:
        return f"its step may look at `{min(written)}`, which is written on a parameter"
    numbers = {id(parameter) for parameter in parameters}
    for name, value in vars(optimizer).items():
        if name not in _OF_TORCH and any(_refers_to(leaf, numbers) for leaf in _leaves(value)):
            return f"its step may tell parameters apart by `{name}`"
    return None


def _leaves(value: Any) -> list[Any]:
    keys = list(value) if isinstance(value, dict) else []
    return [*tree_leaves(value), *keys]


def _refers_to(leaf: Any, numbers: set[int]) -> bool:
    if isinstance(leaf, int) and not isinstance(leaf, bool):
        return leaf in numbers
    return id(leaf) in numbers
