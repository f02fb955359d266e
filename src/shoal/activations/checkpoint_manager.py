"""`CheckpointManager`: the activations that one rank keeps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from shoal.activations.memory_stats import MemoryStats
from shoal.comm.accounting import Account
from shoal.comm.peer_tensors.lending import Lent
from shoal.errors import ClosedError, ShoalError
from shoal.torch_internals.tensors import storage_id, version_of

Recompute = Callable[[], Tensor]


@dataclass(frozen=True)
class _Kept:
    """One activation, with what must not change about it."""

    lent: Lent
    version: int
    stage: int | None


class CheckpointManager:
    """Keeps activations by name, without their graph and without copying them.

    Writing to an activation in place while it is kept is an error when it is needed, as it is in
    autograd. Any thread may use a manager.

    Example:
        >>> import torch
        >>> with CheckpointManager() as manager:
        ...     manager.register_checkpoint("block 0", torch.ones(2, 3))
        ...     manager.retrieve_or_recompute("block 0", lambda: torch.zeros(2, 3)).sum().item()
        6.0
    """

    def __init__(self, account: Account | None = None) -> None:
        """``account``: where the memory is counted besides, for `world.stats`."""
        self._kept: dict[str, _Kept] = {}
        self._lock = threading.RLock()
        self._account = account
        self._used = self._peak = 0
        # Of each memory the number of activations that are in it.
        self._users: dict[int, int] = {}
        self.is_closed = False

    def register_checkpoint(
        self, layer_id: str, activation: Tensor, *, stage: int | None = None
    ) -> None:
        """Keeps an activation; one of the same name is let go of.

        Args:
            layer_id: Its name.
            activation: The tensor itself is kept, not a copy.
            stage: The pipeline stage that it belongs to, for those who look for it.
        """
        check_layer_id(layer_id)
        check_activation(activation)
        if self.is_closed:
            raise ClosedError("this manager of activations was closed; make another one")
        detached = activation.detach()
        kept = _Kept(Lent(detached, _ready(detached)), _version(detached), stage)
        with self._lock:
            self.release_checkpoint(layer_id)
            self._kept[layer_id] = kept
            self._count(detached, 1)

    def retrieve_or_recompute(self, layer_id: str, recompute: Recompute) -> Tensor:
        """The activation that is kept; else what ``recompute()`` returns, which is not kept."""
        found = self.find(layer_id)
        return recompute() if found is None else found.tensor

    def release_checkpoint(self, layer_id: str) -> None:
        """Lets go of one activation, if it is there."""
        with self._lock:
            kept = self._kept.pop(layer_id, None)
            if kept is not None:
                self._count(kept.lent.tensor, -1)

    def get_checkpoint_keys(self) -> list[str]:
        """The names of the activations, in the order in which they were registered."""
        with self._lock:
            return list(self._kept)

    def clear_checkpoints(self) -> None:
        """Lets go of all activations; the peak of memory stays."""
        with self._lock:
            for layer_id in list(self._kept):
                self.release_checkpoint(layer_id)

    def get_memory_stats(self) -> MemoryStats:
        """Bytes of the memory behind the activations, now and at most, and their number."""
        with self._lock:
            return MemoryStats(self._used, self._peak, len(self._kept))

    def find(self, key: str) -> Lent | None:
        """The activation of that name; raises if it was written to since it was registered."""
        check_layer_id(key)
        with self._lock:
            kept = self._kept.get(key)
        if kept is None:
            return None
        if _version(kept.lent.tensor) != kept.version:
            raise ShoalError(
                f"the activation {key!r} was changed in place after it was registered: register a "
                "clone, or use the operation that is not in place"
            )
        return kept.lent

    def listing(self) -> list[list[Any]]:
        """Name, shape, dtype and stage of each activation, as plain data."""
        with self._lock:
            return [
                [key, list(kept.lent.tensor.shape), str(kept.lent.tensor.dtype), kept.stage]
                for key, kept in self._kept.items()
            ]

    def close(self) -> None:
        """Lets go of everything, for good. Twice is fine."""
        self.is_closed = True
        self.clear_checkpoints()

    def __enter__(self) -> Self:
        """For ``with``: closes at the end."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _count(self, tensor: Tensor, step: int) -> None:
        """Memory is there from its first user to its last."""
        identity = storage_id(tensor)
        before = self._users.get(identity, 0)
        self._users[identity] = before + step
        if not before + step:
            del self._users[identity]
        if before and before + step:
            return
        num_bytes = step * tensor.untyped_storage().nbytes()
        self._used += num_bytes
        self._peak = max(self._peak, self._used)
        if self._account is not None:
            self._account.add("activations", num_bytes)


def check_layer_id(layer_id: object) -> None:
    """Refuses what is no name."""
    if not isinstance(layer_id, str):
        raise TypeError(f"layer_id must be a string; got {layer_id!r}")


def check_whole(what: str, value: object) -> None:
    """Refuses what is no whole number."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{what} must be a whole number; got {value!r}")


def check_activation(activation: object) -> None:
    """Refuses what cannot be kept or lent."""
    if not isinstance(activation, Tensor):
        raise TypeError(f"an activation must be a tensor; got a {type(activation).__name__}")
    if activation.layout is not torch.strided or activation.is_meta or activation.is_quantized:
        kind = "quantized" if activation.is_quantized else f"{activation.layout}"
        where = "on the meta device" if activation.is_meta else kind
        raise TypeError(f"an activation must be a dense tensor with values; this one is {where}")


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else version_of(tensor)


def _ready(tensor: Tensor) -> torch.cuda.Event | None:
    if not tensor.is_cuda:
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(tensor.device))
    return event
