"""The price of a JSON text: no less than its value takes, known in little memory and few steps."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from checkpoint.memory_disk import MemoryDisk
from shoal.checkpoint.format import json_budget, plain_json
from shoal.checkpoint.format.json_budget import ROOM_BYTES, check_memory
from shoal.checkpoint.format.manifest import Manifest, encode, most_bytes, signed
from shoal.checkpoint.format.tensor_file import decode_header

FREE_BYTES = 1 << 20
HOSTILE = {
    "small objects": b'{"a":1},',
    "objects with spaces": b'{"a":1}  ,',
    "empty objects": b"{},",
    "empty lists": b"[],",
    "lists in lists": b"[[[[1]]]],",
    "short strings": b'"ab",',
    "empty strings": b'"",',
    "numbers": b"1000,",
    "fractions": b"0.5,",
    "escaped quotes": rb'"\"",',
}
"""What many of make a list."""


def text_of(unit: bytes, num_bytes: int) -> bytes:
    """A list of equal values."""
    return b'{"extra":[' + unit * (num_bytes // len(unit)) + b"0]}"


def distinct_keys(count: int) -> bytes:
    return b"{" + b",".join(b'"%d":1' % number for number in range(count)) + b"}"


def objects_of_distinct_keys(count: int) -> bytes:
    return b"[" + b",".join(b'{"%d":1}' % number for number in range(count)) + b"]"


def peak_of(action: Any) -> int:
    """The most memory that was used at once, beyond what was there before."""
    tracemalloc.start()
    try:
        base = tracemalloc.get_traced_memory()[0]
        action()
        return tracemalloc.get_traced_memory()[1] - base
    finally:
        tracemalloc.stop()


def refused(text: bytes, record: bytes = b"") -> None:
    with pytest.raises(ValueError, match="belong into a tensor"):
        plain_json.parse(text, record)


@pytest.fixture
def small_room(monkeypatch: pytest.MonkeyPatch) -> int:
    """As good as the real one, and sooner filled."""
    monkeypatch.setattr(json_budget, "ROOM_BYTES", 4 << 20)
    return 4 << 20


@pytest.mark.usefixtures("small_room")
@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_too_much_is_refused_in_little_memory(name: str) -> None:
    """Nothing is made for what is refused: not the text, not one value."""
    text = text_of(HOSTILE[name], 4 << 20)
    assert peak_of(lambda: refused(text)) < FREE_BYTES


@pytest.mark.parametrize("name", HOSTILE)
def test_a_manifest_takes_little_beyond_its_room(name: str, small_room: int) -> None:
    """With a right checksum, and as large as is just not refused."""
    unit = HOSTILE[name]
    price = json_budget._price(unit, 0, len(unit))
    text = text_of(unit, (small_room // price) * len(unit) - 4096)
    data = signed(text)

    def read() -> None:
        with pytest.raises(ValueError, match="no manifest of shoal"):
            Manifest.parse(data)

    assert peak_of(read) < 2 * len(data) + small_room + FREE_BYTES


def test_the_room_is_the_one_that_is_documented() -> None:
    assert json_budget.ROOM_BYTES == ROOM_BYTES == 64 << 20
    refused(text_of(HOSTILE["objects with spaces"], 19_000_000))
    refused(text_of(HOSTILE["short strings"], 9_000_000))


@pytest.mark.parametrize("make", [distinct_keys, objects_of_distinct_keys])
def test_keys_are_paid_for(make: Any, small_room: int) -> None:
    text = make(12_500)
    assert peak_of(lambda: plain_json.parse(text)) < 2 * len(text) + small_room
    refused(make(37_500))


@pytest.mark.parametrize("wide", [b'"aaaaaaaa\\ud83d\\ude00"', '"aaaaaaaa😀"'.encode()])
def test_one_wide_character_widens_all_others(wide: bytes) -> None:
    """A string of ASCII with one such character takes four bytes for each of its own."""
    small = wide.replace(b"a", b"a" * 100_000)
    assert peak_of(lambda: plain_json.parse(small)) < 2 * len(small) + ROOM_BYTES
    refused(wide.replace(b"a", b"a" * 4_000_000))


@pytest.mark.parametrize(
    "open_end", [b'"' + rb"\"" * 5_000_000, b'"' * 9_999_999, b'"' + b"\\" * 9_999_999]
)
def test_strings_without_an_end_take_one_pass(open_end: bytes) -> None:
    """As many steps as the budget has strings, however often a string could begin."""
    text = b"[" * 2_000_000 + open_end
    refused(text)
    room = json_budget.budget(len(text), 0)
    assert json_budget._STRING.match(rb'"\"\"', 0) is not None
    assert room // (2 * json_budget._PRICES[b'"']) < 2_000_000


def test_steps_end_with_the_budget(monkeypatch: pytest.MonkeyPatch, small_room: int) -> None:
    """Nothing is looked at twice: what was counted is not counted again."""
    seen: list[int] = []
    price = json_budget._price

    def watched(data: bytes, begin: int, end: int) -> int:
        seen.append(end - begin)
        return price(data, begin, end)

    monkeypatch.setattr(json_budget, "_price", watched)
    text = text_of(b'"ab",', 2 << 20)
    refused(text)
    assert sum(seen) <= 2 * len(text)
    assert len(seen) < small_room // 56 + 3


@pytest.mark.usefixtures("small_room")
def test_records_that_are_claimed() -> None:
    """Text that looks like records of tensors does not get more than records would."""
    text = text_of(b'{"checksums":1},', 2 << 20)
    refused(text, b'"checksums"')
    short = text_of(b'"checksums",', 1 << 19)
    assert peak_of(lambda: plain_json.parse(short, b'"checksums"')) < 16 * len(short)


def test_structure_inside_of_strings_is_none() -> None:
    """A configuration as text, however many brackets it has."""
    text = json.dumps({"config": json.dumps({"a": [[1, {"b": "c"}]] * 400_000})}).encode()
    assert check_memory(text) > 0
    assert plain_json.parse(text)["config"].startswith('{"a": [[1, {"b"')


@pytest.mark.parametrize("text", [b"[" * 100_000, b'{"a":' * 100_000], ids=["lists", "objects"])
def test_nested_without_end(text: bytes) -> None:
    with pytest.raises(ValueError, match="nested too deep"):
        plain_json.parse(text)


def test_huge_numbers() -> None:
    for number in (b"9" * 5_000_000, b"-" + b"1" * 401):
        with pytest.raises(ValueError, match="digits"):
            plain_json.parse(b"[" + number + b"]")


def test_a_header_of_safetensors() -> None:
    text = text_of(b'{"a":1},', 24 << 20)
    header = len(text).to_bytes(8, "little") + text
    with pytest.raises(ValueError, match="belong into a tensor"):
        decode_header(header, len(header))


EXTRAS = {
    "a million numbers": [number / 7 for number in range(1_000_000)],
    "a history": [{"step": step, "loss": step / 7} for step in range(100_000)],
    "a long text": "x,[{" * 4_000_000,
    "a table": {f"key {number}": [number, str(number)] for number in range(100_000)},
}


@pytest.mark.parametrize("name", EXTRAS)
def test_large_extras(name: str) -> None:
    disk, model = MemoryDisk(), nn.Linear(2, 2)
    path = shoal.save(Path("run"), model, extra={"mine": EXTRAS[name]}, filesystem=disk).path
    assert shoal.load(path, model, filesystem=disk)["mine"] == EXTRAS[name]


def test_writing_refuses_what_reading_would() -> None:
    disk, model = MemoryDisk(), nn.Linear(2, 2)
    path = shoal.save(Path("run"), model, extra={"mine": 1}, filesystem=disk).path
    with pytest.raises(ValueError, match="belong into a tensor"):
        shoal.save(Path("run"), model, extra={"mine": [{"a": 1}] * 400_000}, filesystem=disk)
    assert shoal.load(Path("run"), model, filesystem=disk) == {"mine": 1}
    assert shoal.load(path, model, filesystem=disk) == {"mine": 1}


def test_a_manifest_may_grow_with_its_data() -> None:
    text = "x" * most_bytes(0)
    content = {"files": [{"bytes": 0}], "tensors": {}}
    with pytest.raises(ValueError, match="can be read again"):
        encode(content, {"extra": text}, {})
    content["files"] = [{"bytes": 16 << 30}]
    assert len(encode(content, {"extra": text}, {})) <= most_bytes(16 << 30)


def trained(num_parameters: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.ParameterList([torch.ones(1) for _ in range(num_parameters)])
    for parameter in model:
        parameter.grad = torch.ones(1)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("count", [1000, pytest.param(100_000, marks=pytest.mark.full)])
@pytest.mark.timeout(600)
def test_many_tensors_need_no_room(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What each record of a tensor may take is enough for it, its optimizer's values included.

    Price and budget grow with the number of tensors alike, so a thousand tell as much as more.
    """
    monkeypatch.setattr(json_budget, "ROOM_BYTES", 0)
    disk, (model, optimizer) = MemoryDisk(), trained(count)
    path = shoal.save(Path("run"), model, optimizer, filesystem=disk).path
    data = bytes(disk._find(path / "manifest.json").data)
    read: list[Manifest] = []
    assert peak_of(lambda: read.append(Manifest.parse(data))) < 9 * len(data)
    assert len(read[0].tensors) > 3 * count
    shoal.load(path, model, optimizer, filesystem=disk)
