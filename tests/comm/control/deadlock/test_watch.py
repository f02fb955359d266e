"""What a rank shows of its waits, over a page and over sockets, and when it is certain."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from control_worlds import page_world, socket_world
from shoal.comm.control.deadlock import watch
from shoal.comm.control.deadlock.finding import decode_reason
from shoal.comm.control.deadlock.record import OPERATION, Awaited, RankProgress, WaitRecord
from shoal.comm.control.deadlock.watch import DeadlockWatch, Examined
from shoal.errors import DeadlockError
from shoal.system.site import describe
from shoal.system.threads import busy_threads

WAITS = Examined(Awaited(OPERATION, 1, 1), "the world", lambda: "barrier() at a.py:1")


@pytest.fixture(params=[page_world, socket_world])
def controls(request: pytest.FixtureRequest) -> Iterator[list[Any]]:
    with request.param(2) as made:
        yield made


@pytest.fixture(autouse=True)
def no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The timer that limits a test would count as something that may go on by itself."""
    monkeypatch.setattr("signal.getitimer", lambda which: (0.0, 0.0))


@pytest.fixture(autouse=True)
def own_threads_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of other tests' pools are none of these ranks'."""
    others = {thread.ident for thread in threading.enumerate()} - {threading.get_ident()}

    def own(is_excused: Callable[..., bool]) -> list[int]:
        return [thread for thread in busy_threads(is_excused) if thread not in others]

    monkeypatch.setattr(watch, "busy_threads", own)


def watches(controls: list[Any]) -> list[DeadlockWatch]:
    """Rank 0 has begun operation 1 of group 1 and waits there, rank 1 in group 2."""
    progresses = [RankProgress({1: (1, 0)}, {}), RankProgress({2: (1, 0)}, {})]
    return [
        DeadlockWatch(control, lambda progress=progress: progress)  # type: ignore[misc]
        for control, progress in zip(controls, progresses, strict=True)
    ]


def until(is_true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_shown_and_taken_back(controls: list[Any]) -> None:
    first, _ = watches(controls)
    first.examine(WAITS, [1])
    until(lambda: controls[1].shown_waits().get(0))
    record = WaitRecord.decode(controls[1].shown_waits()[0])
    assert record is not None
    assert record.waits[0].missing == (1,)
    assert record.progress.groups == {1: (1, 0)}
    first.end()
    assert not first.waits
    until(lambda: not controls[1].shown_waits())


def test_a_thread_that_runs_keeps_the_rank_out(controls: list[Any]) -> None:
    first, _ = watches(controls)
    is_over = False

    def compute() -> None:
        while not is_over:
            sum(range(100))

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        first.examine(WAITS, [1])
        assert controls[0].shown_waits() == {}
    finally:
        is_over = True
        thread.join()
    first.examine(WAITS, [1])
    assert list(controls[0].shown_waits()) == [0]
    first.end()


@pytest.mark.parametrize("name", ["shoal-control-0", "shoal-watchdog-0", "shoal-tensors-0"])
def test_a_thread_that_serves_other_ranks_keeps_nobody_out(controls: list[Any], name: str) -> None:
    first, _ = watches(controls)
    is_over = False

    def serve() -> None:
        while not is_over:
            sum(range(100))

    thread = threading.Thread(target=serve, name=name)
    thread.start()
    try:
        first.examine(WAITS, [1])
        assert list(controls[0].shown_waits()) == [0]
    finally:
        is_over = True
        thread.join()
    first.end()


def test_told_only_after_a_second_look(
    controls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "CERTAIN_S", 0.2)
    first, second = watches(controls)
    elsewhere = WAITS._replace(awaited=Awaited(OPERATION, 2, 1), group="group 2 of ranks 0, 1")
    second.examine(elsewhere, [0])
    until(lambda: controls[0].shown_waits().get(1))
    begin = time.monotonic()
    with pytest.raises(DeadlockError, match=r"rank 1 in .*: waits for rank 0 in group 2"):
        until(lambda: first.examine(WAITS, [1]))  # type: ignore[func-returns-value]
    assert time.monotonic() - begin >= 0.2
    until(controls[1].failure)
    second.examine(elsewhere, [0])
    with pytest.raises(DeadlockError, match=r"rank 0 in .*: waits for rank 1 in the world") as told:
        second.check_verdict(controls[1].failure())
    # A third rank may hear of the second's failure first, and must learn of the same verdict.
    assert decode_reason(describe(told.value)) == decode_reason(controls[1].failure().reason)


def test_a_change_begins_the_second_anew(
    controls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 ends its wait and begins an equal one, again and again."""
    monkeypatch.setattr(watch, "CERTAIN_S", 0.5)
    first, second = watches(controls)
    elsewhere = WAITS._replace(awaited=Awaited(OPERATION, 2, 1))
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        second.examine(elsewhere, [0])
        until(lambda: 1 in controls[0].shown_waits())
        first.examine(WAITS, [1])
        second.end()
        until(lambda: 1 not in controls[0].shown_waits())
    assert controls[0].failure() is None


def test_a_rank_with_a_timer_may_go_on(
    controls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("signal.getitimer", lambda which: (3.0, 0.0))
    first, _ = watches(controls)
    first.examine(WAITS, [1])
    assert controls[0].shown_waits().get(0, b"") == b""
