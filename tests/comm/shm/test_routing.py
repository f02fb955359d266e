"""Which way a collective takes over shared memory, as a table."""

from __future__ import annotations

import itertools

import pytest

from shoal.comm.shm.routing import (
    HALF_BYTES,
    SMALL_BYTES,
    ShmRoute,
    Shown,
    Way,
    decode_shown,
    how_to_show,
    is_length_for_direct_reads,
    longest_cached,
    route,
)

NOTHING, SHARED, STAGED, WINDOWED, DIRECT = Way
LONG = HALF_BYTES + 1


@pytest.mark.parametrize(
    ("num_bytes", "is_in_segment", "is_read_directly", "way"),
    [
        (SMALL_BYTES, True, False, STAGED),
        (SMALL_BYTES + 1, True, False, SHARED),
        (LONG, True, False, SHARED),
        (HALF_BYTES, False, False, STAGED),
        (LONG, False, False, WINDOWED),
        (LONG, False, True, DIRECT),
    ],
)
def test_how_a_rank_shows_its_data(num_bytes, is_in_segment, is_read_directly, way) -> None:
    found = how_to_show(num_bytes, is_in_segment=is_in_segment, is_read_directly=is_read_directly)
    assert found is way


@pytest.mark.parametrize(
    ("kind", "size", "shortest", "longest"),
    [
        ("all_reduce", 2, HALF_BYTES + 1, 1 << 40),
        ("broadcast", 4, (512 << 10) + 1, HALF_BYTES),
        ("all_gather", 3, HALF_BYTES + 1, 16 << 20),
        ("gather", 3, HALF_BYTES + 1, 16 << 20),
        ("scatter", 3, HALF_BYTES + 1, 16 << 20),
        ("all_to_all", 3, HALF_BYTES + 1, 16 << 20),
    ],
)
def test_lengths_that_are_read_directly(kind, size, shortest, longest) -> None:
    assert not is_length_for_direct_reads(kind, shortest - 1, size)
    assert is_length_for_direct_reads(kind, shortest, size)
    assert is_length_for_direct_reads(kind, longest, size)
    assert kind == "all_reduce" or not is_length_for_direct_reads(kind, longest + 1, size)


@pytest.mark.parametrize(
    ("kind", "size"), [("all_reduce", 3), ("reduce", 2), ("reduce_scatter", 2)]
)
def test_what_is_never_read_directly(kind, size) -> None:
    assert not any(is_length_for_direct_reads(kind, 1 << power, size) for power in range(40))


def test_what_the_fast_path_takes() -> None:
    assert longest_cached(1) == {}
    assert longest_cached(2)["all_reduce"] == HALF_BYTES
    assert longest_cached(3)["all_reduce"] == SMALL_BYTES
    assert {longest_cached(5)[kind] for kind in ("reduce_scatter", "all_gather", "broadcast")} == {
        HALF_BYTES
    }


@pytest.mark.parametrize(
    ("ways", "num_bytes", "expected"),
    [
        ((STAGED, STAGED), SMALL_BYTES, ShmRoute.STAGED),
        ((STAGED, STAGED), HALF_BYTES, ShmRoute.STAGED),
        ((STAGED,) * 3, SMALL_BYTES, ShmRoute.STAGED),
        ((STAGED,) * 3, HALF_BYTES, ShmRoute.SLICES),
        ((SHARED, STAGED), HALF_BYTES, ShmRoute.SLICES),
        ((SHARED, SHARED), HALF_BYTES, ShmRoute.SLICES),
        ((DIRECT, DIRECT), LONG, ShmRoute.HALVES),
        ((DIRECT, SHARED), LONG, ShmRoute.HALVES),
        ((DIRECT, WINDOWED), LONG, ShmRoute.EVERYWHERE),
        ((WINDOWED, WINDOWED), LONG, ShmRoute.EVERYWHERE),
        ((WINDOWED, SHARED), LONG, ShmRoute.SLICES),
        ((WINDOWED,) * 3, LONG, ShmRoute.SLICES),
        ((SHARED,) * 4, LONG, ShmRoute.SLICES),
    ],
)
def test_routes_of_an_all_reduce(ways, num_bytes, expected) -> None:
    for order in itertools.permutations(ways):
        assert route("all_reduce", order, num_bytes=num_bytes) is expected


@pytest.mark.parametrize(
    ("way", "expected"),
    [
        (STAGED, ShmRoute.STAGED),
        (DIRECT, ShmRoute.ROOT_DIRECT),
        (SHARED, ShmRoute.ROOT_SHARED),
        (WINDOWED, ShmRoute.WINDOWS),
    ],
)
@pytest.mark.parametrize("other", [NOTHING, SHARED])
def test_a_broadcast_depends_on_the_root_alone(way, other, expected) -> None:
    assert route("broadcast", [other, way, other], root=1) is expected


@pytest.mark.parametrize("kind", ["reduce_scatter", "collect"])
def test_routes_of_collectives_that_read_parts(kind) -> None:
    assert route(kind, [STAGED, STAGED, NOTHING]) is ShmRoute.STAGED
    for way in (SHARED, WINDOWED, DIRECT):
        assert route(kind, [STAGED, way, NOTHING]) is ShmRoute.WINDOWS


def test_a_reduce_is_made_in_slices() -> None:
    assert {route("reduce", ways) for ways in itertools.product(Way, Way)} == {ShmRoute.SLICES}


@pytest.mark.parametrize("way", list(Way))
def test_what_is_shown_survives_a_header(way) -> None:
    shown = Shown(way, b"" if way is NOTHING else b"location", 77 if way is DIRECT else 0)
    assert decode_shown(shown.encode()) == shown
    windowed = shown.in_windows()
    assert windowed == (Shown(WINDOWED, b"location") if way is DIRECT else shown)
