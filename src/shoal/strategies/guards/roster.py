"""Which parameters a model had when it was wrapped.

[Note: late parameters]
Memory and communication are laid out when a model is wrapped. A parameter that comes later, by
itself or in a new layer, would be trained by each rank alone, without a word. So every forward with
gradients looks for late parameters: not at all names, but whether each module still has the very
parameters and children it had, which takes a tenth of a microsecond each.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from operator import is_
from typing import Any

from torch import nn

from shoal.errors import ShoalError
from shoal.torch_internals.modules import children_of, parameters_of


class Roster:
    """The parameters and children of all parts of a module."""

    def __init__(self, module: nn.Module, is_known: Callable[[nn.Parameter], bool]) -> None:
        """``is_known``: whether a parameter is one of those that ranks train together."""
        self._module, self._is_known = module, is_known
        self._note()

    def _note(self) -> None:
        parts = list(self._module.modules())
        self._members = [
            members.values()
            for part in parts
            for members in (parameters_of(part), children_of(part))
        ]
        self._known = self._present()

    def _present(self) -> list[Any]:
        return list(chain.from_iterable(self._members))

    def check(self) -> None:
        """Raises if there is a parameter that was not there; see [Note: late parameters]."""
        present = self._present()
        if len(present) == len(self._known) and all(map(is_, present, self._known)):
            return
        found = list(self._module.named_parameters())
        if not all(isinstance(parameter, nn.Parameter) for _, parameter in found):
            return  # `torch.func.functional_call` has put tensors of its caller's in their place
        late = [name for name, parameter in found if not self._is_known(parameter)]
        if late:
            more = f" (and {len(late) - 1} more)" if len(late) > 1 else ""
            raise ShoalError(
                f"the parameter {late[0]}{more} was added to the model, or put in the place of "
                "another, after the model was wrapped: it would be trained by each rank alone. "
                "Change the plain module first, build the optimizer, then wrap both"
            )
        self._note()
