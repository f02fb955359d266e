"""Where in the user's code a thread is: the line, and the public call of shoal's made there."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from functools import lru_cache
from types import FrameType
from typing import NamedTuple

from shoal.system.site import PACKAGE, is_ours, is_stdlib, is_torch

# What users call an object whose class is in a folder or file of the package; the first that fits.
_OWNERS = (
    ("api.py", "shoal"),
    ("checkpoint/together.py", "pending_save"),
    ("checkpoint/", "shoal"),
    ("comm/differentiable.py", "shoal"),
    ("comm/mesh.py", "mesh"),
    ("comm/world.py", "world"),
    ("comm/work.py", "work"),
    ("comm/shm/pending.py", "work"),
    ("data/", "loader"),
    ("optim/scaler.py", "scaler"),
    ("optim/", "optimizer"),
    ("sampling.py", "sampler"),
    ("strategies/", "model"),
    ("verification/", "shoal"),
    ("wrapping.py", "shoal"),
)
# What is outside of these called shoal's own start of a rank, not a collective.
_STARTERS = ("cli/", "launch/")
# What users write where Python calls another name for them, or only the inside of a call is left.
_WRITTEN = {
    "__call__": "{}.forward()",
    "__enter__": "with {}",
    "__exit__": "with {}",
    "__iter__": "for ... in {}",
    "__len__": "len({})",
    "full": "{}.full_parameters()",
}
_OF_LOADERS = ("__len__", "load_state_dict", "state_dict")
_TENSOR_USES = ("__torch_function__", "__torch_dispatch__")
_BACKWARD_FILES = ("_tensor.py", "autograd")
_RUNS_BACKWARD = "_engine_run_backward"
_TAB = "\t"
_MOST_PLACE = 160
_USER, _TORCH, _STDLIB, _STARTER, _OURS = range(5)


def stack(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame and those that called it, from the inside out."""
    while frame is not None:
        yield frame
        frame = frame.f_back


# Every operation asks where it came from, so the answer for a file must be quick.
@lru_cache(maxsize=4096)
def _is_in_between(filename: str) -> bool:
    """Whether a file is shoal's, or of those that call shoal for the user: hooks, backward."""
    return is_ours(filename) or is_torch(filename) or filename == contextlib.__file__


def call_frame() -> FrameType | None:
    """The innermost frame that is the user's own."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_in_between(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def call_site() -> str:
    """File and line of the innermost frame that is the user's own."""
    frame = call_frame()
    return "<shoal>" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


# Public calls -----------------------------------------------------------------------------------


class PublicCall(NamedTuple):
    """A call as users write it, and the place of it: file and line."""

    name: str
    place: str


def public_call(frame: FrameType | None, group: str) -> str | None:
    """The outermost call of shoal's that the user's code made, as users write it, and its line.

    None if the user's code is not on the stack, as in a thread of shoal's own.

    Args:
        frame: The thread's innermost.
        group: What users call the ranks that the thread waits in: "world" or "group".
    """
    found = _find(list(stack(frame)), group)
    return None if found is None else f"{found.name} at {found.place}"


def _find(frames: list[FrameType], group: str) -> PublicCall | None:
    """The outermost of the calls on a stack, which has its innermost frame first."""
    user: FrameType | None = None
    between: list[str] = []
    for each in reversed(frames):
        file, name = each.f_code.co_filename, each.f_code.co_name
        kind = _kind(file)
        if kind == _TORCH:
            between.append(f"{file}:{name}")
        elif kind == _USER:
            user, between = each, []
        elif kind == _STARTER:
            user = None
        elif kind == _OURS and user is not None and (call := _call(file, name, between, group)):
            return PublicCall(call, _place(user))
    return None


@lru_cache(maxsize=4096)
def _kind(file: str) -> int:
    """Whose a file is."""
    if is_torch(file):
        return _TORCH
    if is_ours(file):
        return _STARTER if file.removeprefix(PACKAGE).startswith(_STARTERS) else _OURS
    return _STDLIB if is_stdlib(file) else _USER


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _call(file: str, name: str, between: list[str], group: str) -> str | None:
    """How users write a call of one of our functions; None for one that they do not call.

    ``between`` are functions of torch's by which the user's code got there.
    """
    if any("backward" in each and _is_autograd(each) for each in between):
        return "loss.backward()"
    if any(f"{os.sep}modules{os.sep}module.py:" in each for each in between):
        return "model.forward()"
    if name in _TENSOR_USES:
        use = between[0].rpartition(":")[2] if between else ""
        return f"{use}()" if use else "a use of a parameter or gradient"
    inside = file.removeprefix(PACKAGE)
    owner = next((owner for begin, owner in _OWNERS if inside.startswith(begin)), group)
    if owner == "loader" and name not in _OF_LOADERS:
        name = "__iter__"  # or a generator that it gave
    if name in _WRITTEN:
        return _WRITTEN[name].format(owner)
    return None if name.startswith("_") else f"{owner}.{name}()"


def _is_autograd(place: str) -> bool:
    return any(f"{os.sep}{part}" in place for part in _BACKWARD_FILES)


# Where operations come from ---------------------------------------------------------------------


def origin(signature: str, group: str) -> str:
    """Where in the user's code an operation begins, for `told`; a short text without tensors.

    A line, if the user wrote the operation there. Else the outermost public call with its line,
    and the innermost line of the user's, if that is another.

    Args:
        signature: Of the operation, as a reader would write the call.
        group: What users call the ranks: "world" or "group".
    """
    frames = list(stack(sys._getframe(1)))
    inner = call_frame()
    if inner is None:
        frames = _frames_of_backward()
    return _origin(signature, _find(frames, group), None if inner is None else _place(inner))


def near_origin(signature: str, group: str) -> str:
    """The same, as far as it is the same whenever the innermost line of the user's is."""
    frames: list[FrameType] = []
    inner = call_frame()
    for each in stack(sys._getframe(1)):
        frames.append(each)
        if each is inner:
            break
    return _origin(signature, _find(frames, group), None if inner is None else _place(inner))


def _origin(signature: str, found: PublicCall | None, inner: str | None) -> str:
    if found is None:
        return inner or "<shoal>"
    method = found.name.rpartition(".")[2].removesuffix(")")
    if inner == found.place and signature.startswith(method):
        return inner
    parts = [found.name, _clipped(found.place)]
    if inner is not None and inner != found.place:
        parts.append(_clipped(inner))
    return _TAB.join(parts)


def _frames_of_backward() -> list[FrameType]:
    """The main thread's stack, if it is in a backward that the calling thread carries out."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None or frame.f_code.co_name != _RUNS_BACKWARD:
        return []
    return [sys._getframe(1), *stack(frame)]


def _clipped(place: str) -> str:
    return place if len(place) <= _MOST_PLACE else f"...{place[3 - _MOST_PLACE :]}"


def told(signature: str, origin: str, detail: str = "") -> str:
    """An operation, the way users know it: their call first, if it is another."""
    call, inside = told_apart(signature, origin, detail)
    return f"{call}, inside: {inside}" if inside else call


def told_apart(signature: str, origin: str, detail: str = "") -> tuple[str, str]:
    """The user's call with its line, and the operation inside of it, if that is another."""
    name, *places = origin.split(_TAB)
    if not places:
        return f"{signature}{detail} at {origin}", ""
    if signature == name:
        return f"{name}{detail} at {places[0]}", ""
    inner = f" at {places[1]}" if len(places) > 1 else ""
    return f"{name} at {places[0]}", f"{signature}{detail}{inner}"


def place_of(origin: str) -> str:
    """The innermost line of the user's."""
    return origin.split(_TAB)[-1]


def call_of(origin: str) -> str:
    """The name of the user's call, if the operation is only a part of it."""
    name, *places = origin.split(_TAB)
    return name if places else ""
