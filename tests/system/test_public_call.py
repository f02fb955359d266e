"""The line of the user's code where a thread is, and the public call made there."""

from __future__ import annotations

import os
import sys
import threading
from types import FrameType
from typing import Any

import pytest
import torch

import shoal
from faults.worlds import site_of
from shoal.system.public_call import (
    call_of,
    call_site,
    near_origin,
    origin,
    place_of,
    public_call,
    told,
)

PACKAGE = os.path.dirname(shoal.__file__)
TORCH = os.path.dirname(torch.__file__)


def test_a_call_site_is_the_users() -> None:
    assert call_site().startswith(f"{__file__}:")


def test_what_torch_calls_for_the_user_is_the_users_call() -> None:
    """A hook in backward: the line of ``loss.backward()`` helps, one of torch does not."""
    of_torch: dict[str, Any] = {"call_site": call_site}
    exec(compile("def hook(): return call_site()", torch.__file__, "exec"), of_torch)
    assert of_torch["hook"]().startswith(f"{__file__}:")


def function(name: str, file: str, calls: Any) -> Any:
    """A function of that name as if from that file, which calls another one."""
    names = {"calls": calls}
    exec(compile(f"def {name}(): return calls()", file, "exec"), names)
    return names[name]


def called(*frames: tuple[str, str]) -> str | None:
    """What is found where this test calls the functions one inside the other."""
    call: Any = look
    for name, file in reversed(frames):
        call = function(name, file, call)
    found: str | None = call()  # the call
    return found


def look() -> str | None:
    return public_call(sys._getframe(1), "group")


def name_of(*frames: tuple[str, str]) -> str:
    return str(called(*frames)).partition(" at ")[0]


OF_SHOAL = [
    ("checkpoint/saving.py", "save", "shoal.save()"),
    ("checkpoint/loading.py", "load", "shoal.load()"),
    ("api.py", "as_distributed", "shoal.as_distributed()"),
    ("strategies/model.py", "forward", "model.forward()"),
    ("strategies/model.py", "full_state_dict", "model.full_state_dict()"),
    ("optim/optimizer.py", "step", "optimizer.step()"),
    ("optim/scaler.py", "step", "scaler.step()"),
    ("comm/world.py", "agree", "world.agree()"),
    ("comm/backend.py", "all_reduce", "group.all_reduce()"),
    ("comm/work.py", "wait", "work.wait()"),
    ("data/loader.py", "__iter__", "for ... in loader"),
    ("data/loader.py", "_epoch", "for ... in loader"),
    ("data/loader.py", "state_dict", "loader.state_dict()"),
    ("strategies/engine/parameters.py", "full", "model.full_parameters()"),
    ("strategies/engine/absent.py", "__torch_function__", "a use of a parameter or gradient"),
    ("wrapping.py", "as_distributed", "shoal.as_distributed()"),
]


@pytest.mark.parametrize(("file", "name", "expected"), OF_SHOAL)
def test_functions_of_shoal(file: str, name: str, expected: str) -> None:
    inside = ("_exchange", f"{PACKAGE}/comm/process_backend.py")
    assert name_of((name, f"{PACKAGE}/{file}"), inside) == expected
    assert os.path.exists(f"{PACKAGE}/{file}"), "the file has moved"


def test_a_private_function_is_not_what_users_call() -> None:
    private = ("_save", f"{PACKAGE}/checkpoint/saving.py")
    assert name_of(private, ("step", f"{PACKAGE}/optim/optimizer.py")) == "optimizer.step()"


def test_hooks_that_torch_calls() -> None:
    hook = ("on_gradient", f"{PACKAGE}/strategies/engine/passes.py")
    assert name_of(("backward", f"{TORCH}/_tensor.py"), hook) == "loss.backward()"
    assert name_of(("_call_impl", f"{TORCH}/nn/modules/module.py"), hook) == "model.forward()"


def test_the_outermost_call_counts_and_its_line() -> None:
    layer = ("forward", "/home/user/model.py")
    gather = ("gather", f"{PACKAGE}/strategies/engine/gathering.py")
    found = called(("save", f"{PACKAGE}/checkpoint/saving.py"), layer, gather)
    assert found == f"shoal.save() at {site_of(called, '# the call')}"


def test_what_started_the_rank_is_no_call_of_the_users() -> None:
    started = [("main", "<string>"), ("serve", f"{PACKAGE}/launch/function/worker.py")]
    assert called(*started) is None
    mine = [("main", "/home/user/train.py"), ("barrier", f"{PACKAGE}/comm/backend.py")]
    assert called(*started, *mine) == "group.barrier() at /home/user/train.py:1"


def test_a_thread_of_shoals_own_has_none() -> None:
    found: list[str | None] = []
    run = function("run", f"{PACKAGE}/comm/work.py", lambda: found.append(look_from_thread()))
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [None]


def look_from_thread() -> str | None:
    """As if the functions of this test between it and the thread were shoal's."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return public_call(frame, "group")


# Where operations come from ---------------------------------------------------------------------

SAVE = ("save", f"{PACKAGE}/checkpoint/saving.py")
LAYER = ("forward", "/home/user/model.py")
GATHER = ("all_gather", f"{PACKAGE}/comm/backend.py")


def origin_of(*frames: tuple[str, str], signature: str, find: Any = origin) -> str:
    """Of an operation that begins where the functions call each other."""
    names = {"find": find, "signature": signature}
    begin = "def begin(): return find(signature, 'world')"
    exec(compile(begin, f"{PACKAGE}/comm/process_backend.py", "exec"), names)
    call: Any = names["begin"]
    for name, file in reversed(frames):
        call = function(name, file, call)
    found: str = call()
    return found


MAIN = ("main", "/home/user/train.py")


def test_an_operation_that_users_wrote_is_told_as_they_wrote_it() -> None:
    found = origin_of(MAIN, GATHER, signature="all_gather(int64[1])")
    assert told("all_gather(int64[1])", found) == "all_gather(int64[1]) at /home/user/train.py:1"
    assert call_of(found) == ""


def test_the_users_call_comes_before_the_operation_inside_of_it() -> None:
    found = origin_of(MAIN, SAVE, GATHER, signature="all_gather(int64[1])")
    text = told("all_gather(int64[1])", found, " (operation #3)")
    assert text == (
        "shoal.save() at /home/user/train.py:1, inside: all_gather(int64[1]) (operation #3)"
    )
    assert (call_of(found), place_of(found)) == ("shoal.save()", "/home/user/train.py:1")


def test_an_operation_that_has_the_name_of_its_call_is_told_once() -> None:
    step = ("step", f"{PACKAGE}/optim/optimizer.py")
    found = origin_of(MAIN, step, signature="optimizer.step()")
    assert told("optimizer.step()", found) == "optimizer.step() at /home/user/train.py:1"


def test_users_code_inside_of_a_call_keeps_its_line() -> None:
    model = ("forward", f"{PACKAGE}/strategies/model.py")
    found = origin_of(MAIN, model, LAYER, GATHER, signature="all_gather()")
    call, _, inside = told("all_gather()", found).partition(", inside: ")
    assert call == "model.forward() at /home/user/train.py:1"
    assert inside == "all_gather() at /home/user/model.py:1"
    near = origin_of(MAIN, model, LAYER, GATHER, signature="all_gather()", find=near_origin)
    assert near == "/home/user/model.py:1"
