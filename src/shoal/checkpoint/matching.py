"""Which tensor of a checkpoint is which of a model, and what does not fit. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from shoal.errors import CheckpointMismatchError

_MOST_NAMES = 30
PREFIX = "model/"


@dataclass
class Match:
    """How a model's names are found in a checkpoint.

    Attributes:
        keys: The checkpoint's key for each name that was found.
        missing: Names that are not in the checkpoint.
        misshapen: Names with the shape in the checkpoint and the one in the model.
        known: All names that the model has, ties included.
    """

    keys: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    misshapen: list[tuple[str, list[int], list[int]]] = field(default_factory=list)
    known: list[str] = field(default_factory=list)


def match(
    shapes: Mapping[str, torch.Size],
    ties: Mapping[str, str],
    stored: Mapping[str, torch.Size],
    stored_ties: Mapping[str, str],
) -> Match:
    """Finds each tensor of the model, under any of its names.

    Args:
        shapes: The full shapes of the model's tensors, by first name.
        ties: The model's further names, each with the first.
        stored: The full shapes in the checkpoint, by key.
        stored_ties: The checkpoint's further names, each with the first.
    """
    result = Match(known=[*shapes, *ties])
    further: dict[str, list[str]] = {}
    for alias, first in ties.items():
        further.setdefault(first, []).append(alias)
    for name, shape in shapes.items():
        names = [name, *further.get(name, ())]
        names += [stored_ties[each] for each in names if each in stored_ties]
        found = next((PREFIX + each for each in names if PREFIX + each in stored), None)
        if found is None:
            result.missing.append(name)
        elif stored[found] != shape:
            result.misshapen.append((name, list(stored[found]), list(shape)))
        else:
            result.keys[name] = found
    return result


def check(
    matches: Sequence[Match],
    stored: Iterable[str],
    stored_ties: Mapping[str, str],
    what: str,
) -> None:
    """Raises if anything does not fit, on any rank.

    Args:
        matches: Of all ranks: a rank of a pipeline knows a part of the names only.
        stored: The checkpoint's keys.
        stored_ties: The checkpoint's further names, each with the first.
        what: Where it was read from.
    """
    known = {name for each in matches for name in each.known}
    used = {key for each in matches for key in each.keys.values()}
    used |= {PREFIX + name for each in matches for name, _, _ in each.misshapen}
    # A tensor that the model has under another name is no surprise.
    known |= {first for alias, first in stored_ties.items() if alias in known}
    unexpected = [
        key.removeprefix(PREFIX)
        for key in stored
        if key.startswith(PREFIX) and key not in used and key.removeprefix(PREFIX) not in known
    ]
    missing = dict.fromkeys(name for each in matches for name in each.missing)
    misshapen = {name: (old, new) for each in matches for name, old, new in each.misshapen}
    lines = []
    if missing:
        lines.append(f"missing in the checkpoint: {_listed(list(missing))}")
    if unexpected:
        lines.append(f"not in the model: {_listed(unexpected)}")
    if misshapen:
        texts = [
            f"{name} ({tuple(old)} in the checkpoint, {tuple(new)} in the model)"
            for name, (old, new) in misshapen.items()
        ]
        lines.append(f"of another shape: {_listed(texts)}")
    if lines:
        raise CheckpointMismatchError(
            f"{what} does not fit the model. "
            + "; ".join(lines)
            + ". Pass strict=False to load what fits."
        )


def _listed(names: Sequence[str]) -> str:
    text = ", ".join(names[:_MOST_NAMES])
    rest = len(names) - _MOST_NAMES
    return f"{text} and {rest} more" if rest > 0 else text
