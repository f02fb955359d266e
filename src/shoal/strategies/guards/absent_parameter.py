"""A parameter whose values are on other ranks.

[Note: absent parameters]
While the whole is gone, its parameters have no values, only a shape, and another class,
`AbsentParameter`, which gathers the whole on any access that needs values. Outside of forward they
keep it even then: autograd must not save the memory of a parameter that will soon be freed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from shoal.torch_internals.tensors import ATTRIBUTES_WITHOUT_VALUES, as_plain_tensors

if TYPE_CHECKING:
    from shoal.strategies.engine.flat_group import FlatGroup

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


class Gatherer(Protocol):
    """What brings the values of absent parameters."""

    def need(self, group: FlatGroup) -> None:
        """Has the group's parameters here when it returns."""

    def watching(self) -> AbstractContextManager[Any]:
        """Around one use of a parameter whose memory autograd must not save."""


class AbsentParameter(nn.Parameter):
    """A parameter whose values are on other ranks right now; see [Note: absent parameters]."""

    _group: FlatGroup
    _gatherer: Gatherer

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
        absent = list(_absent_among((args, keywords)))
        groups = [parameter._group for parameter in absent]
        for group in groups:  # gathering one must not free another
            group.pins += 1
        try:
            for parameter in absent:
                if isinstance(parameter, AbsentParameter):  # not if it was gathered with another
                    parameter._gatherer.need(parameter._group)
            watched = [parameter for parameter in absent if type(parameter) is AbsentParameter]
            if not watched:
                return func(*args, **keywords)  # type: ignore[operator]
            with watched[0]._gatherer.watching(), as_plain_tensors():
                return func(*args, **keywords)  # type: ignore[operator]
        finally:
            for group in groups:
                group.pins -= 1


def make_absent(group: FlatGroup, gatherer: Gatherer) -> None:
    """Gives the parameters of a group the class that knows when they are used."""
    for parameter in group.parameters:
        parameter.__class__ = AbsentParameter
        parameter._group, parameter._gatherer = group, gatherer  # type: ignore[attr-defined]


def make_plain(parameters: Sequence[nn.Parameter], classes: Sequence[type[nn.Parameter]]) -> None:
    """Gives parameters their own classes back."""
    for parameter, kind in zip(parameters, classes, strict=True):
        if isinstance(parameter, AbsentParameter):
            parameter.__class__ = kind  # type: ignore[assignment]
            del parameter._group, parameter._gatherer


def _asked(func: object) -> str:
    name = getattr(func, "__name__", "")
    return getattr(func.__self__, "__name__", "") if name in ("__get__", "__set__") else name  # type: ignore[attr-defined]


def _absent_among(value: object) -> Iterator[AbsentParameter]:
    if isinstance(value, AbsentParameter):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _absent_among(item)
    elif isinstance(value, dict):
        yield from _absent_among(tuple(value.values()))
