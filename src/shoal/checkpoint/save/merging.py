"""One manifest from what all ranks have written and know.

Values that belong to the whole run are the first rank's. Names and state of parameters are joined,
since a rank of a pipeline knows its own only. Random states are kept rank by rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shoal.checkpoint.format.manifest import Manifest, joined

Receipt = dict[str, Any]
"""What a rank has written and knows: a manifest as plain data, that can be sent or be a file."""


def merge(
    receipts: Sequence[Receipt],
    keys: Iterable[str],
    step: int | None,
    written_by: Mapping[str, Any],
) -> Manifest:
    """The manifest of all ranks' files, with the tensors in the order of ``keys``."""
    parts = [Manifest.from_json(each) for each in receipts]
    values = {"step": step, **merge_values([part.values for part in parts])}
    return joined(parts, keys, values, written_by)


def merge_values(by_rank: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One set of values from those of each rank."""
    first = by_rank[0]
    merged = {
        key: first[key] for key in ("scheduler", "scaler", "sampler", "extra") if key in first
    }
    merged["random"] = [values["random"] for values in by_rank]
    merged["model"] = {
        part: _union([values["model"][part] for values in by_rank])
        for part in ("aliases", "extra_state")
    }
    counts = {len(values["optimizers"]) for values in by_rank}
    if len(counts) != 1:
        raise ValueError(f"ranks save different numbers of optimizers: {sorted(counts)}")
    merged["optimizers"] = [
        _merge_optimizer([values["optimizers"][number] for values in by_rank])
        for number in range(counts.pop())
    ]
    return merged


def _merge_optimizer(by_rank: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    longest = max(by_rank, key=lambda own: len(own["groups"]))
    groups = []
    for which, group in enumerate(longest["groups"]):
        named = [own["groups"][which] for own in by_rank if which < len(own["groups"])]
        names = dict.fromkeys(name for each in named for name in each["parameters"])
        groups.append({"parameters": list(names), "options": group["options"]})
    state = _union([own["state"] for own in by_rank])
    about = {key: longest[key] for key in ("class", "streams")}
    return {**about, "groups": groups, "state": state}


def _union(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All entries; of several for one key the first rank's."""
    merged: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            merged.setdefault(key, value)
    return merged
