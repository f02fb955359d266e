"""What cannot be sent to ranks that are processes is named, with the way out."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

import shoal
from shoal.launch.function.call import encode_call

lock = threading.Lock()


def uses_global() -> None:
    with lock:
        pass


def calls_another() -> None:
    uses_global()


def nests_another() -> list[None]:
    return [uses_global() for _ in range(3)]


def closes_over() -> Callable[[], Any]:
    numbers = (number for number in range(3))
    return lambda: next(numbers)


@pytest.mark.parametrize(
    ("fn", "args", "expected"),
    [
        (uses_global, (), r"^uses_global .*the global 'lock', which uses_global"),
        (
            calls_another,
            (),
            r"calls_another .*'lock', which uses_global .*uses, \(a lock\)",
        ),
        (nests_another, (), r"nests_another .*the global 'lock', which uses_global"),
        (closes_over(), (), r"'numbers', which closes_over.* uses, \(a generator\)"),
        (closes_over, (1, lock), r"argument 1 of it \(a lock\) cannot be pickled: cannot pickle"),
    ],
)
def test_it_is_named(fn: Callable[..., Any], args: tuple[Any, ...], expected: str) -> None:
    with pytest.raises(TypeError, match=expected) as caught:
        encode_call(fn, args)
    assert "backend='memory'" in str(caught.value)
    assert caught.value.__suppress_context__


@pytest.mark.parametrize(
    ("ranks", "args", "expected"),
    [
        ("2", (), r"ranks must be a whole number; got '2'"),
        (2.0, (), r"ranks must be a whole number; got 2\.0"),
        (True, (), r"ranks must be a whole number; got True"),
        (2, 5, r"args must be a tuple or a list .*args=\(5,\); got 5"),
        (2, "ab", r"args must be a tuple or a list .*args=\('ab',\); got 'ab'"),
    ],
)
def test_wrong_arguments_of_run_say_what_is_wanted(ranks: Any, args: Any, expected: str) -> None:
    with pytest.raises(TypeError, match=expected):
        shoal.run(abs, ranks, "memory", args)


def test_what_is_called_must_be_a_function() -> None:
    with pytest.raises(TypeError, match="needs a function to call on every rank; got 3"):
        shoal.run(3, 2, "memory")  # type: ignore[arg-type]
