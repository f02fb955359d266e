"""Which threads of a process can go on by themselves."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from shoal.system.deadline import wait_until
from shoal.system.threads import busy_threads


def is_busy(act: Callable[[], object], end: Callable[[], object], patience: float = 0.5) -> bool:
    """Whether a thread that does this counts as busy, once it is there."""
    thread = threading.Thread(target=act, daemon=True)
    known = {each.ident for each in threading.enumerate()}
    thread.start()
    try:
        return not wait_until(lambda: thread.ident not in look(known), patience, 0.01)
    finally:
        end()
        thread.join()


def rests(act: Callable[[], object], end: Callable[[], object]) -> bool:
    return not is_busy(act, end, patience=30.0)


def look(known: set[int | None]) -> list[int]:
    return busy_threads(lambda thread, name, frame: thread in known)


def test_waiting_for_another_thread_is_no_work() -> None:
    event, done = threading.Event(), queue.Queue[int]()
    assert rests(event.wait, event.set)
    assert rests(done.get, lambda: done.put(1))
    sleeper = threading.Thread(target=event.wait)
    event.clear()
    sleeper.start()
    assert rests(sleeper.join, event.set)


def test_a_limited_wait_ends_by_itself() -> None:
    event = threading.Event()
    assert is_busy(lambda: event.wait(30.0), event.set)


def test_computing_is_work() -> None:
    is_over = threading.Event()

    def compute() -> None:
        while not is_over.is_set():
            sum(range(1000))

    assert is_busy(compute, is_over.set)


def test_threads_of_a_pool_that_rest_are_not_counted() -> None:
    others = {each.ident for each in threading.enumerate()}  # of this test run
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(abs, [-1, -2])) == [1, 2]
        assert wait_until(lambda: not look(others), 5.0, 0.01)


def test_what_may_call_the_users_code_is_busy() -> None:
    timer = threading.Timer(60, print)
    assert is_busy(timer.run, timer.cancel)


def test_the_calling_thread_is_busy_unless_it_is_excused() -> None:
    assert threading.get_ident() in busy_threads(lambda thread, name, frame: False)
    assert threading.get_ident() not in look({threading.get_ident()})
