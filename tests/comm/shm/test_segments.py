"""Memory of messages: used again when it was read, never before."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import shoal
from pools import Team
from shoal.comm.shm import segments
from shoal.comm.shm.segments import Arena, MessageMemory


@pytest.fixture
def memory() -> Iterator[MessageMemory]:
    arena = Arena()
    memory = MessageMemory(arena)
    yield memory
    memory.close()
    arena.close()


def test_what_was_given_back_is_used_again(memory) -> None:
    first, second = memory.take(1000), memory.take(1000)
    assert min(first.nbytes, second.nbytes) >= 1000
    assert first.data_ptr() != second.data_ptr()
    memory.give_back(first)
    assert memory.take(900).data_ptr() == first.data_ptr()
    assert memory.take(900).data_ptr() not in (first.data_ptr(), second.data_ptr())
    assert memory.take(5000).nbytes >= 5000


def test_no_more_is_kept_than_is_good(memory, monkeypatch) -> None:
    monkeypatch.setattr(segments, "_MOST_IDLE_BYTES", 4096)
    pieces = [memory.take(2048) for _ in range(3)]
    for piece in pieces:
        memory.give_back(piece)
    again = {memory.take(2048).data_ptr() for _ in range(3)}
    assert len(again & {piece.data_ptr() for piece in pieces}) == 2


def test_memory_from_inference_mode_serves_outside_of_it(memory) -> None:
    with torch.inference_mode():
        memory.give_back(memory.take(16))
    memory.take(16).fill_(1)


def test_a_segment_is_forgotten_before_its_address_can_be_anothers(monkeypatch) -> None:
    """Else one that another thread maps there meanwhile is closed in its place."""
    arena, was_mapped = Arena(), []
    free = arena._free

    def look(address: int) -> None:
        maps = Path("/proc/self/maps").read_text()
        was_mapped.append(f"{address:x}-" in maps)
        free(address)

    monkeypatch.setattr(arena, "_free", look)
    tensor = arena.empty(4 << 20)
    del tensor
    assert was_mapped == [True]
    assert arena.num_freed == 1
    arena.close()


def send_in_rounds(rounds):
    """Several messages under way at once, of sizes that share memory, over and over."""
    backend = shoal.world().backend
    sizes = [(n % 5 + 1) * 60 for n in range(12)]
    if backend.rank == 0:
        for turn in range(rounds):
            parts = [torch.full((size,), turn * 100 + n) for n, size in enumerate(sizes)]
            works = [backend.start_send(part.to(torch.float64), 1) for part in parts]
            works[0].wait()  # its memory is free for the next round, others are still read
            works[-1].is_done()
    if backend.rank == 1:
        received = [[backend.recv(src=0) for _ in sizes] for _ in range(rounds)]
        return [[part.unique().tolist() for part in parts] for parts in received]
    return None


def test_messages_are_not_overwritten_before_they_are_read() -> None:
    received = Team("shm", 2).run(send_in_rounds, 4)[1]
    assert received == [[[turn * 100.0 + n] for n in range(12)] for turn in range(4)]
