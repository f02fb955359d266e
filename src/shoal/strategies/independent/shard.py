"""The parameters that a rank serves to all others, and what it does when it is called."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.comm.peer_tensors.lending import Answer, Lent
from shoal.strategies.independent.versions import VersionCount

Apply = Callable[[Mapping[str, Tensor], float, Sequence[Mapping[str, Any]]], None]
"""Makes a step with gradients by name, a factor of the learning rate, and each group's options."""


class Shard:
    """What one rank serves, by the parameters' names. Calls come from several threads."""

    def __init__(self) -> None:
        """Nothing is served yet."""
        self.parameters: dict[str, nn.Parameter] = {}
        """Copies of the model's, in memory of their own."""
        self.lock = threading.Lock()
        self.ledgers: list[VersionCount] = []
        """One for each optimizer; the first server's count."""
        self.apply: list[Apply] = []
        """What makes the step of each optimizer."""
        self.made: dict[int, int] = {}
        """By rank the number of its last update that was made here."""
        self.frozen_by: int | None = None
        """The rank that serves it, once it has handed it on: nothing may change it any more."""

    @property
    def num_bytes(self) -> int:
        """Of what is served."""
        return sum(parameter.nbytes for parameter in self.parameters.values())

    def find(self, key: str) -> Lent | None:
        """Nothing is lent: parameters are pulled."""
        return None

    def listing(self) -> list[list[Any]]:
        """Nothing is lent."""
        return []

    def handle(self, request: dict[str, Any], values: Tensor | None) -> Answer:
        """Does what a rank asks for, one call at a time."""
        kind = request["kind"]
        with self.lock, torch.inference_mode(mode=False), torch.no_grad():
            if self.frozen_by is not None:
                return Answer({"waits_for": self.frozen_by})
            if kind == "pull":
                return self._pull(request)
            if kind == "admit":
                return self._admit(request)
            if kind == "mix":
                assert values is not None
                return self._mix(request, values)
            if kind == "push":
                assert values is not None
                return self._push(request, values)
        raise ValueError(f"no rank calls for {kind!r}")

    def _pull(self, request: Mapping[str, Any]) -> Answer:
        rank, versions = request["rank"], []
        if request["begins"]:
            blocking = [ledger.blocking(rank, "pull") for ledger in self.ledgers]
            for slowest in blocking:
                if slowest is not None:
                    return Answer({"waits_for": slowest})
            versions = [ledger.begin(rank) for ledger in self.ledgers]
        wanted = [self.parameters[name] for name in request["names"]]
        return Answer({"versions": versions}, pack(wanted))

    def _admit(self, request: Mapping[str, Any]) -> Answer:
        ledger, rank = self.ledgers[request["optimizer"]], request["rank"]
        slowest = ledger.blocking(rank, "push")
        if slowest is not None:
            return Answer({"waits_for": slowest})
        return Answer(ledger.admit(rank, request["version"])._asdict())

    def _mix(self, request: Mapping[str, Any], values: Tensor) -> Answer:
        """Goes half the way to another rank's parameters; answers with what that rank goes."""
        nobody = -1
        for ledger in self.ledgers:
            slowest = ledger.blocking(nobody, "push")
            if slowest is not None:
                return Answer({"waits_for": slowest})
        own = list(self.parameters.values())
        ways = [(other - each) / 2 for other, each in zip(unpack(values, own), own, strict=True)]
        for each, way in zip(own, ways, strict=True):
            each.add_(way)
        for ledger in self.ledgers:
            ledger.change(request["rank"], "mix")
        return Answer({}, pack(ways))

    @torch.no_grad()
    def copy(self) -> Tensor:
        """The parameters as they are now."""
        with self.lock:
            return pack(list(self.parameters.values()))

    @torch.no_grad()
    def subtract(self, ways: Tensor) -> None:
        """Goes a way back, as another rank has gone it forth."""
        own = list(self.parameters.values())
        with self.lock:
            for each, way in zip(own, unpack(ways, own), strict=True):
                each.sub_(way)
            for ledger in self.ledgers:
                ledger.version += 1

    def _push(self, request: Mapping[str, Any], values: Tensor) -> Answer:
        named = [(name, self.parameters[name]) for name in request["names"]]
        gradients = unpack(values, [parameter for _, parameter in named])
        by_name = {name: each for (name, _), each in zip(named, gradients, strict=True)}
        self.apply[request["optimizer"]](by_name, request["factor"], request["options"])
        self.made[request["rank"]] = request["number"]
        return Answer({})


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of tensors in a row, on the CPU."""
    parts = [each.detach().reshape(-1).view(torch.uint8) for each in tensors if each.numel()]
    if not parts:
        return torch.empty(0, dtype=torch.uint8)
    return torch.cat(parts).cpu()


def unpack(data: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of the shapes, dtypes and devices of others, from their bytes in a row."""
    parts = data.split([each.nbytes for each in like]) if like else []
    return [
        part.clone().view(each.dtype).view(each.shape).to(each.device)
        for part, each in zip(parts, like, strict=True)
    ]
