"""What every operation has: a header that it shows, a payload that it moves, flat memory for it."""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from shoal.comm.operation.reduction import ReduceOp
from shoal.errors import MismatchError
from shoal.system.public_call import call_of, told_apart
from shoal.system.rank_names import name_ranks
from shoal.torch_support.dtypes import dtype_number, dtype_numbered

# Calls of a training step, which a rank may want to leave out.
_OF_STEPS = {"loss.backward()", "optimizer.step()", "scaler.step()"}
NOTHING_MOVED = "; nothing was moved"
_LENGTHS = struct.Struct("<HHHH")
_MOST_SHOWN = 40
_MAX_SITE_BYTES = 400


@dataclass(slots=True)
class Payload:
    """Flat contiguous tensors for a transport, with the counts of elements that go where.

    Attributes:
        source: What this rank contributes; ``None`` where it contributes nothing.
        target: Where this rank's result goes; the source itself for in-place operations.
        counts: Elements per rank: of the result (gathers), or of the source (scatters).
        arriving: Elements that arrive from each rank, for all_to_all.
        matrix: Elements from each rank (row) to each (column), for all_to_all.
        op: The reduction, where there is one.
        root: The rank of the group that sends or receives alone; or the peer.
        total: Elements the whole group moves; zero when there is nothing to do anywhere.
        wires: What each rank's transport added to its header.
    """

    source: Tensor | None = None
    target: Tensor | None = None
    counts: Sequence[int] = ()
    arriving: Sequence[int] = ()
    matrix: Sequence[Sequence[int]] = ()
    op: ReduceOp = ReduceOp.SUM
    root: int = 0
    total: int = 0
    wires: Sequence[bytes] = ()

    @property
    def given(self) -> Tensor:
        """The source, where this rank must have one."""
        assert self.source is not None
        return self.source

    @property
    def gotten(self) -> Tensor:
        """The target, where this rank must have one."""
        assert self.target is not None
        return self.target

    @property
    def num_bytes(self) -> int:
        """The larger of what this rank gives and gets."""
        given = self.source.nbytes if self.source is not None else 0
        if self.target is None or self.target is self.source:
            return given
        return max(given, self.target.nbytes)

    def on_host(self) -> Payload:
        """The payload itself, or one in host memory in place of a GPU's."""
        source, target = self.source, self.target
        if all(tensor is None or tensor.is_cpu for tensor in (source, target)):
            return self
        staged = None if source is None else _host_memory(source).copy_(source)
        if target is source:
            return replace(self, source=staged, target=staged)
        return replace(self, source=staged, target=None if target is None else _host_memory(target))


def _host_memory(like: Tensor) -> Tensor:
    return torch.empty_like(like, device="cpu", pin_memory=like.is_cuda)


class Operation(ABC):
    """One call of one collective on one rank."""

    kind: ClassVar[str]
    signature: str
    meta: tuple[int, ...] = ()
    source: Tensor | None = None
    """The flat data of this rank, known before headers are exchanged."""
    sink: Tensor | None = None
    """Where a rank that has no data gets some, if others may write there."""
    is_foreseeable = False
    """Whether the other ranks' headers may be taken to be those of last time, and compared later.

    See [Note: foreseen operations]. `check` and `reconsider` of such an operation must do without
    its ``_memory``.
    """
    _memory: ClassVar[frozenset[str]] = frozenset({"source"})
    """Attributes that refer to what is moved."""

    def check(self, headers: Sequence[Header], ranks: Sequence[int]) -> None:
        """Raises `MismatchError` for what the signature alone does not show.

        It looks at the headers only, so every rank comes to the same verdict.
        """

    @property
    def makes_result(self) -> bool:
        """Whether the result will be a new tensor."""
        return False

    @abstractmethod
    def prepare(self, headers: Sequence[Header], rank: int) -> Payload:
        """What the transport is to move, now that all headers are known."""

    def reconsider(
        self, headers: Sequence[Header], foreseen: Sequence[Header], ranks: Sequence[int]
    ) -> None:
        """Headers fit together but are not those that the payload was prepared with."""
        if [header.meta for header in headers] != [header.meta for header in foreseen]:
            raise mismatch(headers, ranks, "the sizes on some ranks are not those of last time")

    @abstractmethod
    def result(self) -> Tensor | None:
        """What the caller gets once the payload has moved."""

    def without_memory(self) -> Self:
        """The same call for `check` and `reconsider`, which keeps nothing alive that is moved."""
        other = self._copied()
        for name in self._memory:
            other.__dict__.pop(name, None)
        return other

    def _copied(self) -> Self:
        """The same call; `copy.copy` takes ten times as long."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other


# Headers ----------------------------------------------------------------------------------------


class Header(NamedTuple):
    """One rank's view of one operation.

    Attributes:
        signature: What must be equal on every rank, as a reader would write the call.
        meta: Numbers that may differ between ranks and that the others need.
        wire: What the transport adds, for example where the data lies.
        site: Where in the user's code it comes from: an `origin`.
    """

    signature: str
    meta: tuple[int, ...]
    wire: bytes
    site: str

    def encode(self) -> bytes:
        """The header as bytes, small enough for the control page."""
        signature = self.signature.encode(errors="replace")
        meta = array("q", self.meta).tobytes()
        site = self.site.encode(errors="replace")[-_MAX_SITE_BYTES:]
        lengths = _LENGTHS.pack(len(signature), len(meta), len(self.wire), len(site))
        return b"".join((lengths, signature, meta, self.wire, site))

    @classmethod
    def decode(cls, data: bytes) -> Header:
        """The inverse of `encode`."""
        cuts = []
        end = _LENGTHS.size
        for length in _LENGTHS.unpack_from(data):
            cuts.append(slice(end, end + length))
            end += length
        signature, meta, wire, site = (data[cut] for cut in cuts)
        return cls(
            signature.decode(),
            tuple(array("q", meta)),
            bytes(wire),
            site.decode(errors="replace"),
        )


@lru_cache(maxsize=4096)
def spec(dtype: torch.dtype, shape: tuple[int | str, ...]) -> str:
    """A dtype and a shape the way error messages show them: ``float32[3, 5]``."""
    return f"{str(dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}]"


# A training loop shows the same few headers again and again.
encode = lru_cache(maxsize=4096)(Header.encode)
decode = lru_cache(maxsize=4096)(Header.decode)


def check_equal(headers: Sequence[Header], ranks: Sequence[int], number: int) -> None:
    """Raises unless every rank of the group called the same thing as operation ``number``."""
    first = headers[0].signature
    for header in headers:
        if header.signature != first:
            calls = {call_of(each.site) for each in headers}
            what = "called different operations as" if calls == {""} else "made different calls, at"
            if len(calls) == 1 and calls != {""}:
                what = "came to different operations of one call, at"
            raise mismatch(headers, ranks, f"the ranks {what} #{number}")


def mismatch(headers: Sequence[Header], ranks: Sequence[int], problem: str) -> MismatchError:
    """An error that lists who called what, and from where; equal calls share a line."""
    callers: dict[tuple[str, str], list[int]] = {}
    for rank, header in zip(ranks, headers, strict=True):
        callers.setdefault((header.signature, header.site), []).append(rank)
    lines = [f"{problem}{NOTHING_MOVED}:"]
    for (signature, site), members in callers.items():
        call, inside = told_apart(signature, site)
        lines.append(f"  {name_ranks(members)}: {call}")
        lines += [f"    inside: {inside}"] * bool(inside)
    lines.append(_remedy([site for _, site in callers]))
    return MismatchError("\n".join(lines))


def _remedy(sites: Sequence[str]) -> str:
    """What users can change: their own calls, or what they passed to them."""
    calls = {call_of(site) for site in sites}
    if calls == {""}:
        return "Make every rank of the group issue the same operations in the same order."
    if len(calls) == 1:
        return f"All ranks are in {calls.pop()}: give it the same arguments on every rank."
    text = "Let every rank make the same calls in the same order."
    if calls & _OF_STEPS:
        text += (
            " A step that one rank leaves out must be left out by all: decide together, for "
            "example `if world.agree(is_bad): optimizer.zero_grad(); continue`."
        )
    return text


def encode_spec(tensor: Tensor) -> tuple[int, ...]:
    """The number of the dtype, whether it is on a GPU, and the shape."""
    return (dtype_number(tensor.dtype), int(tensor.is_cuda), *tensor.shape)


def decode_spec(meta: Sequence[int]) -> tuple[torch.dtype, tuple[int, ...]]:
    """Dtype and shape of what `encode_spec` was given."""
    return dtype_numbered(meta[0]), tuple(meta[2:])


def are_alike(meta: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two tensors have the same dtype and shape, wherever they are."""
    return decode_spec(meta) == decode_spec(other)


def make_like(meta: Sequence[int], device: torch.device) -> Tensor:
    """A tensor like another rank's: on ``device`` if that is of the same kind."""
    dtype, shape = decode_spec(meta)
    if not meta[1]:
        device = torch.device("cpu")
    elif device.type == "cpu" and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    return torch.empty(shape, dtype=dtype, device=device)


def require_tensor(call: str, tensor: object, out: object = None) -> None:
    """Refuses what is no tensor; there may be no ``out``."""
    if tensor is None:
        raise TypeError(f"{call}() takes a tensor; got None")
    require_tensors(call, tensor, out)


def require_tensors(call: str, *tensors: object) -> None:
    """Refuses what is neither a tensor nor None."""
    for value in tensors:
        if value is not None and not isinstance(value, Tensor):
            raise TypeError(
                f"{call}() takes a tensor; got {_shown_type(value)}. Make one with "
                "torch.tensor(...), or use a call for objects, such as all_gather_object() or "
                "broadcast_object()"
            )


def _shown_type(value: object) -> str:
    shown = repr(value)
    kind = type(value).__name__
    return f"{kind} {shown}" if len(shown) <= _MOST_SHOWN else f"one of type {kind}"


# Flat memory ------------------------------------------------------------------------------------


def flatten(tensor: Tensor) -> Tensor:
    """A flat contiguous view, or a copy where there can be no view; bool as bytes."""
    flat = tensor.detach() if tensor.requires_grad else tensor
    if flat.dim() == 1 and flat.stride(0) == 1 and flat.is_floating_point() and not flat.is_neg():
        return flat  # the usual case, and worth a few microseconds
    flat = flat.contiguous().view(-1)
    flat = flat.resolve_conj().resolve_neg()  # what lies in memory is what counts from here on
    if flat.stride(0) != 1:  # a single element of a longer row keeps that row's stride
        flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8) if flat.dtype is torch.bool else flat


def write_back(flat: Tensor, tensor: Tensor) -> None:
    """Copies a result into the caller's tensor where `flatten` had to copy."""
    if flat.data_ptr() != tensor.data_ptr() or not tensor.is_contiguous():
        values = flat.view(torch.bool) if tensor.dtype is torch.bool else flat
        with writing(tensor):
            tensor.detach().copy_(values.view(tensor.shape))


# Autograd does not follow what `flatten` returns, so there is nothing to switch off.
_AS_IT_IS = nullcontext()


def writing(*tensors: Tensor | None) -> AbstractContextManager[object]:
    """Allows to write to flat tensors, also if they were made in inference mode."""
    for tensor in tensors:
        if tensor is not None and tensor.is_inference():
            return torch.inference_mode()
    return _AS_IT_IS
