"""Actions in a thread each: all end, the first error is raised, and torch's modes apply."""

from __future__ import annotations

import threading

import pytest
import torch

from shoal.torch_support.concurrency import run_concurrently


def test_results_and_errors() -> None:
    done = []

    def fail(has_failed: threading.Event) -> None:
        raise KeyError("first")

    def wait(has_failed: threading.Event) -> None:
        assert has_failed.wait(30)
        done.append(True)
        raise SystemExit

    assert run_concurrently([]) == []
    assert run_concurrently([lambda _, n=n: n for n in range(3)]) == [0, 1, 2]
    for actions in ([wait, fail, wait], [fail, wait, wait]):
        with pytest.raises(KeyError):
            run_concurrently(actions)
    assert len(done) == 4


def test_interrupted_while_others_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are told, and waited for: nobody writes on in a folder that is being removed."""
    done = []

    def wait(has_failed: threading.Event) -> None:
        assert has_failed.wait(30)
        done.append(True)

    def join(thread: threading.Thread, timeout: float | None = None) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "join", join)
    with pytest.raises(KeyboardInterrupt):
        run_concurrently([lambda _: None, wait])
    assert done == [True]


def test_threads_have_the_modes_of_whom_they_work_for() -> None:
    def modes(_: threading.Event) -> tuple[bool, bool]:
        return torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    with torch.inference_mode():
        assert run_concurrently([modes, modes]) == [(True, False)] * 2
    with torch.no_grad():
        assert run_concurrently([modes, modes]) == [(False, False)] * 2
