"""What stands for parameters whose values are on other ranks: for users, and for autograd.

[Note: absent parameters]
While the whole is gone, its parameters have no values, only a shape, and another class,
`AbsentParameter`, which gathers the whole on any access that needs values. Outside of forward they
keep it even then: autograd must not save the memory of a parameter that will soon be freed.

[Note: saved parameters]
Autograd would keep the memory of a gathered parameter alive until backward. So hooks save its
group, offset and shape instead, and backward gathers the group again, hidden: its parameters stay
absent unless something uses them, as blocks do that are computed again. A parameter that has new
values by then is an error, as it is in plain PyTorch: each change starts a new *generation*. What
is no parameter is kept as it is, and checked for writes, as autograd does where no hooks are.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from shoal.strategies.engine.gather_buffers import Place
from shoal.torch_internals.autograd import has_saved_tensors_hooks
from shoal.torch_internals.tensors import (
    ATTRIBUTES_WITHOUT_VALUES,
    as_plain_tensors,
    is_versioned,
    storage_id,
    unchanged,
    versioned,
)

if TYPE_CHECKING:
    from shoal.strategies.engine.flat_group import FlatGroup
    from shoal.strategies.engine.gathering import Gathering

    # Group, generation and place: see [Note: saved parameters].
    _Saved = tuple[FlatGroup, int, Place]

# What can be asked of a parameter without its values.
_HARMLESS = frozenset(
    {
        "grad", "requires_grad", "shape", "dtype", "device", "is_leaf", "grad_fn", "ndim",
        "is_cuda", "is_sparse", "layout", "names", "is_meta", "is_quantized", "size",
        "dim", "numel", "nelement", "element_size", "itemsize", "nbytes", "stride", "__len__",
        "is_floating_point", "is_complex", "register_post_accumulate_grad_hook", "register_hook",
        "requires_grad_", "untyped_storage", *ATTRIBUTES_WITHOUT_VALUES,
        "retains_grad", "output_nr", "is_contiguous", "get_device",
        "is_pinned", "is_shared",
    }
)  # fmt: skip


class AbsentParameter(nn.Parameter):
    """A parameter whose values are on other ranks right now; see [Note: absent parameters]."""

    _group: ClassVar[FlatGroup]
    _gathering: ClassVar[Gathering]

    @classmethod
    def of_group(cls, group: FlatGroup, gathering: Gathering) -> type[AbsentParameter]:
        """The class of one group's parameters: it knows where they are, so that they need not."""
        return type(cls.__name__, (cls,), {"_group": group, "_gathering": gathering})

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saved as what it is for users: a parameter with values."""
        return nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Copied as what it is for users, too."""
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        copied: nn.Parameter = memo[id(self)]
        return copied

    @classmethod
    def __torch_function__(
        cls, func: object, types: object, args: tuple[object, ...] = (), kwargs: object = None
    ) -> object:
        """Gathers what is absent among the arguments, then does what was asked for."""
        keywords = dict(kwargs or {})  # type: ignore[call-overload]
        if _asked(func) in _HARMLESS:
            with as_plain_tensors():
                return func(*args, **keywords)  # type: ignore[operator]
        absent = _absent_among((args, keywords))
        groups = [parameter._group for parameter in absent]
        for group in groups:  # gathering one must not free another
            group.pins += 1
        try:
            for parameter in absent:
                if is_absent(parameter):  # not if it was gathered with another
                    parameter._gathering.need(parameter._group)
            watched = [parameter for parameter in absent if is_absent(parameter)]
            if not watched:
                return func(*args, **keywords)  # type: ignore[operator]
            with watched[0]._gathering.saved.watching(), as_plain_tensors():
                return func(*args, **keywords)  # type: ignore[operator]
        finally:
            for group in groups:
                group.pins -= 1


def is_absent(value: object) -> bool:
    """Whether the uses of a parameter are watched."""
    return issubclass(type(value), AbsentParameter)


def _asked(func: object) -> str:
    name = getattr(func, "__name__", "")
    return getattr(func.__self__, "__name__", "") if name in ("__get__", "__set__") else name  # type: ignore[attr-defined]


def _absent_among(values: Iterable[object]) -> list[AbsentParameter]:
    found: list[AbsentParameter] = []
    for value in values:
        kind = type(value)
        if issubclass(kind, AbsentParameter):
            found.append(value)  # type: ignore[arg-type]
        elif issubclass(kind, tuple | list):
            found += _absent_among(value)  # type: ignore[arg-type]
        elif issubclass(kind, dict):
            found += _absent_among(value.values())  # type: ignore[attr-defined]
    return found


class SavedParameters:
    """Hooks on what autograd saves of one model's sharded parameters."""

    def __init__(self, need: Callable[[FlatGroup], None]) -> None:
        """``need`` gathers the whole of a group."""
        self._need = need
        self._wholes: dict[int, tuple[int, int, FlatGroup]] = {}
        self._generation = self._all_changed = 0
        self._changed: dict[tuple[int, int], int] = {}
        self._packing: Callable[[Tensor], object] = self._pack

    def last_change(self, parameters: Iterable[tuple[int, int]]) -> int:
        """Grows when any of these, by group and index in it, has new values."""
        return max((self._changed.get(each, 0) for each in parameters), default=0) + (
            self._all_changed
        )

    def note_whole(self, group: FlatGroup) -> None:
        """The group has a whole, whose memory is known from now on, and no other."""
        buffer = group.buffer
        self._wholes[group.index] = buffer.begin, buffer.end, group

    def forget_whole(self, group: FlatGroup) -> None:
        """The group's whole is about to be freed."""
        self._wholes.pop(group.index, None)

    def changed(self, parameters: Iterable[tuple[int, int]]) -> None:
        """Some parameters, by group and index in it, have new values."""
        self._generation += 1
        self._changed.update(dict.fromkeys(parameters, self._generation))

    def everything_changed(self) -> None:
        """All parameters may have new values."""
        self._generation += 1
        self._all_changed = self._generation

    def saving(self) -> saved_tensors_hooks:
        """While this is on, what autograd saves of sharded parameters is gathered when needed."""
        return saved_tensors_hooks(self._packing, self._unpack)

    def watching(self) -> AbstractContextManager[Any]:
        """Around one use of a parameter, where other hooks do not decide what is saved."""
        return nullcontext() if has_saved_tensors_hooks() else self.saving()

    def hide_from_compiler(self) -> None:
        """For models with compiled parts: `torch.compile` leaves alone what is done with them."""
        self._packing = torch.compiler.disable(self._pack)

    def _pack(self, tensor: Tensor) -> object:
        kind = type(tensor)
        if kind is not Tensor and kind is not nn.Parameter:  # it may have no address
            return self._pack_by_storage(tensor)
        # Most of what is saved is no parameter, and few groups are there at a time.
        try:
            address = tensor.data_ptr()
        except RuntimeError:  # a sparse tensor has none
            return versioned(tensor)
        for begin, end, group in self._wholes.values():
            if begin <= address < end:
                return self._place(tensor, group, (address - begin) // tensor.itemsize)
        return versioned(tensor)

    def _pack_by_storage(self, tensor: Tensor) -> object:
        storage = storage_id(tensor)
        for _, _, group in self._wholes.values():
            if group.buffer.storage_id == storage:
                return self._place(tensor, group, int(tensor.storage_offset()))
        return versioned(tensor)

    def _place(self, tensor: Tensor, group: FlatGroup, start: int) -> object:
        """What autograd keeps of a sharded parameter: where it lies, not its memory."""
        dtype = tensor.dtype
        if dtype is not group.whole.dtype or (dtype.is_complex and tensor.is_conj()):
            return versioned(tensor)
        return group, self._generation, (tensor.shape, tensor.stride(), start)

    def _unpack(self, packed: object) -> Tensor:
        if isinstance(packed, Tensor):  # what a store has given back
            return packed
        if is_versioned(packed):
            return unchanged(packed)
        saved: _Saved = packed  # type: ignore[assignment]
        group, generation, place = saved
        if generation != self._generation and self._is_old(saved):
            raise RuntimeError(
                "backward needs parameters that were changed after forward used them, by an "
                "optimizer's step or by hand: run forward again before this backward"
            )
        if not group.has_whole:
            self._need(group)
        return group.buffer.view(place)

    def _is_old(self, saved: _Saved) -> bool:
        group, generation, (_, _, start) = saved
        index = bisect_right(group.layout.slots, start, key=lambda slot: slot.start) - 1
        changed = self._changed.get((group.index, index), 0)
        return max(changed, self._all_changed) > generation
