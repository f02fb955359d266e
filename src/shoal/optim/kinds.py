"""What an optimizer needs to see at once: elements, whole parameters, or everything.

Torch's own optimizers are known, and so are a few others. Any other is proved to be what it is, by
following the data through its steps; what cannot be proved needs everything, so that any optimizer
is right by default.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from shoal.optim.proof.identity import telling_apart
from shoal.optim.proof.judgement import Judgement, Kind
from shoal.optim.proof.proving import prove
from shoal.optim.proof.small_copy import similar
from shoal.optim.proof.table import look_up

__all__ = ["Judgement", "Kind", "find_kind", "judge", "similar"]


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

    Args:
        optimizer: Any.
        parameters: Those of each parameter group as the user has them, where the optimizer has
            something else in their place.

    Example:
        >>> print(judge(torch.optim.AdamW([nn.Parameter(torch.zeros(2))])))
        element-wise: torch's own AdamW
    """
    known = look_up(optimizer)
    if known is not None:
        return known
    groups = optimizer.param_groups
    own = parameters or [group["params"] for group in groups]
    looks = telling_apart(optimizer, [each for group in own for each in group])
    if looks is not None:
        return Judgement(Kind.GLOBAL, looks, may_draw=True)
    found = [prove(optimizer, group, each) for group, each in zip(groups, own, strict=True)]
    if not found:
        return Judgement(Kind.GLOBAL, "it has no parameters")
    return _together(found)


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
