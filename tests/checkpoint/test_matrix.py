"""What any strategy writes at any number of ranks, any other reads, and training goes on."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from checkpoint.training import (
    STRATEGIES,
    assert_same,
    build,
    load_and_train,
    on_ranks,
    state,
    train,
    train_and_save,
)

SIZES = (1, 2, 3, 4, 5, 8)
BEFORE, AFTER = range(3), range(3, 6)
KINDS = [(name, size) for name in STRATEGIES for size in SIZES]

# Each strategy and each size is a writer and a reader at least once.
PAIRS = [
    (
        (STRATEGIES[n % 5], SIZES[n % 6]),
        (STRATEGIES[(3 * n + 1) % 5], SIZES[(5 * n + 3) % 6]),
    )
    for n in range(10)
]
_written: dict[Any, Any] = {}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("matrix")


def written(root: Path, strategy: str, ranks: int) -> tuple[Path, Any]:
    """A checkpoint and the state that is in it; written once for all its readers."""
    path = root / f"{strategy}-{ranks}"
    if not path.exists():
        if strategy == "plain":
            _written[path] = train_and_save(path, strategy, BEFORE)
        else:
            states = on_ranks(train_and_save, ranks, path, strategy, BEFORE)
            for other in states[1:]:
                assert_same(states[0], other)
            _written[path] = states[0]
    return path, _written[path]


def uninterrupted() -> Any:
    model, optimizer = build()
    train(model, optimizer, [*BEFORE, *AFTER])
    return state(model, optimizer)


def check(root: Path, writer: tuple[str, int], reader: tuple[str, int]) -> None:
    path, saved = written(root, *writer)
    strategy, ranks = reader
    if strategy == "plain":
        results = [load_and_train(path, strategy, AFTER)]
    else:
        results = on_ranks(load_and_train, ranks, path, strategy, AFTER)
    for loaded, after in results:
        assert_same(loaded, saved)
        assert_same(after, uninterrupted(), tolerance=1e-9)


@pytest.mark.parametrize(("writer", "reader"), PAIRS, ids=str)
def test_pairs(root: Path, writer: tuple[str, int], reader: tuple[str, int]) -> None:
    check(root, writer, reader)


@pytest.mark.parametrize("reader", [("zero3", 3), ("ddp", 2), ("plain", 1)], ids=str)
def test_a_plain_process_writes(root: Path, reader: tuple[str, int]) -> None:
    check(root, ("plain", 1), reader)


@pytest.mark.parametrize("writer", [("zero3", 5), ("zero1", 2)], ids=str)
def test_a_plain_process_reads(root: Path, writer: tuple[str, int]) -> None:
    check(root, writer, ("plain", 1))


@pytest.mark.full
@pytest.mark.parametrize("writer", [*KINDS, ("plain", 1)], ids=str)
@pytest.mark.timeout(300)
def test_all(root: Path, writer: tuple[str, int]) -> None:
    for reader in itertools.chain(KINDS, [("plain", 1)]):
        check(root, writer, reader)
