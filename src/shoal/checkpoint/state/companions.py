"""What is saved and loaded with a model and its optimizers: whatever has a state_dict."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.errors import CheckpointMismatchError


@dataclass(frozen=True)
class Companions:
    """Schedulers, scalers and samplers; each may be one, or a list."""

    scheduler: Any = None
    scaler: Any = None
    sampler: Any = None

    def items(self) -> Iterator[tuple[str, list[Any]]]:
        """Each as a list, by name; only what there is."""
        for name in ("scheduler", "scaler", "sampler"):
            value = getattr(self, name)
            if value is not None:
                yield name, list(value) if isinstance(value, list | tuple) else [value]


def state_of(companion: Any) -> Any:
    """What is saved of it; a state that the caller has taken is saved as it is."""
    return companion if isinstance(companion, Mapping) else companion.state_dict()


def prepared(
    companions: Companions, saved: Mapping[str, Any], what: str, *, strict: bool
) -> Callable[[], None]:
    """A function that gives all of them their saved state, or, if one refuses, none of them.

    Raises:
        CheckpointMismatchError: If the checkpoint has not what is to be loaded.
    """
    pairs: list[tuple[Any, Any]] = []
    for name, objects in companions.items():
        states = saved.get(name)
        if states is None and not strict:
            continue
        if not isinstance(states, list) or len(states) != len(objects):
            found = len(states) if isinstance(states, list) else 0
            raise CheckpointMismatchError(
                f"{what} has the state of {found} objects for {name}=, and {len(objects)} are to "
                "be loaded"
            )
        pairs += zip(objects, states, strict=True)
    return lambda: _load_all(pairs)


def _load_all(pairs: Sequence[tuple[Any, Any]]) -> None:
    before = [copy.deepcopy(each.state_dict()) for each, _ in pairs]
    for number, (each, state) in enumerate(pairs):
        try:
            each.load_state_dict(state)
        except Exception as error:
            for done, old in zip(pairs[: number + 1], before, strict=False):
                done[0].load_state_dict(old)
            raise CheckpointMismatchError(
                f"{type(each).__name__} refuses its saved state: {type(error).__name__}: {error}"
            ) from error
