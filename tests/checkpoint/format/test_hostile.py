"""Manifests and headers made to do harm: an error or a correct answer, in little memory."""

from __future__ import annotations

import copy
import functools
import json
import random
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from checkpoint.memory_disk import MemoryDisk
from shoal.checkpoint.format.manifest import Manifest, signed
from shoal.checkpoint.format.plain_json import parse
from shoal.checkpoint.format.tensor_file import decode_header, header_bytes
from shoal.checkpoint.load.slice_reader import read_tensors
from shoal.checkpoint.tools import open_any, verify
from shoal.errors import CheckpointError

ROOT = Path("run")
DATA = "data-00000.safetensors"
FREE_BYTES = 2 << 20
"""What a small file may take anyway: the interpreter's and torch's own."""

POISON: list[Any] = [
    None, True, False, -1, 0, 1, 2**31, 2**63 - 1, 2**63, 2**64, 10**300, -(2**63), 0.5, 1e308,
    "", "..", "../../../etc/passwd", "/dev/zero", "a" * 5000, "\0", "\ud7ff", "$tensor", "F32",
    "float32", [], {}, [[]], [0], [0, 0], [2**62, 2**62], [-1, 5], [5, 1],
    {"$tensor": "model/weight"}, {"$tensor": {"dtype": "float32", "shape": [2**40], "data": ""}},
    {"$dict": [[[], 1]]},
    {"$set": [[]]}, {"$float": "boom"}, {"$bytes": "?"}, {"dim": 0, "runs": [[0, 2**62]]},
    {"dim": 10**9, "runs": []}, {"dim": 1, "runs": [[0, 1], [0, 1]]},
]  # fmt: skip


def saved() -> tuple[MemoryDisk, Path]:
    disk = MemoryDisk()
    torch.manual_seed(0)
    model = nn.Linear(40, 30)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 40)).sum().backward()
    optimizer.step()
    extra = {"note": torch.arange(100), "list": [1, {"a": (2, 3)}]}
    return disk, shoal.save(ROOT, model, optimizer, extra=extra, filesystem=disk).path


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, list) else items
    for key, inner in items:
        found += places(inner, (*path, key))
    return found


def mutate_tree(tree: Any, dice: random.Random) -> Any:
    """One to three changes anywhere: another value, a missing or moved one, another key."""
    tree = copy.deepcopy(tree)
    for _ in range(dice.randint(1, 3)):
        spots = places(tree)
        if not spots:
            return tree
        *above, last = dice.choice(spots)
        node = tree
        for key in above:
            node = node[key]
        what = dice.random()
        if what < 0.6:
            node[last] = copy.deepcopy(dice.choice(POISON))
        elif what < 0.75:
            del node[last]
        elif what < 0.9 or not isinstance(node, dict):
            donor = tree
            for key in dice.choice(spots):
                if isinstance(donor, dict | list):
                    donor = donor[key] if not isinstance(donor, dict) or key in donor else donor
            node[last] = copy.deepcopy(donor)
        else:
            node[str(dice.choice(POISON))[:100]] = node.pop(last)
    return tree


def mutate_bytes(data: bytes, dice: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(dice.randint(1, 4)):
        place = dice.randrange(len(changed) or 1)
        what = dice.random()
        if what < 0.5 and changed:
            changed[place % len(changed)] = dice.randrange(256)
        elif what < 0.7:
            changed[place:place] = dice.choice([b"[", b"{", b'"', b"9" * 30, b",", b"[" * 3000])
        elif what < 0.9:
            del changed[place : place + dice.randint(1, 40)]
        else:
            changed += changed[place : place + 200]
    return bytes(changed)


def attempt(disk: MemoryDisk, path: Path) -> bool:
    """Whether it loads; any other end than an error of ours is one that escapes."""
    model, optimizer, before = untouched()
    try:
        shoal.load(path, model, optimizer, filesystem=disk, random_state=True)
    except CheckpointError:
        assert torch.equal(model.weight, before[0])
        assert torch.equal(model.bias, before[1])
        assert not optimizer.state
        return False
    untouched.cache_clear()
    return True


@functools.cache
def untouched() -> Any:
    """A model and an optimizer; used again as long as nothing was loaded into them."""
    model = nn.Linear(40, 30)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    return model, torch.optim.AdamW(model.parameters()), before


class Attack:
    """Mutants of one good checkpoint."""

    def __init__(self) -> None:
        self.disk, self.path = saved()
        self.manifest = self.disk._find(self.path / "manifest.json")
        self.data = self.disk._find(self.path / DATA)
        self.good = bytes(self.manifest.data), bytes(self.data.data)
        self.tree = parse(b"{" + self.good[0].partition(b"\n")[2])
        self.head = header_bytes(self.good[1], len(self.good[1]))

    def manifest_tree(self, dice: random.Random) -> None:
        text = json.dumps(mutate_tree(self.tree, dice)).encode()
        self.manifest.data = bytearray(signed(text))

    def manifest_bytes(self, dice: random.Random) -> None:
        text = b"{" + self.good[0].partition(b"\n")[2]
        self.manifest.data = bytearray(signed(mutate_bytes(text, dice)))

    def header_tree(self, dice: random.Random) -> None:
        tree = mutate_tree(parse(self.good[1][8 : self.head]), dice)
        self._put_header(json.dumps(tree).encode())

    def header_bytes(self, dice: random.Random) -> None:
        head = mutate_bytes(self.good[1][8 : self.head], dice)
        self._put_header(head, len(head) if dice.random() < 0.7 else dice.getrandbits(64))

    def _put_header(self, head: bytes, length: int | None = None) -> None:
        """In a file whose checksums were all made anew: only the header itself is wrong."""
        prefix = (len(head) if length is None else length).to_bytes(8, "little")
        self.data.data = bytearray(prefix + head + self.good[1][self.head :])
        tree = copy.deepcopy(self.tree)
        tree["files"][0]["bytes"] = len(self.data.data)
        tree["files"][0]["header_crc32"] = f"{zlib.crc32(prefix + head):08x}"
        self.manifest.data = bytearray(signed(json.dumps(tree).encode()))

    def restore(self) -> None:
        self.manifest.data, self.data.data = map(bytearray, self.good)


KINDS = ["manifest_tree", "manifest_bytes", "header_tree", "header_bytes"]


def attack(kind: str, count: int, seed: int) -> int:
    """Returns how many mutants loaded."""
    mutants, dice = Attack(), random.Random(seed)
    loaded = 0
    for _ in range(count):
        getattr(mutants, kind)(dice)
        loaded += attempt(mutants.disk, mutants.path)
        mutants.restore()
    assert attempt(mutants.disk, mutants.path)
    return loaded


@pytest.mark.parametrize("kind", KINDS)
def test_some_mutants(kind: str) -> None:
    assert attack(kind, 150, seed=1) < 150


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(2, 7))
@pytest.mark.parametrize("kind", KINDS)
def test_all_mutants(kind: str, seed: int) -> None:
    """5,000 each: 100,000 in all."""
    attack(kind, 5_000, seed)


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_bounded(kind: str) -> None:
    mutants, dice = Attack(), random.Random(9)
    attempt(mutants.disk, mutants.path)
    tracemalloc.start()
    try:
        for _ in range(25):
            getattr(mutants, kind)(dice)
            size = len(mutants.manifest.data) + len(mutants.data.data)
            tracemalloc.reset_peak()
            base = tracemalloc.get_traced_memory()[0]
            attempt(mutants.disk, mutants.path)
            assert tracemalloc.get_traced_memory()[1] - base < 2 * size + FREE_BYTES
            mutants.restore()
    finally:
        tracemalloc.stop()


BOMBS = {
    "lists": b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "empty lists": b'{"a":[' + b"[]," * 3_000_000 + b"[]]}",
    "objects": b'{"a":[' + b"{}," * 3_000_000 + b"{}]}",
    "digits": b'{"a":' + b"9" * 3_000_000 + b"}",
    "not a number": b'{"a": NaN}',
    "twice": b'{"a": 1, "a": 2}',
    "no text": b'{"a": "\xff\xfe"}',
    "a list": b"[1, 2]",
    "nothing": b"",
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs(name: str) -> None:
    text = BOMBS[name]
    head = len(text).to_bytes(8, "little") + text
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"."):
            decode_header(head, len(head))
        with pytest.raises(ValueError, match=r"."):
            Manifest.parse(signed(text))
        assert tracemalloc.get_traced_memory()[1] < 4 * len(head) + FREE_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("tensors", "complaint"),
    [
        ({"a": ["F32", [2**62], [0, 2**64]]}, "no proper data_offsets"),
        ({"a": ["F32", [2**40], [0, 16]]}, "cannot have 16 bytes"),
        ({"a": ["F32", [4], [0, 16]], "b": ["F32", [4], [8, 24]]}, "not where the one before"),
        ({"a": ["F32", [4], [8, 24]]}, "not where the one before"),
        ({"a": ["F32", [4], [16, 0]]}, "cannot have -16 bytes"),
        ({"a": ["Q99", [4], [0, 16]]}, "no dtype of safetensors"),
        ({"a": ["F32", [-4], [0, 16]]}, "no proper shape"),
        ({"a": ["F32", [True], [0, 4]]}, "no proper shape"),
        ({"a": ["F32", [3], [0, 12]]}, "the file at"),
    ],
)
def test_headers_that_lie(tensors: dict[str, Any], complaint: str) -> None:
    content = {
        name: {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        for name, (dtype, shape, offsets) in tensors.items()
    }
    text = json.dumps(content).encode()
    head = len(text).to_bytes(8, "little") + text
    with pytest.raises(ValueError, match=complaint):
        decode_header(head, len(head) + 16)


def test_a_tensor_that_no_file_has_all_of() -> None:
    """Memory that nothing was read into must not be handed out."""
    mutants = Attack()
    tree = copy.deepcopy(mutants.tree)
    slices = tree["tensors"]["model/weight"]["slices"]
    slices[0]["elements"] = [0, 600]
    slices[0]["checksums"] = "0" * 16
    mutants.manifest.data = bytearray(signed(json.dumps(tree).encode()))
    assert not attempt(mutants.disk, mutants.path)


def test_one_slice_for_many_tensors() -> None:
    """A small file must not become a thousand large tensors."""
    mutants = Attack()
    tree = copy.deepcopy(mutants.tree)
    for number in range(1000):
        tree["tensors"][f"model/{number}"] = tree["tensors"]["model/weight"]
    mutants.manifest.data = bytearray(signed(json.dumps(tree).encode()))
    assert not attempt(mutants.disk, mutants.path)


@pytest.mark.parametrize("value", [{"$tensor": {"dtype": "int8", "shape": [2], "data": "0101"}}])
@pytest.mark.parametrize("option", ["capturable", "fused"])
def test_options_that_are_no_options(option: str, value: Any) -> None:
    mutants = Attack()
    tree = copy.deepcopy(mutants.tree)
    tree["values"]["optimizers"][0]["groups"][0]["options"][option] = value
    mutants.manifest.data = bytearray(signed(json.dumps(tree).encode()))
    assert not attempt(mutants.disk, mutants.path)


def test_state_of_another_shape_than_its_parameter() -> None:
    mutants = Attack()
    tree = copy.deepcopy(mutants.tree)
    key = next(key for key in tree["tensors"] if key.endswith("weight/exp_avg"))
    tree["tensors"][key]["shape"] = [1200]
    mutants.manifest.data = bytearray(signed(json.dumps(tree).encode()))
    assert not attempt(mutants.disk, mutants.path)


def test_the_good_one_is_good() -> None:
    mutants = Attack()
    source = open_any(mutants.path, mutants.disk)
    verify(source)
    assert set(read_tensors(source, source.tensors)) == set(source.tensors)
