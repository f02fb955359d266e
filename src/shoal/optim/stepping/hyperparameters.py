"""The options of an optimizer's parameter groups, as a user set them.

Some optimizers write into their groups while they step (a count, an estimate). That happens only on
ranks that have something to step in the group, so ranks cannot be compared by it. What counts is
what was changed outside of steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

_PLAIN = (bool, int, float, complex, str, type(None))
_Key = tuple[int, str]


class Hyperparameters:
    """What the user chose for each parameter group of an optimizer, and changed since.

    Example:
        >>> options = Hyperparameters(optimizer)
        >>> optimizer.param_groups[0]["lr"] = 0.1
        >>> options.chosen()["lr of parameter group 0"]
        '0.1'
    """

    def __init__(self, optimizer: Optimizer) -> None:
        """Everything that is there now was chosen by the user."""
        self._optimizer = optimizer
        self._last: dict[_Key, tuple[Any, str]] = {}
        self._chosen: dict[str, str] = {}
        self._stepped: dict[str, str] = {}
        self.chosen()

    def chosen(self) -> dict[str, str]:
        """What the user chose, in words; the same object as long as nothing changes."""
        for (number, name), text in self._changed():
            self._chosen = {**self._chosen, f"{name} of parameter group {number}": text}
        return self._chosen

    def begin_step(self) -> None:
        """What is chosen now is what a step is made with, also if it is changed back after it."""
        self._stepped = self.chosen()

    def facts(self) -> dict[str, str]:
        """What was chosen, and what the last step was made with, where that was something else."""
        chosen = self.chosen()
        if self._stepped is chosen or not self._stepped:
            return chosen
        others = {key: text for key, text in self._stepped.items() if chosen[key] != text}
        return chosen | {f"{key} in its last step": text for key, text in others.items()}

    def ignore_changes(self) -> None:
        """What has changed just now was not the user's doing."""
        for _ in self._changed():
            pass

    def _changed(self) -> Iterator[tuple[_Key, str]]:
        """What is not what it was when this was asked the last time."""
        for number, group in enumerate(self._optimizer.param_groups):
            for name, value in group.items():
                before, known = self._last.get((number, name), (None, None))
                is_same = value is before and known is not None and isinstance(value, _PLAIN)
                if name == "params" or is_same:
                    continue
                text = text_of(value)
                self._last[number, name] = (value, text)
                if text != known:
                    yield (number, name), text


def text_of(value: Any) -> str:
    """A value in words that are the same on every rank for the same value.

    A tensor on a GPU is not read: the host would have to wait for it.
    """
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(text_of, value))}]"
    if isinstance(value, Tensor):
        return str(value.tolist()) if value.is_cpu else f"a tensor on {value.device.type}"
    return type(value).__qualname__
