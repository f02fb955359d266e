"""What a rank keeps for others: they give tensors and take them back; see [Note: lent tensors]."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from shoal.comm.accounting import Account
from shoal.comm.peer_tensors.lending import Lent


class Shelf:
    """Tensors of other ranks, by key. Any thread may use it.

    Example:
        >>> shelf = Shelf(torch.device("cpu"), account)
        >>> shelf.keep("a", torch.ones(2), "cpu")
        >>> shelf.find("a").tensor
        tensor([1., 1.])
    """

    def __init__(self, device: torch.device, account: Account) -> None:
        """``device``: where tensors of its kind are kept; ``account``: counts their bytes."""
        self._device, self._account = device, account
        self._kept: dict[str, Lent] = {}
        self._lock = threading.Lock()

    def keep(self, key: str, tensor: Tensor, kind: str) -> None:
        """Keeps a tensor that nobody else has; ``kind``: the kind of device that it came from."""
        ready = None
        if kind == "cuda" and self._device.type == "cuda" and not tensor.is_cuda:
            stream = torch.cuda.Stream(self._device)
            with torch.cuda.stream(stream):
                tensor = tensor.to(self._device)
                ready = torch.cuda.Event()
                ready.record(stream)
        with self._lock:
            self._kept[key] = Lent(tensor, ready)
        self._account.add("activations", tensor.nbytes)

    def drop(self, key: str) -> None:
        """Lets go of one, if it is there."""
        with self._lock:
            lent = self._kept.pop(key, None)
        if lent is not None:
            self._account.add("activations", -lent.tensor.nbytes)

    def find(self, key: str) -> Lent | None:
        """The tensor of that key."""
        with self._lock:
            return self._kept.get(key)

    def listing(self) -> list[list[Any]]:
        """Key and number of bytes of each."""
        with self._lock:
            return [[key, lent.tensor.nbytes] for key, lent in self._kept.items()]
