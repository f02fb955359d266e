"""Every collective, on every backend and world size, against its definition."""

from __future__ import annotations

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from conformance import (
    CHECKS,
    FLOATS,
    LAYOUTS,
    MEMORIES,
    MOVED,
    REDUCED,
    REDUCTIONS,
    SAME_SHAPE,
    Case,
    run_cases,
)
from pools import Team

# Explaining a failure takes minutes on processes; shrinking is enough.
SETTINGS = hypothesis.settings(
    max_examples=hypothesis.settings().max_examples * 2 // 5,
    phases=set(hypothesis.Phase) - {hypothesis.Phase.explain},
)
OPS = ("sum", "average", "min", "max", "product")
SMALL_ROWS = st.sampled_from((0, 1, 2, 3, 5, 7, 8, 13))
# 32 KiB is where shared memory begins to read tensors where they lie: of float32, 8192.
LONG_ROWS = st.sampled_from((127, 1009, 4096, 8191, 8192, 8193, 16411))


@st.composite
def cases(draw: st.DrawFn, name: str, size: int) -> Case:
    is_long = draw(st.integers(0, 3)) == 0
    rows = _same(draw, LONG_ROWS if is_long else SMALL_ROWS, size, same=name in SAME_SHAPE)
    trailing = () if is_long else tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    dtype, op = draw(_arithmetic(name))
    has_sizes = name in ("scatter", "reduce_scatter", "all_to_all") and draw(st.booleans())
    return Case(
        rows=rows,
        trailing=trailing,
        is_scalar=not is_long and not has_sizes and draw(st.integers(0, 7)) == 0,
        dtype=dtype,
        op=op,
        root=draw(st.integers(0, size - 1)),
        sizes=_sizes(draw, name, size) if has_sizes else None,
        memory=_each(draw, MEMORIES, size),
        layout=_each(draw, LAYOUTS, size),
        gives_out=_each(draw, (False, True), size),
        is_async=_each(draw, (False, True), size),
        seed=draw(st.integers(0, 999)),
    )


def _same(draw: st.DrawFn, rows: st.SearchStrategy[int], size: int, same: bool) -> tuple[int, ...]:
    if same:
        return (draw(rows),) * size
    return tuple(draw(st.lists(rows, min_size=size, max_size=size)))


def _each(draw: st.DrawFn, choices: tuple[object, ...], size: int) -> tuple[object, ...]:
    """One choice for each rank; often the same for all."""
    if draw(st.booleans()):
        return (draw(st.sampled_from(choices)),) * size
    return tuple(draw(st.lists(st.sampled_from(choices), min_size=size, max_size=size)))


def _sizes(draw: st.DrawFn, name: str, size: int) -> tuple[tuple[int, ...], ...]:
    split = st.tuples(*[st.sampled_from((0, 0, 1, 2, 5, 11))] * size)
    if name in SAME_SHAPE:
        return (draw(split),) * size
    return tuple(draw(st.tuples(*[split] * size)))


def _arithmetic(name: str) -> st.SearchStrategy[tuple[torch.dtype, str]]:
    if name not in REDUCTIONS:
        return st.tuples(st.sampled_from(MOVED), st.just("sum"))
    pairs = [
        (dtype, op)
        for dtype in REDUCED
        for op in OPS
        if (op != "average" or dtype in FLOATS) and (dtype is not torch.bool or op != "sum")
    ]
    return st.sampled_from(pairs)


@pytest.mark.parametrize("name", CHECKS)
@SETTINGS
@hypothesis.given(data=st.data())
def test_collective_equals_its_definition(team: Team, name: str, data: st.DataObject) -> None:
    batch = data.draw(st.lists(cases(name, team.size), min_size=1, max_size=6))
    assert_none(team.run(run_cases, CHECKS[name], batch))


def assert_none(failures: list[list[str]]) -> None:
    found = [failure for rank in failures for failure in rank]
    assert not found, "\n".join(found)


# Sizes at which backends change their ways ----------------------------------------------

KIB, MIB = 1 << 10, 1 << 20
LENGTHS = [32 * KIB + 4, MIB, MIB + 4, 3 * MIB + 212]
PATTERNS = [("plain",), ("own",), ("view", "plain", "own")]


def _large(size: int, num_bytes: int, pattern: tuple[str, ...], dtype: torch.dtype) -> Case:
    rows = num_bytes // dtype.itemsize
    return Case(
        rows=(rows,) * size,
        dtype=dtype,
        root=size - 1,
        memory=tuple(pattern[rank % len(pattern)] for rank in range(size)),
        layout=("contiguous",) * size,
        gives_out=tuple(rank % 2 == 0 for rank in range(size)),
        is_async=(False,) * size,
        seed=num_bytes % 97,
    )


@pytest.mark.parametrize("name", CHECKS)
def test_large_tensors(team: Team, name: str) -> None:
    if team.backend == "shm" and team.size > 1:
        batch = [_large(team.size, n, p, torch.float32) for n in LENGTHS for p in PATTERNS]
    else:
        batch = [_large(team.size, MIB + 4, ("own", "plain"), torch.float32)]
    assert_none(team.run(run_cases, CHECKS[name], batch))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.full
def test_large_tensors_of_other_widths(team: Team, name: str, dtype: torch.dtype) -> None:
    batch = [_large(team.size, n // 8 * 8 + 8, p, dtype) for n in LENGTHS for p in PATTERNS]
    assert_none(team.run(run_cases, CHECKS[name], batch))


UNEVEN = [(5, 1), (0, 9), (9, 5), (5, 9)]


@pytest.mark.parametrize("name", ["all_gather", "gather"])
def test_large_tensors_of_different_length(team: Team, name: str) -> None:
    """The windows through which plain memory is seen must not cut what lies elsewhere short."""
    quarter = MIB // 16 if team.backend == "shm" else 999
    batch = []
    for pattern in PATTERNS:
        for lengths in UNEVEN:
            rows = tuple(quarter * lengths[rank % 2] + rank for rank in range(team.size))
            case = _large(team.size, 4, pattern, torch.float32)
            batch.append(Case(**{**vars(case), "rows": rows}))
    assert_none(team.run(run_cases, CHECKS[name], batch))


@pytest.mark.parametrize("name", ["all_to_all", "scatter", "reduce_scatter"])
def test_large_parts_of_different_length(team: Team, name: str) -> None:
    unit = MIB // 16 if team.backend == "shm" else 999
    batch = []
    for pattern in PATTERNS:
        for shift in range(3):
            sizes = [
                [unit * ((3 * rank + other + shift) % 5) ** 2 // 4 for other in range(team.size)]
                for rank in range(team.size)
            ]
            if name == "reduce_scatter":
                sizes = [sizes[0]] * team.size
            case = _large(team.size, 4, pattern, torch.float32)
            split = tuple(map(tuple, sizes))
            batch.append(Case(**{**vars(case), "sizes": split}))
    assert_none(team.run(run_cases, CHECKS[name], batch))
