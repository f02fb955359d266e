"""What a rank keeps for others, who call it to give tensors and to take them back."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from shoal.comm.accounting import Account
from shoal.comm.peer_tensors.lending import Answer, Lent


class Shelf:
    """Tensors of other ranks, by key. Any thread may call it; see [Note: lent tensors].

    Calls are of three kinds: "give" (a key, the kind of device that the values come from, and the
    values), "take" (a key; the values are the answer, and no longer kept) and "drop" (a key).

    Example:
        >>> shelf = Shelf(torch.device("cpu"), account)
        >>> shelf.handle({"kind": "give", "key": "a", "device": "cpu"}, torch.ones(2))
        >>> shelf.handle({"kind": "take", "key": "a"}, None).values
        tensor([1., 1.])
    """

    def __init__(self, device: torch.device, account: Account) -> None:
        """``device``: where tensors of its kind are kept; ``account``: counts their bytes."""
        self._device, self._account = device, account
        self._kept: dict[str, Lent] = {}
        self._lock = threading.Lock()

    def handle(self, request: dict[str, Any], values: Tensor | None) -> Answer:
        """Keeps values, gives them back or lets go of them."""
        key = str(request["key"])
        if request["kind"] == "give":
            assert values is not None
            self._keep(key, values, str(request["device"]))
            return Answer({})
        lent = self._drop(key)
        if request["kind"] == "drop":
            return Answer({})
        if lent is None:
            raise LookupError(f"it keeps no {key!r}")
        if lent.ready is not None:
            lent.ready.synchronize()
        return Answer({}, lent.tensor)

    def _keep(self, key: str, tensor: Tensor, kind: str) -> None:
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

    def _drop(self, key: str) -> Lent | None:
        with self._lock:
            lent = self._kept.pop(key, None)
        if lent is not None:
            self._account.add("activations", -lent.tensor.nbytes)
        return lent

    def find(self, key: str) -> Lent | None:
        """The tensor of that key."""
        with self._lock:
            return self._kept.get(key)

    def listing(self) -> list[list[Any]]:
        """Key and number of bytes of each."""
        with self._lock:
            return [[key, lent.tensor.nbytes] for key, lent in self._kept.items()]
