"""Which tensor of a checkpoint is which of a model, and what does not fit. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from shoal.errors import CheckpointMismatchError
from shoal.system.rank_names import list_names

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
    """Finds each tensor of the model, under any of its names; ties are further names of a first."""
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


@dataclass(frozen=True)
class Misfits:
    """What a checkpoint and a model do not have in common.

    Attributes:
        missing: Names that only the model has.
        unexpected: Names that only the checkpoint has.
        misshapen: Names with the shape in the checkpoint and the one in the model.
        has_anything: Whether anything fits at all.
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misshapen: dict[str, tuple[list[int], list[int]]] = field(default_factory=dict)
    has_anything: bool = True

    def check(self, what: str, *, strict: bool) -> None:
        """Raises if there are any; without ``strict`` only if nothing fits."""
        lines = self._lines()
        if lines and strict:
            lines[-1] += ". Pass strict=False to load what fits."
        elif self.has_anything:
            return
        raise CheckpointMismatchError(f"{what} does not fit the model. " + "; ".join(lines))

    def _lines(self) -> list[str]:
        lines = []
        if self.missing:
            lines.append(f"missing in the checkpoint: {list_names(self.missing, _MOST_NAMES)}")
        if self.unexpected:
            lines.append(f"not in the model: {list_names(self.unexpected, _MOST_NAMES)}")
        if self.misshapen:
            texts = [
                f"{name} ({tuple(old)} in the checkpoint, {tuple(new)} in the model)"
                for name, (old, new) in self.misshapen.items()
            ]
            lines.append(f"of another shape: {list_names(texts, _MOST_NAMES)}")
        return lines


def compare(
    matches: Sequence[Match], stored: Iterable[str], stored_ties: Mapping[str, str]
) -> Misfits:
    """What does not fit on any rank: one of a pipeline knows a part of the names only."""
    known = {name for each in matches for name in each.known}
    found = {key for each in matches for key in each.keys.values()}
    used = found | {PREFIX + name for each in matches for name, _, _ in each.misshapen}
    # A tensor that the model has under another name is no surprise.
    known |= {first for alias, first in stored_ties.items() if alias in known}
    unexpected = [
        key.removeprefix(PREFIX)
        for key in stored
        if key.startswith(PREFIX) and key not in used and key.removeprefix(PREFIX) not in known
    ]
    missing = dict.fromkeys(name for each in matches for name in each.missing)
    misshapen = {name: (old, new) for each in matches for name, old, new in each.misshapen}
    return Misfits(list(missing), unexpected, misshapen, bool(found) or not known)
