"""Parameters of split layers, which only the layer's own forward may compute with.

[Note: reads of parts]
A split layer gives whole results when it is called. Code that takes its weight instead (`x @
self.head.weight.T`, a norm over `self.parameters()`, a function that kept the parameter) would
compute with this rank's part and not notice. So while the forward of the model runs, split
parameters have another class, `SplitParameter`, which raises whenever values or sizes are asked
for. The layer's own forward lifts that around its product. Source code and trials only decide what
a plan splits; this class is what makes sure that no part is taken for the whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from shoal.errors import ShoalError
from shoal.torch_internals.tensors import ATTRIBUTES_WITHOUT_VALUES, as_plain_tensors
from shoal.torch_internals.trees import tree_leaves

# What is the same for a part as for the whole, or says nothing about values.
HARMLESS = frozenset(
    {
        "dtype", "device", "layout", "ndim", "dim", "requires_grad", "requires_grad_", "is_leaf",
        "grad", "grad_fn", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested",
        "is_floating_point", "is_complex", "is_inference", "get_device", "element_size", "itemsize",
        *ATTRIBUTES_WITHOUT_VALUES, "output_nr", "retains_grad", "register_hook",
        "register_post_accumulate_grad_hook",
    }
)  # fmt: skip
_PLAIN = (Tensor, nn.Parameter)
_NOTHING = contextlib.nullcontext()


class SplitParameter(nn.Parameter):
    """A rank's part of a parameter; see [Note: reads of parts].

    Each `ReadGuard` has a subclass of its own, so that nothing is stored in the parameters.
    """

    guard: ReadGuard

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Lets the guard look first."""
        kwargs = kwargs or {}
        if cls.guard.is_on and _asked(func) not in HARMLESS:
            cls.guard.notice((args, kwargs))
        if not all(kind in _PLAIN or issubclass(kind, SplitParameter) for kind in types):
            return NotImplemented
        with as_plain_tensors():
            return func(*args, **kwargs)


class ReadGuard:
    """Raises if parameters are used by anything but the forward of their own layers.

    Attributes:
        is_on: Whether a use is a mistake right now.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        """Gives the parameters the class that is guarded, from the first forward on."""
        self._parameters = [(each, type(each)) for each in parameters.values()]
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._kind: Any = type("SplitParameter", (SplitParameter,), {"guard": self})
        self._num_calls = 0
        self.is_on = False
        # A group of a sharded model gives parameters back the class that it met them with.
        self._guard_all()

    def begin(self) -> None:
        """The model's forward begins."""
        self._num_calls += 1
        self.is_on = True
        if self._num_calls == 1:
            self._guard_all()

    def end(self) -> None:
        """The model's forward has ended."""
        self._num_calls = max(0, self._num_calls - 1)
        if not self._num_calls:
            self.is_on = False
            self._free_all()

    def _free_all(self) -> None:
        for parameter, own in self._parameters:
            if type(parameter) is self._kind:  # an absent one has another class
                parameter.__class__ = own

    def _guard_all(self) -> None:
        for parameter, own in self._parameters:
            if type(parameter) is own:
                parameter.__class__ = self._kind

    def own_forward(self, parameter: Tensor, input: Tensor) -> AbstractContextManager[Any]:
        """Inside, a layer computes with its own parameter."""
        if not self.is_on:
            return _NOTHING
        if type(parameter) is self._kind and type(input) in _PLAIN:
            return as_plain_tensors()  # much the faster way
        return self.lifted()  # the input, or a parameter that is absent, has a class to heed

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
        """Inside, parameters may be used."""
        was_on, self.is_on = self.is_on, False
        self._free_all()
        try:
            yield
        finally:
            self.is_on = was_on
            if was_on:
                self._guard_all()

    def names_among(self, values: Any) -> list[str]:
        """The names of parameters that are among these values."""
        return [self._names[id(leaf)] for leaf in tree_leaves(values) if id(leaf) in self._names]

    def notice(self, values: Any) -> None:
        """Called when code uses parameters that are among these values."""
        names = " and ".join(self.names_among(values))
        raise ShoalError(
            f"the model's forward uses {names} without calling the layer: it is split, and this "
            "rank has a part of it. Call the layer, or leave it out of the plan: plan={...} splits "
            "only the layers that it names."
        )


def _asked(func: Any) -> str:
    """The name of a method or an attribute."""
    name = getattr(func, "__name__", "")
    return getattr(func.__self__, "__name__", "") if name in ("__get__", "__set__") else name
