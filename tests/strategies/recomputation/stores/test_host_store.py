"""Host memory, with streams that copy as late as they may: on a CPU, without a GPU."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import shoal
from shoal.activations import Policy
from shoal.strategies.recomputation.stores.copy_streams import PinnedMemory
from shoal.strategies.recomputation.stores.host_store import HostStore
from shoal.strategies.recomputation.stores.store import Moved, Moving, MovingStore
from strategies.recomputation.recomputed import FOUR, compare

pytestmark = pytest.mark.timeout(120)


class Later:
    """The end of a copy that nobody has waited for yet."""

    def __init__(self, stream: LateStream) -> None:
        self._stream, self._number = stream, stream.num_given

    def happen(self) -> None:
        self._stream.run(self._number)


class Computing:
    """The stream that computes: a CPU, which is never late."""

    def wait_event(self, event: Later) -> None:
        event.happen()


class Another(Computing):
    """Another stream that computes, which is late itself."""

    def wait_event(self, event: Later) -> None:
        pass


class LateStream:
    """Copies when somebody waits for it, and not before; tells of memory that did not last."""

    computing = Computing()

    def __init__(self, lost: list[str]) -> None:
        self._queue: list[Callable[[], None]] = []
        self.num_given = self._num_run = 0
        self._lost, self._outlasting = lost, list[Tensor]()

    def current(self) -> Computing:
        return self.computing

    def copy(self, target: Tensor, source: Tensor, after: Iterable[Later] = ()) -> Later:
        after, ends = list(after), (weak(target), weak(source))

        def carry_out() -> None:
            for event in after:
                event.happen()
            tensors = [strong(each) for each in ends]
            if None in [each if each is None else True for each in tensors]:
                self._lost.append("memory was let go of before its copy was through")
            else:
                tensors[0].copy_(tensors[1])

        self._queue.append(carry_out)
        self.num_given += 1
        return Later(self)

    def run(self, number: int) -> None:
        while self._num_run < number:
            self._num_run += 1
            self._queue[self._num_run - 1]()

    def outlast(self, tensor: Tensor) -> None:
        self._outlasting.append(tensor)


def weak(tensor: Tensor) -> tuple[StorageWeakRef, int]:
    return StorageWeakRef(tensor.untyped_storage()), tensor.numel()


def strong(ends: tuple[StorageWeakRef, int]) -> Any:
    storage = torch.UntypedStorage._new_with_weak_ptr(ends[0].cdata)
    return None if storage is None else torch.empty(0, dtype=torch.uint8).set_(storage)[: ends[1]]


class LateStore(HostStore):
    """A store for host memory whose "GPU" is a CPU with late streams."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.moves, self.lost, self.sizes = True, list[str](), list[int]()
        self._out, self._in = LateStream(self.lost), LateStream(self.lost)  # type: ignore[assignment]
        self._pinned.allocate = self._allocate  # type: ignore[method-assign]

    def _allocate(self, size: int) -> Tensor:
        self.sizes.append(size)
        return torch.full((size,), 77, dtype=torch.uint8)

    def takes(self, tensor: Tensor) -> bool:
        return MovingStore.takes(self, tensor)

    def finish(self) -> None:
        """All copies are carried out."""
        for stream in (self._out, self._in):
            stream.run(stream.num_given)  # type: ignore[attr-defined]
        assert not self.lost


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> list[LateStore]:
    """Those that models get from now on."""
    made: list[LateStore] = []

    def make(*_: Any) -> LateStore:
        made.append(LateStore())
        return made[-1]

    monkeypatch.setattr("shoal.strategies.model.make_store", make)
    return made


@pytest.mark.parametrize(
    ("kind", "strategy", "recompute", "options"),
    [
        ("drop", "ddp", "none", {}),
        ("gpt", "zero3", "none", {}),
        ("gpt", "zero3", "selective", {}),
        ("drop", "zero3", "full", {}),
        ("gpt", "tensor", "none", {"tensor": 2, "zero": 3}),
        ("drop", "pipeline", "none", {"schedule": "1f1b"}),
        ("drop", "pipeline", "full", {"schedule": "zero-bubble"}),
        ("drop", "hybrid", "selective", {"tensor": 2, "pipeline": 2}),
    ],
)
def test_training_is_the_same_however_late_copies_are(
    stores: list[LateStore], kind: str, strategy: str, recompute: str, options: dict[str, Any]
) -> None:
    compare(FOUR, kind, strategy, Policy(recompute, "host"), **options)
    gc.collect()
    assert len(stores) == 4
    assert any(store.sizes for store in stores)
    for store in stores:
        store.finish()


def chain(store: LateStore, layers: int, width: int = 64) -> tuple[Tensor, list[Any]]:
    """Squares one after the other, each a call of a block; and what stands for their inputs."""
    x = torch.full((width,), 1.01, dtype=torch.float64, requires_grad=True)
    seen: list[Any] = []
    put = store.put
    store.put = lambda *given: seen.append(put(*given)) or seen[-1]  # type: ignore[method-assign,func-returns-value]
    y = x * 1
    for number in range(layers):
        store.begin_call()
        with Moving(store, (), f"block {number}"):
            y = y.square()
    del store.put
    return y, seen


def test_two_calls_are_on_the_gpu_at_most() -> None:
    store = LateStore()
    y, seen = chain(store, 6)
    assert [kept.memory.source is not None for kept in seen] == [False] * 4 + [True] * 2
    y.sum().backward()
    store.finish()


def test_backward_takes_what_has_not_left_and_fetches_one_call_ahead() -> None:
    store = LateStore()
    _, seen = chain(store, 6)
    states = []
    for kept in reversed(seen):
        store.get(kept)
        states.append("".join("_b"[each.memory.place.back is not None] for each in seen))
    assert states == ["______", "___b__", "__bb__", "_bbb__", "bbbb__", "bbbb__"]
    assert [kept.memory.source is not None for kept in seen] == [False] * 6
    store.finish()


def test_pinned_memory_is_used_again_by_a_host_that_is_ahead() -> None:
    store = LateStore()
    for _ in range(4):  # nothing waits for the copies out before the next step's
        y, seen = chain(store, 5)
        del seen
        y.sum().backward()
        del y
    # 64 numbers of eight bytes: one step's, and those of two calls that had not left yet
    assert store.sizes == [512] * len(store.sizes)
    assert len(store.sizes) <= 7
    store.finish()


def test_what_comes_back_for_nobody_outlasts_its_copy() -> None:
    store = LateStore()
    y, seen = chain(store, 6)
    del y
    store.get(seen[3])  # seen[2] begins to come back
    seen.clear()
    gc.collect()
    store.finish()


def test_memory_that_several_calls_need_does_not_bring_all_of_its_first_call() -> None:
    store = LateStore()
    shared = torch.ones(64)
    kept: list[tuple[Moved, Moved]] = []
    for number in range(6):
        store.begin_call()
        kept.append((store.put(torch.full((64,), float(number)), "a"), store.put(shared, "b")))
    assert torch.equal(store.get(kept[5][1]), shared)
    assert kept[0][0].memory.place.back is None
    assert [float(store.get(own)[0]) for own, _ in reversed(kept)] == [5, 4, 3, 2, 1, 0]
    store.finish()


@pytest.mark.parametrize("is_hasty", [False, True])
def test_streams_that_do_not_wait_for_each_other(
    monkeypatch: pytest.MonkeyPatch, is_hasty: bool
) -> None:
    store, first = LateStore(), torch.full((64,), 3.0)
    monkeypatch.setattr(LateStream, "computing", Another())
    kept = store.put(first, "a")
    for _ in range(2):
        store.begin_call()
    back = store.get(kept)  # its copy out has not happened
    if is_hasty:
        store._in.run(1)  # type: ignore[attr-defined]
    del kept
    again = store.put(torch.full((64,), 4.0), "a")  # in the same pinned memory
    assert store.sizes == [256]
    monkeypatch.setattr(LateStream, "computing", Computing())
    assert torch.equal(store.get(again), torch.full((64,), 4.0))
    store.finish()
    assert torch.equal(back, first)


def test_a_write_before_the_copy_is_through_is_an_error() -> None:
    store = LateStore()
    kept = []
    for number in range(3):
        store.begin_call()
        tensor = torch.full((64,), float(number))
        kept.append(store.put(tensor, "a"))
        if number != 1:
            tensor.add_(1)
    for each in (kept[0], kept[2]):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            store.get(each)
    assert float(store.get(kept[1])[0]) == 1.0


def test_backward_through_a_graph_that_is_kept(stores: list[LateStore]) -> None:
    def gradients(activations: Any) -> list[Tensor]:
        torch.manual_seed(0)
        blocks = (nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(5))
        model = shoal.as_distributed(
            nn.Sequential(*blocks), strategy="ddp", activations=activations
        )
        loss = model(torch.ones(4, 8)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        return [each.grad.clone() for each in model.parameters()]

    plain, host = (
        shoal.run(gradients, 2, "memory", args=(each,)) for each in (None, Policy("none", "host"))
    )
    assert all(map(torch.equal, plain[0], host[0]))
    for store in stores:
        store.finish()


def test_other_lengths_use_the_same_pinned_memory() -> None:
    memory, sizes = PinnedMemory(), []
    memory.allocate = lambda size: sizes.append(size) or torch.empty(size, dtype=torch.uint8)  # type: ignore[method-assign,func-returns-value]
    event: Any = object()
    for length in (900, 1024, 600, 1025):
        part, after = memory.take(length)
        assert part.numel() == length
        assert after == [event] * (length in (1024, 600))
        memory.give_back(part, event)
    assert sizes == [1024, 2048]
