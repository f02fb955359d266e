"""A module around another, which goes by the names and attributes of the one inside."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn, Self

from torch import nn

from shoal.strategies.engine.admission import refuse_copy

# What a module offers about its parts, answered by the wrapped module under its own names.
_DELEGATED = (
    "parameters", "named_parameters", "buffers", "named_buffers", "children", "named_children",
    "modules", "named_modules", "get_parameter", "get_buffer", "get_submodule", "requires_grad_",
    "extra_repr", "__getitem__", "__len__", "__iter__", "register_buffer", "register_parameter",
    "register_module", "add_module", "set_submodule",
)  # fmt: skip


class ModuleWrapper(nn.Module):
    """A module that answers for the one inside, which is not its child: names get no prefix."""

    module: nn.Module
    own_attributes: ClassVar[tuple[str, ...]] = ()
    """What is set on the wrapper and not on the module inside."""
    settled: ClassVar[tuple[str, ...]] = ()
    """Options of the class above that this one chooses by itself."""

    def train(self, mode: bool = True) -> Self:
        """Sets the mode of the module."""
        self.module.train(mode)
        self.training = mode
        return self

    def __reduce__(self) -> NoReturn:
        """Refused."""
        refuse_copy()

    def __getattr__(self, name: str) -> Any:
        """The module's attributes."""
        return getattr(self.__dict__["module"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets the module's attributes, except for the few of the wrapper."""
        module = self.__dict__.get("module")
        is_own = name in self.own_attributes or name in self.__dict__ or hasattr(type(self), name)
        if module is None or is_own:
            super().__setattr__(name, value)
        else:
            setattr(module, name, value)

    def __bool__(self) -> bool:
        """A model is something, however many parts it has."""
        return True

    def __repr__(self) -> str:
        """The strategy around the module."""
        return f"{type(self).__name__}({self.module!r})"


def _delegate(name: str) -> Any:
    def method(self: ModuleWrapper, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.module, name)(*args, **kwargs)

    method.__name__ = name
    method.__doc__ = f"See `torch.nn.Module.{name}`."
    return method


for _name in _DELEGATED:
    setattr(ModuleWrapper, _name, _delegate(_name))
