"""One group of parameters as flat memory: the whole, this rank's shard, and the gradients.

[Note: resident and sharded]
The parameters of a group are views of one flat buffer, the *whole*. Where parameters are
replicated the whole is always there. Where they are sharded it is made when it is gathered and
dropped afterwards, and this rank's *shard* has memory of its own. Whoever still holds a view of
a dropped whole keeps it alive; nothing ever points at freed memory.

[Note: absent parameters]
While the whole is gone, its parameters have no values, only a shape, and another class,
`AbsentParameter`, which gathers the whole on any access that needs values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from shoal.comm import Backend
from shoal.sharding.layout import GroupLayout


class FlatGroup:
    """The memory of one group on one rank."""

    def __init__(
        self,
        index: int,
        layout: GroupLayout,
        parameters: Sequence[nn.Parameter],
        backend: Backend,
        *,
        is_sharded: bool,
    ) -> None:
        """``parameters`` are in the order of the layout's slots; their values are taken over."""
        self.index, self.layout, self.parameters = index, layout, list(parameters)
        self.names = [slot.name for slot in layout.slots]
        self.is_sharded = is_sharded
        self.is_present = True
        self.pins = 0
        self._classes = [type(parameter) for parameter in parameters]
        first = parameters[0]
        if is_sharded:
            self.whole = torch.zeros(layout.num_elements, dtype=first.dtype, device=first.device)
        else:
            self.whole = backend.empty(layout.num_elements, first.dtype, first.device).zero_()
        self._nothing = first.detach().new_zeros(())
        self._take_over()
        low, high = layout.bounds[backend.rank], layout.bounds[backend.rank + 1]
        self.low, self.high = low, high
        self.shard = self.whole[low:high]
        if is_sharded:
            self.shard = backend.empty(high - low, first.dtype, first.device).copy_(self.shard)

    def _take_over(self) -> None:
        """Moves the parameters' values into the whole, and the parameters onto it."""
        with torch.no_grad():
            for slot, parameter in zip(self.layout.slots, self.parameters, strict=True):
                view = self.whole[slot.start : slot.stop].view(slot.shape)
                view.copy_(parameter)
                parameter.data = view

    @property
    def num_bytes_held(self) -> int:
        """Bytes of parameters that this rank holds now."""
        if not self.is_sharded:
            return self.whole.nbytes
        return self.shard.nbytes + (self.whole.nbytes if self.is_present else 0)

    def own_slice(self, buffer: Tensor) -> Tensor:
        """This rank's part of a buffer that is laid out like the whole."""
        return buffer[self.low : self.high]

    # What is made in inference mode could not be trained with afterwards.
    @torch.inference_mode(False)
    def vanish(self, gather: Callable[[FlatGroup], None]) -> None:
        """Frees the whole; ``gather`` is called when somebody wants it nevertheless."""
        if not self.is_present or not self.is_sharded:
            return
        self.is_present = False
        self.whole = self._nothing
        for slot, parameter in zip(self.layout.slots, self.parameters, strict=True):
            parameter.data = self._nothing.expand(slot.shape)
            parameter.__class__ = AbsentParameter
            parameter._appear = lambda: gather(self)  # type: ignore[attr-defined]

    @property
    def storage_id(self) -> int:
        """Tells the memory of the whole from any other."""
        identity: int = self.whole.untyped_storage()._cdata
        return identity

    @torch.inference_mode(False)
    def allocate(self) -> Tensor:
        """Memory for the whole, to be filled; the parameters stay absent until `appear`."""
        if not self.is_present:
            self.whole = self.shard.new_empty(self.layout.num_elements)
        return self.whole

    @torch.inference_mode(False)
    def appear(self) -> None:
        """The whole has been filled: the parameters can be used."""
        if self.is_present:
            return
        self.is_present = True
        for slot, parameter, kind in zip(
            self.layout.slots, self.parameters, self._classes, strict=True
        ):
            parameter.__class__ = kind
            del parameter._appear  # type: ignore[attr-defined]
            parameter.data = self.whole[slot.start : slot.stop].view(slot.shape)

    def keep_changes(self) -> None:
        """Takes what was written to the whole over into the shard."""
        if self.is_sharded and self.is_present:
            self.shard.copy_(self.own_slice(self.whole))


# What can be asked of a parameter without its values.
_HARMLESS = frozenset(
    {
        "grad", "requires_grad", "shape", "dtype", "device", "is_leaf", "grad_fn", "ndim",
        "is_cuda", "is_sparse", "layout", "names", "_version", "is_meta", "is_quantized", "size",
        "dim", "numel", "nelement", "element_size", "itemsize", "nbytes", "stride", "__len__",
        "is_floating_point", "is_complex", "register_post_accumulate_grad_hook", "register_hook",
        "requires_grad_", "untyped_storage", "_backward_hooks", "_post_accumulate_grad_hooks",
        "retains_grad", "output_nr", "_base", "_is_view", "is_contiguous", "get_device",
        "is_pinned", "is_shared",
    }
)  # fmt: skip


class AbsentParameter(nn.Parameter):
    """A parameter whose values are on other ranks right now; see [Note: absent parameters]."""

    _appear: Callable[[], None]

    @classmethod
    def __torch_function__(
        cls, func: object, types: object, args: tuple[object, ...] = (), kwargs: object = None
    ) -> object:
        """Gathers what is absent among the arguments, then does what was asked for."""
        keywords = dict(kwargs or {})  # type: ignore[call-overload]
        if _asked(func) in _HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **keywords)  # type: ignore[operator]
        _make_appear((args, keywords))
        return func(*args, **keywords)  # type: ignore[operator]


def _asked(func: object) -> str:
    name = getattr(func, "__name__", "")
    return getattr(func.__self__, "__name__", "") if name in ("__get__", "__set__") else name  # type: ignore[attr-defined]


def _make_appear(value: object) -> None:
    if isinstance(value, AbsentParameter):
        value._appear()
    elif isinstance(value, tuple | list):
        for item in value:
            _make_appear(item)
    elif isinstance(value, dict):
        for item in value.values():
            _make_appear(item)
