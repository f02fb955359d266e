"""Copies past the cache are copies like any other; shared memory with changes of one's own."""

from __future__ import annotations

import mmap
import os

import pytest
import torch
from torch import Tensor

from shoal.comm.shm.segments import Arena
from shoal.torch_support.memory import Glimpse, PrivateView, as_memory, copy

LONG, SHORT = 1 << 20, 8


@pytest.mark.parametrize("numel", [SHORT, LONG])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64]
)
def test_values_arrive_and_autograd_knows(dtype: torch.dtype, numel: int) -> None:
    target, source = torch.zeros(numel, dtype=dtype), torch.ones(numel, dtype=dtype)
    before = target._version
    copy(target, source)
    assert torch.equal(target, source)
    assert target._version == before + 1


def test_a_value_that_backward_needs_is_missed() -> None:
    """Written by numpy alone, the gradient would be wrong and nobody would say so."""
    weight = torch.ones(LONG, requires_grad=True)
    factor = torch.ones(LONG)
    product = (weight * factor).sum()
    copy(factor, torch.zeros(LONG))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@pytest.mark.parametrize("source", [torch.ones(LONG).double(), torch.ones(LONG, 2)[:, 0]])
def test_other_dtypes_and_strides(source: torch.Tensor) -> None:
    target = torch.zeros(LONG)
    copy(target, source)
    assert torch.equal(target, torch.ones(LONG))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(3.0)[2::3],
        torch.tensor([1 - 2j]).conj().imag,
        torch.tensor(2.0).expand(1, 1),
        torch.arange(12, dtype=torch.int16).view(3, 4)[1:2, 2:3],
        torch.arange(12.0).view(3, 4)[::2, 1:3],
    ],
)
def test_bytes_of_any_layout(tensor: Tensor) -> None:
    """One element counts as contiguous, whatever its stride is."""
    plain = tensor.resolve_neg().flatten().tolist()
    assert torch.frombuffer(bytearray(as_memory(tensor)), dtype=tensor.dtype).tolist() == plain


def test_conjugates() -> None:
    source = torch.randn(LONG, dtype=torch.complex64)
    target = torch.zeros_like(source)
    copy(target, source.conj())
    assert torch.equal(target, source.conj().resolve_conj())


def test_inference_mode() -> None:
    with torch.inference_mode():
        target = torch.zeros(LONG)
        copy(target, torch.ones(LONG))
        assert target.sum() == LONG


PAGE = mmap.PAGESIZE


@pytest.fixture(params=["pagemap", "no pagemap"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the kernel's help and without."""
    if request.param == "no pagemap":
        monkeypatch.setattr(os, "pread", lambda *_: b"")


def make() -> tuple[Tensor, PrivateView]:
    """Three and a half pages behind some others, and a view of them."""
    arena = Arena()
    arena.empty(100)
    memory = arena.empty(3 * PAGE + PAGE // 2, PAGE).zero_()
    location = arena.locate(memory)
    assert location is not None
    assert location.offset == PAGE
    arena.close()  # what it made stays as long as somebody uses it
    return memory, PrivateView(f"/proc/self/fd/{location.fd}", location.offset, memory)


def test_others_are_seen_and_do_not_see(way: None) -> None:
    memory, view = make()
    memory[5] = 1
    assert view.memory[5] == 1
    view.memory[6] = 2
    assert memory[6] == 0
    memory[3 * PAGE] = 3
    assert view.memory[3 * PAGE] == 3


def test_written_pages_are_found_and_dropped(way: None) -> None:
    memory, view = make()
    assert view.memory.sum() == 0
    assert view.written() == []
    view.memory[PAGE + 7] = 1
    view.memory[2 * PAGE : 2 * PAGE + 3] = 2
    assert view.written() == [(PAGE, 3 * PAGE)]
    view.memory[memory.numel() - 1] = 3
    assert view.written() == [(PAGE, 4 * PAGE)]
    view.drop()
    assert view.written() == []
    assert torch.equal(view.memory[: memory.numel()], memory)


def test_writing_what_is_there_already_is_found() -> None:
    _, view = make()
    view.memory[3] = 0
    assert view.written() == [(0, PAGE)]


def test_views_do_not_see_each_others_changes() -> None:
    memory, view = make()
    view.memory[0] = 1
    other = view.another()
    assert other.memory[0] == 0
    assert other.written() == []
    memory[PAGE] = 5
    assert other.memory[PAGE] == view.memory[PAGE] == 5


def test_no_file_stays_open() -> None:
    _, view = make()
    before = len(os.listdir("/proc/self/fd"))
    views = [view.another() for _ in range(10)]
    assert len(os.listdir("/proc/self/fd")) == before
    assert len(views) == 10


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.bool, torch.float64, torch.complex128]
)
def test_a_glimpse_sees_what_changed_where_it_looks(dtype: torch.dtype) -> None:
    memory = torch.zeros(6, dtype=dtype)
    look, numbers = Glimpse([1, 4], dtype), Glimpse.numbers(memory)
    before = look.at(numbers)
    memory[2] = 1
    assert look.at(numbers) == before
    memory[4] = 1
    assert look.at(numbers) != before


def test_a_glimpse_takes_the_same_bits_for_equal() -> None:
    memory = torch.full((3,), float("nan"))
    look, numbers = Glimpse([0, 2], memory.dtype), Glimpse.numbers(memory)
    assert look.at(numbers) == look.at(numbers)
    assert Glimpse([], memory.dtype).at(numbers) == 3
