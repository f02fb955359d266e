"""Manifests: what files hold, joined from parts, written and read again."""

from __future__ import annotations

import pytest
import torch

from shoal.checkpoint.format.manifest import (
    Content,
    FileRecord,
    Manifest,
    SliceRecord,
    content_of,
    encode,
    extent_json,
    joined,
    parse_extent,
)
from shoal.sharding.extent import Extent
from shoal.sharding.split import Split

SHAPE = torch.Size([4, 6])


def part(number: int, start: int, stop: int) -> Content:
    """A file with some elements of one tensor, and a tensor of its own."""
    file = FileRecord(f"data-{number}.safetensors", 1000, "0" * 64, number)
    some = SliceRecord(Extent(SHAPE, start, stop), 0, f"a[{start}:{stop}]", (number,))
    own = SliceRecord(Extent.whole(torch.Size([])), 0, f"b{number}", (7,))
    return content_of(file, [("a", torch.float32, some), (f"b{number}", torch.int8, own)])


def test_parts_are_joined() -> None:
    content = joined([part(0, 0, 10), part(1, 10, 24)], ["b1", "a", "b0"])
    manifest = Manifest.parse(encode(content, {"step": 3}, {"host": "here"}))
    assert [file.name for file in manifest.files] == ["data-0.safetensors", "data-1.safetensors"]
    assert list(manifest.tensors) == ["b1", "a", "b0"]
    whole = manifest.tensors["a"]
    assert (whole.dtype, whole.shape) == (torch.float32, SHAPE)
    assert [(each.file, each.extent.start, each.checksums) for each in whole.slices] == [
        (0, 0, (0,)),
        (1, 10, (1,)),
    ]
    assert [each.file for each in manifest.tensors["b1"].slices] == [1]
    assert (manifest.values, manifest.written_by) == ({"step": 3}, {"host": "here"})


def test_elements_that_are_in_no_file() -> None:
    data = encode(joined([part(0, 0, 10)], ["a", "b0"]), {}, {})
    with pytest.raises(ValueError, match="in no file"):
        Manifest.parse(data)


@pytest.mark.parametrize("split", [None, Split(SHAPE, 1, ((0, 1), (3, 5)))])
def test_extents(split: Split | None) -> None:
    extent = Extent.whole(SHAPE, split).narrowed(3, 7)
    assert parse_extent(extent_json(extent), SHAPE) == extent
