"""The modes of torch that intercept every operation of a step, and every look at a tensor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shoal.optim.proof.following import Following, Results
from shoal.optim.proof.marks import MIXED
from shoal.optim.proof.rules import Effect, rule_for
from shoal.optim.stepping.streams import Streams
from shoal.torch_internals.tensors import ATTRIBUTES_OF_MEMORY, DispatchMode, without_torch_function

Run = Callable[[Any, Any, dict[str, Any], Results], Any]
"""Runs an operation, given its arguments and the marks that its results will have."""

_SHAPE_READS: dict[Any, str] = {
    Tensor.shape.__get__: "shape",  # type: ignore[attr-defined]
    Tensor.ndim.__get__: "ndim",  # type: ignore[attr-defined]
    Tensor.nbytes.__get__: "nbytes",  # type: ignore[attr-defined]
    torch.numel: "numel",
    torch.is_same_size: "is_same_size",
    **{
        getattr(Tensor, name): name
        for name in ("size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset")
    },
    Tensor.__len__: "len",
    Tensor.is_same_size: "is_same_size",
}
_MEMORY_READS: dict[Any, str] = {
    **{
        getattr(Tensor, name): name
        for name in (
            "numpy", "tolist", "data_ptr", "untyped_storage", "storage", "share_memory_",
            "__array__", "__dlpack__", "__deepcopy__", "__reduce_ex__", *ATTRIBUTES_OF_MEMORY,
        )
    },
    Tensor.__cuda_array_interface__.__get__: "__cuda_array_interface__",
}  # fmt: skip


class SeededRun:
    """Runs operations; what draws for one parameter draws from that parameter's stream."""

    def __init__(self, streams: Streams | None, numbers: Sequence[int] | None = None) -> None:
        """``numbers`` has a parameter's number for its owner; without, they are the same."""
        self._streams, self._numbers = streams, numbers

    def __call__(self, operation: Any, args: Any, kwargs: dict[str, Any], marks: Results) -> Any:
        """Runs an operation."""
        if self._streams is None or rule_for(operation).effect is not Effect.DRAWS:
            return operation(*args, **kwargs)
        if marks[0] is None or marks[0].owner == MIXED:
            return operation(*args, **kwargs)
        owner = marks[0].owner
        number = owner if self._numbers is None else self._numbers[owner]
        return self._streams.draw(number, operation, args, kwargs)


@contextlib.contextmanager
def intercepting(following: Following, run: Run) -> Iterator[None]:
    """Inside, every operation is looked at by ``following`` and run by ``run``."""
    with _Operations(following, run), _Looks(following):
        yield


class _Operations(DispatchMode):
    """Everything that computes."""

    def __init__(self, following: Following, run: Run) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._following, self._run = following, run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, rule = kwargs or {}, rule_for(func)
        # What is looked at here is not the optimizer's doing.
        with without_torch_function():
            marks = self._following.before(rule, args, kwargs)
            result = self._run(func, args, kwargs, marks)
            self._following.after(rule, args, kwargs, result, marks)
        return result


class _Looks(TorchFunctionMode):
    """What asks a tensor for something without computing: its shape, its memory."""

    def __init__(self, following: Following) -> None:
        super().__init__()
        self._following = following

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = _SHAPE_READS.get(func)
        if name is not None:
            self._following.look_at_shape(args[0], name)
        elif func in _MEMORY_READS:
            self._following.look_at_memory(args[0], _MEMORY_READS[func])
        return func(*args, **(kwargs or {}))
