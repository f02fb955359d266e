"""One manifest from what all ranks have written and know.

Values that belong to the whole run are the first rank's. Names and state of parameters are joined,
since a rank of a pipeline knows its own only. Random states are kept rank by rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shoal.checkpoint.format.manifest import (
    FileRecord,
    Manifest,
    SliceRecord,
    TensorRecord,
    parse_checksums,
    parse_extent,
    parse_shape,
    parse_split,
    slice_json,
    split_json,
)
from shoal.checkpoint.save.assignment import Claim, Claims
from shoal.checkpoint.save.writing import Written
from shoal.torch_support.dtypes import dtype_called, dtype_name

Receipt = dict[str, Any]
"""What a rank has written and knows, as plain data that can travel or be a file."""


def claims_json(claims: Claims) -> dict[str, Any]:
    """What a rank holds, as plain data."""
    return {
        key: [
            dtype_name(claim.dtype),
            list(claim.shape),
            claim.is_divisible,
            [
                [each.start, each.stop, None if each.split is None else split_json(each.split)]
                for each in claim.extents
            ],
        ]
        for key, claim in claims.items()
    }


def parse_claims(content: Mapping[str, Any]) -> dict[str, Claim]:
    """The inverse of `claims_json`."""
    claims = {}
    for key, (dtype, sizes, is_divisible, extents) in content.items():
        shape = parse_shape(sizes)
        claims[key] = Claim(
            dtype_called(dtype),
            shape,
            tuple(
                parse_extent(
                    [start, stop], shape, None if split is None else parse_split(split, shape)
                )
                for start, stop, split in extents
            ),
            is_divisible,
        )
    return claims


def receipt(files: Sequence[Written], values: Mapping[str, Any]) -> Receipt:
    """What this rank tells the one that writes the manifest."""
    return {"files": [_file_json(each) for each in files], "values": dict(values)}


def _file_json(written: Written) -> dict[str, Any]:
    record = written.file
    return {
        "about": [record.name, record.num_bytes, record.sha256, record.header_crc32],
        "slices": [[tensor, slice_json(each)] for tensor, each in written.slices],
    }


def merge(
    receipts: Sequence[Receipt],
    claims: Sequence[Claims],
    step: int | None,
    written_by: Mapping[str, Any],
) -> Manifest:
    """The manifest of all ranks' files."""
    about: dict[str, tuple[torch.dtype, torch.Size]] = {}
    for own in claims:
        for key, claim in own.items():
            about.setdefault(key, (claim.dtype, claim.shape))
    slices: dict[str, list[SliceRecord]] = {key: [] for key in about}
    files = [file for each in receipts for file in each["files"]]
    for number, file in enumerate(files):
        for key, content in file["slices"]:
            slices[key].append(_slice(content, number, about[key][1]))
    return Manifest(
        files=tuple(FileRecord(*file["about"]) for file in files),
        tensors={key: TensorRecord(*about[key], tuple(slices[key])) for key in about},
        values={"step": step, **merge_values([each["values"] for each in receipts])},
        written_by=written_by,
    )


def _slice(content: Mapping[str, Any], number: int, shape: torch.Size) -> SliceRecord:
    split = None if "split" not in content else parse_split(content["split"], shape)
    extent = parse_extent(content["elements"], shape, split)
    return SliceRecord(extent, number, content["key"], parse_checksums(content["checksums"]))


def merge_values(by_rank: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Everybody's values as one."""
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
    """The first to know something is believed."""
    merged: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            merged.setdefault(key, value)
    return merged
