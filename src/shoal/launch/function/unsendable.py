"""What of a call cannot be sent to another process, in words: the name of the variable, at best."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

_DEEPEST = 8


def explain(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    error: Exception,
    encode: Callable[[Any], bytes],
) -> str:
    """Why ``encode`` failed, from trying the parts one by one."""
    where, value, reason = "it", None, error
    for number, argument in enumerate(args):
        if (problem := _problem(argument, encode)) is not None:
            where, value, reason = f"argument {number} of it", argument, problem
            break
    else:
        found = _find(fn, encode, set(), _DEEPEST)
        if found is not None:
            where, value, reason = found
    what = "" if value is None else f" (a {type(value).__name__})"
    return (
        f"{_name(fn)} cannot be sent to the ranks, which are processes: {where}{what} cannot be "
        f"pickled: {reason}. Make it inside of the function, pass what it is made from, or use "
        "backend='memory', whose ranks are threads."
    )


def _find(
    fn: Any, encode: Callable[[Any], bytes], seen: set[int], depth: int
) -> tuple[str, Any, Exception] | None:
    """The variable that a function uses, or one that it calls, and that cannot be pickled."""
    for name, value in _variables(fn):
        if id(value) in seen:
            continue
        seen.add(id(value))
        problem = _problem(value, encode)
        if problem is None:
            continue
        deeper = _find(value, encode, seen, depth - 1) if depth else None
        if deeper is not None:
            return deeper
        return f"{name}, which {_name(fn)} uses,", value, problem
    return None


def _variables(fn: Any) -> Iterator[tuple[str, Any]]:
    fn = getattr(fn, "__func__", fn)
    if not isinstance(fn, types.FunctionType):
        return
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=False):
        try:
            yield repr(name), cell.cell_contents
        except ValueError:  # it is empty
            continue
    for name in dict.fromkeys(_names(fn.__code__)):
        if name in fn.__globals__:
            yield f"the global {name!r}", fn.__globals__[name]


def _names(code: types.CodeType) -> Iterator[str]:
    """All names that a function speaks of, and the functions inside of it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _problem(value: Any, encode: Callable[[Any], bytes]) -> Exception | None:
    try:
        encode(value)
    except Exception as error:
        return error
    return None


def _name(fn: Any) -> str:
    code = getattr(getattr(fn, "__func__", fn), "__code__", None)
    name = getattr(fn, "__qualname__", None) or repr(fn)
    return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"
