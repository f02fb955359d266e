"""Autograd, transforms and compilation: where a call comes from, and when a backward ends."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch._guards import CompileContext
from torch.autograd import forward_ad
from torch.nn.parallel import DistributedDataParallel

from shoal.torch_internals.compiler_module import COMPILER

_P = ParamSpec("_P")
_R = TypeVar("_R")


def not_compiled(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Keeps the compiler out of a function.

    `torch.compiler.disable` does the same, but loads the compiler when a function is defined,
    `torch._disable_dynamo` when it is first called. Either takes a second. While the compiler is
    not loaded there is nothing to keep out.
    """
    disabled: Callable[_P, _R] = torch._disable_dynamo(function)

    @functools.wraps(function)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if COMPILER in sys.modules:
            return disabled(*args, **kwargs)
        return function(*args, **kwargs)

    return wrapper


def is_in_backward() -> bool:
    """Whether this thread is called by a running backward."""
    return torch._C._current_graph_task_id() != -1


def call_after_backward(callback: Callable[[], None]) -> None:
    """Calls something when the running backward has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def has_saved_tensors_hooks() -> bool:
    """Whether something else, such as activation checkpointing, packs what autograd saves."""
    return top_saved_tensors_hooks() is not None


def top_saved_tensors_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """What packs and unpacks what autograd saves right now, if anything does."""
    hooks: tuple[Callable[..., Any], Callable[..., Any]] | None
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks


def transforms() -> list[str]:
    """The transforms of `torch.func` around this call, from the outside in: "Grad", "Vmap"."""
    stack = torch._C._functorch.get_interpreter_stack() or ()
    return [each.key().name for each in stack]


def is_forward_mode() -> bool:
    """Whether a level of `torch.autograd.forward_ad` is open, in any thread."""
    return forward_ad._current_level >= 0


def surrounding_ddp() -> nn.Module | None:
    """The `DistributedDataParallel` whose forward is under way."""
    active: nn.Module | None = DistributedDataParallel._active_ddp_module
    return active


def is_tracing() -> bool:
    """Whether `torch.compile` traces what calls this."""
    return CompileContext.current_compile_id() is not None
