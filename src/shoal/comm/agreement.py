"""Decisions that all ranks make together, so that none stops training while others go on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.comm.backend import Backend
from shoal.comm.objects import encoding
from shoal.errors import MismatchError
from shoal.system.rank_names import name_ranks

WAYS = ("any", "all", "same", "max", "min", "mean", "first")
_FOR_ANYTHING = ("same", "first")


def agree(backend: Backend, value: Any, how: str | None) -> Any:
    """The one value that all ranks of a group go on with; see `World.agree`.

    Every rank sees all values and decides for itself, from the same list in the same order, so
    that the answers are equal to the last bit.
    """
    mine = _plain(value)
    how = how or _usual_way(mine)
    _check(mine, how)
    answers = backend.all_gather_object((how, type(mine).__name__, mine))
    ways, kinds, values = zip(*answers, strict=True)
    _check_same_question(ways, kinds, how)
    return _decide(values, how)


def _plain(value: Any) -> Any:
    """Numbers as Python has them, also those that come as scalar tensors."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return value.item()
    return value


def _usual_way(value: Any) -> str:
    if isinstance(value, bool):
        return "any"
    if isinstance(value, int | float):
        return "mean"
    raise TypeError(
        f"ranks can agree on a bool, a number or a scalar tensor by themselves; for "
        f'{type(value).__name__} say how: "first" (rank 0\'s counts) or "same" (an error if '
        "they differ)"
    )


def _check(value: Any, how: str) -> None:
    if how not in WAYS:
        raise ValueError(f"how must be one of {', '.join(WAYS)}; got {how!r}")
    if how in ("any", "all") and not isinstance(value, bool):
        raise TypeError(f"{how!r} is for bools, got {type(value).__name__}: compare it first")
    if how not in _FOR_ANYTHING and not isinstance(value, int | float):
        raise TypeError(
            f'{how!r} needs a bool or a number, got {type(value).__name__}: use "first" or "same"'
        )


def _check_same_question(ways: Sequence[str], kinds: Sequence[str], how: str) -> None:
    """A bool here and a loss there, or two ways to decide, is two different questions."""
    if len(set(ways)) > 1:
        raise MismatchError(f"the ranks want to agree in different ways: {by_rank(ways)}")
    if how not in _FOR_ANYTHING and len({kind == "bool" for kind in kinds}) > 1:
        raise MismatchError(f"the ranks want to agree on different kinds: {by_rank(kinds)}")


def _decide(values: Sequence[Any], how: str) -> Any:
    if how == "first":
        return values[0]
    if how == "same":
        return _the_same(values)
    if how in ("any", "all"):
        return any(values) if how == "any" else all(values)
    if any(math.isnan(value) for value in values):  # max and min would depend on the order
        return math.nan
    if how == "mean":
        return math.fsum(values) / len(values)
    return max(values) if how == "max" else min(values)


def _the_same(values: Sequence[Any]) -> Any:
    if not all(_are_equal(values[0], value) for value in values[1:]):
        raise MismatchError(f"the ranks must have the same value, but: {by_rank(values)}")
    return values[0]


def _are_equal(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        both = isinstance(left, Tensor) and isinstance(right, Tensor)
        return both and left.dtype == right.dtype and torch.equal(left, right)
    try:
        return bool(left == right) or (left != left and right != right)
    except Exception:  # arrays and tensors inside of something: their bytes can be compared
        return encoding.encode(left) == encoding.encode(right)


def by_rank(values: Sequence[Any], ranks: Sequence[int] | None = None) -> str:
    """Who has which value, as in "ranks 0, 2: 3; rank 1: 4": the odd one out is seen.

    ``ranks`` are those the values are of; 0 and up by default.
    """
    holders: dict[str, list[int]] = {}
    for rank, value in zip(ranks or range(len(values)), values, strict=True):
        holders.setdefault(_shortened(value), []).append(rank)
    if len(holders) == 1:  # they differ where the text does not show it
        return f"all print as {next(iter(holders))}"
    return "; ".join(f"{name_ranks(who)}: {text}" for text, who in holders.items())


def _shortened(value: Any, longest: int = 200) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= longest else f"{text[: longest - 3]}..."
