"""Operations that are launched before headers are compared, over Gloo: NCCL needs GPUs."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from faults.worlds import SOON_S, site_of
from shoal.comm import ReduceOp
from shoal.comm.operation import AllGather, AllReduce, Operation, ReduceScatter
from shoal.comm.operation.base import Header
from shoal.comm.torch_groups import gloo
from shoal.comm.torch_groups.foreseeing import ForeseeingBackend
from shoal.comm.torch_groups.launch_order import LaunchOrder, Turn
from shoal.comm.work import ThreadedWork, Work
from shoal.errors import DeadlockError, MismatchError
from shoal.launch.function.forkserver.forkserver import fork_server

TIMEOUT_S = 60.0  # far longer than a deadlock may take to be found


@pytest.fixture(scope="module", autouse=True)
def ranks_are_forked() -> None:
    """From a process that stays."""
    fork_server()


class Done(Work[Any]):
    """An operation whose headers may not have been compared yet."""

    def __init__(self, result: Any, confirmation: Work[None]) -> None:
        self._result, self._confirmation = result, confirmation

    def wait(self, timeout: float | None = None) -> Any:
        return self._result

    def is_done(self) -> bool:
        return True

    def confirm(self) -> None:
        self._confirmation.wait()


class ForeseeingGloo(ForeseeingBackend, gloo.GlooBackend):
    """Gloo that carries out what was foreseen in the caller's thread."""

    num_foreseen = 0
    moves = True

    def _launch(
        self, operation: Operation, move: Callable[[], Any], confirmation: Work[None]
    ) -> Work[Any]:
        type(self).num_foreseen += 1
        return Done(move() if self.moves else None, confirmation)


def foreseeing(fn: Callable[..., Any], *args: Any) -> Any:
    """Calls a function in a world that foresees."""
    usual, gloo.GlooBackend = gloo.GlooBackend, ForeseeingGloo  # type: ignore[misc]
    shoal.world().shutdown()
    try:
        with shoal.init("gloo", TIMEOUT_S):
            return fn(*args), ForeseeingGloo.num_foreseen
    finally:
        gloo.GlooBackend = usual  # type: ignore[misc]


class Branches(nn.Module):
    """Each rank uses another branch now and then, so the flags of reductions differ."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.last = nn.Linear(6, 2)

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.last(torch.relu(self.branches[which](x)))


def train(strategy: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    plain: Any = Branches()
    adam = torch.optim.AdamW(plain.parameters(), lr=0.05)
    model, optimizer = shoal.as_distributed(plain, adam, strategy=strategy, min_group_bytes=64)
    rank = shoal.world().rank
    is_apart = strategy != "zero3"  # gathers would come before reductions here, after them there
    for step in range(8):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
        model(x, (step + rank * is_apart * (step > 3)) % 3).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_training_is_the_same(strategy: str) -> None:
    expected = shoal.run(train, 2, "gloo", args=(strategy,))[0]
    for state, num_foreseen in shoal.run(foreseeing, 2, "gloo", args=(train, strategy)):
        assert num_foreseen > 10
        assert all(torch.equal(state[name], value) for name, value in expected.items())


def train_and_act_alone(what: str, strategy: str, folder: str) -> None:
    """Operations are launched, as NCCL's are, and end only if all ranks come; one does not."""
    torch.manual_seed(0)
    plain: Any = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    adam = torch.optim.AdamW(plain.parameters())
    model, optimizer = shoal.as_distributed(plain, adam, strategy=strategy)
    group = shoal.world().subgroup(range(2))
    assert group is not None
    for step in range(4):
        model(torch.ones(4, 8) + shoal.world().rank).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            ForeseeingGloo.moves = False
            if shoal.world().rank == 0 and what == "save":
                shoal.save(folder, model, optimizer)  # alone
            if what == "group":
                (shoal.world() if shoal.world().rank == 0 else group).barrier()  # not together


def told_of(*args: Any) -> tuple[str, float, int]:
    """What a rank is told, how long it took from its last step on, and what was launched."""
    begin = time.monotonic()
    num_foreseen = ForeseeingGloo.num_foreseen
    try:
        train_and_act_alone(*args)
    except DeadlockError as error:
        return str(error), time.monotonic() - begin, ForeseeingGloo.num_foreseen - num_foreseen
    raise AssertionError


@pytest.mark.parametrize(
    ("what", "strategy"), [("save", "ddp"), ("save", "zero3"), ("group", "ddp")]
)
def test_a_deadlock_is_told_soon(what: str, strategy: str, tmp_path: Path) -> None:
    results = shoal.run(
        foreseeing, 2, "gloo", args=(told_of, what, strategy, str(tmp_path)), timeout=600
    )
    for (text, seconds, num_foreseen), _ in results:
        assert num_foreseen > 0
        assert "ranks wait for each other" in text
        alone = "# alone" if what == "save" else "# not together"
        call = "shoal.save()" if what == "save" else "world.barrier()"
        assert f"rank 0 in {call} at {site_of(train_and_act_alone, alone)}" in text
        others = ("loss.backward()", "model.forward()") if what == "save" else ("group.barrier()",)
        assert any(f"rank 1 in {each} at " in text for each in others), text
        assert seconds < SOON_S


def run(length: int, rank: int = -1) -> Work[Any]:
    """An operation that may be foreseen."""
    backend = shoal.world().backend
    operation = AllReduce(torch.ones(length + (backend.rank == rank)), ReduceOp.SUM)
    operation.is_foreseeable = True
    return backend.run(operation, async_op=True)


def differ() -> str:
    backend = shoal.world().backend
    for length in (10, 11) * 2:
        assert run(length).wait().tolist() == [backend.size] * length
    ForeseeingGloo.moves = False  # Gloo ends a process over sizes that do not fit
    with pytest.raises(MismatchError, match="start again"):
        run(10, rank=0).confirm()
    with pytest.raises(MismatchError, match=r"rank 0: (.*\n)+.*start again from the last check"):
        backend.barrier()
    with pytest.raises(MismatchError):
        shoal.world().all_gather_object(1)
    return "known"


def test_what_was_foreseen_wrongly_ends_the_world() -> None:
    assert [value for value, _ in shoal.run(foreseeing, 2, "gloo", args=(differ,))] == ["known"] * 2


def keep_nothing() -> tuple[list[bool], int]:
    """Whether memory is freed of gathers and reductions that have yet to be compared."""
    backend, has_paused, may_compare = shoal.world().backend, threading.Event(), threading.Event()
    rows, tensors = [2] * backend.size, []
    for fresh in range(2):
        whole, part = torch.ones(4), torch.empty(2)
        operations: list[Operation] = [
            AllGather(part, whole),
            AllReduce(whole, ReduceOp.SUM),
            ReduceScatter(whole, ReduceOp.SUM, part, rows, (backend.rank, backend.size)),
        ]
        if fresh:  # what was foreseen is compared by a thread that is held up from here on
            queue = backend._coordination.start_queue()  # type: ignore[attr-defined]
            queue.put(ThreadedWork(has_paused.set, "a sign"))
            queue.put(ThreadedWork(partial(may_compare.wait, 30), "a pause"))
            has_paused.wait(30)  # the thread has let go of what came before
        for operation in operations:
            operation.is_foreseeable = True
            backend.run(operation, async_op=True).wait()
        tensors += [weakref.ref(whole), weakref.ref(part)]
    del whole, part, operation, operations
    is_freed = [tensor() is None for tensor in tensors]
    may_compare.set()
    return is_freed, ForeseeingGloo.num_foreseen


def test_what_is_compared_later_keeps_no_memory() -> None:
    for (is_freed, num_at_once), _ in shoal.run(foreseeing, 2, "gloo", args=(keep_nothing,)):
        assert num_at_once == 3
        assert is_freed[0], "what was queued before anything was foreseen"
        assert is_freed[2:] == [True, False]  # a part of a gather is what a model keeps anyway


def launch_in_order() -> tuple[list[str], int]:
    """Two groups: the thread of the first is held up until the second's waits for its turn."""
    backend = shoal.world().backend
    first, second = backend.split(0), backend.split(0)
    assert isinstance(first, ForeseeingGloo)
    assert isinstance(second, ForeseeingGloo)
    launched: list[str] = []
    for name, group in (("first", first), ("second", second)):
        group._all_reduce = partial(_note, launched, name, group._all_reduce)  # type: ignore[method-assign]
    for group in (first, second):
        reduce_in(group).wait()  # from here on it may be foreseen
    launched.clear()
    may_go, order = threading.Event(), first._links.launches
    order.wait = partial(_tell, may_go, order.wait)  # type: ignore[method-assign]
    first._coordination.start_queue().put(ThreadedWork(partial(may_go.wait, 10), "a pause"))
    num_before = ForeseeingGloo.num_foreseen
    works = [reduce_in(first, "a new header"), reduce_in(second), reduce_in(first)]
    num_foreseen = ForeseeingGloo.num_foreseen - num_before
    for work in works:
        work.wait()
    return launched, num_foreseen


def reduce_in(group: ForeseeingGloo, text: str = "") -> Work[Any]:
    operation = AllReduce(torch.ones(2), ReduceOp.SUM)
    operation.signature += text
    operation.is_foreseeable = True
    return group.run(operation, async_op=True)


def _note(launched: list[str], name: str, move: Callable[..., None], *args: Any) -> None:
    launched.append(name)
    move(*args)


def _tell(may_go: threading.Event, wait: Callable[..., None], turn: Turn) -> None:
    """The second group's operation is called first; the pause ends when it has its headers."""
    may_go.set()
    wait(turn)


def test_operations_of_two_groups_are_launched_in_the_order_of_calls() -> None:
    for (launched, num_foreseen), _ in shoal.run(foreseeing, 2, "gloo", args=(launch_in_order,)):
        assert launched == ["first", "second", "first"]
        assert num_foreseen == 0


def test_a_turn_that_others_may_never_have_is_waited_for_a_moment_only() -> None:
    order = LaunchOrder()
    order._moment_s = 0.02
    first, second = order.take(), order.take()
    with second:
        second.wait()
    with first:
        first.wait()
    assert order.is_free


def test_a_moment_that_was_too_short_comes_back() -> None:
    order = LaunchOrder()
    for _ in range(2):  # the shortest
        order.take()
        with order.take() as late:
            order._moment_s = 0.01
            late.wait()
        order.end(next(iter(order._turns)))
    assert 0.1 < order._moment_s < 1
    first, second = order.take(), order.take()
    ending = threading.Thread(target=order.end, args=(first,))
    ending.start()
    second.wait()
    ending.join()
    assert order._moment_s in (0.25, 1.0)  # the thread may have been first
    order.end(second)


def test_one_that_is_being_launched_is_waited_for_as_long_as_it_takes() -> None:
    order = LaunchOrder()
    order._moment_s = 0.01
    first, second, launched = order.take(), order.take(), list[str]()
    is_launching, may_end = threading.Event(), threading.Event()

    def launch_first() -> None:
        with first:
            first.wait()
            is_launching.set()
            may_end.wait(10)
            launched.append("first")

    def launch_second() -> None:
        with second:
            is_launching.wait(10)
            second.wait()
            launched.append("second")

    threads = [threading.Thread(target=task) for task in (launch_first, launch_second)]
    for thread in threads:
        thread.start()
    is_launching.wait(10)
    threads[1].join(0.1)  # far longer than a moment
    assert launched == []
    may_end.set()
    for thread in threads:
        thread.join(10)
    assert launched == ["first", "second"]


def test_an_operation_that_fails_gives_up_its_turn() -> None:
    order = LaunchOrder()
    task = order.in_turn(partial(int, "x"))
    assert not order.is_free
    with pytest.raises(ValueError, match="invalid literal"):
        task()
    assert order.is_free


def test_other_numbers_of_rows_than_last_time_are_a_mismatch() -> None:
    operation = AllGather(torch.ones(3), None)
    shown = [header_of(operation, rows) for rows in (3, 3)]
    operation.reconsider(shown, shown, range(2))
    with pytest.raises(MismatchError, match="not those of last time"):
        operation.reconsider([header_of(operation, rows) for rows in (3, 4)], shown, range(2))


def header_of(operation: Operation, rows: int) -> Header:
    return Header(operation.signature, (rows, *operation.meta[1:]), b"", "")
