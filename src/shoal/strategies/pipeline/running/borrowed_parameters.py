"""Parameters that a rank needs and another has: a tied embedding at the other end, above all.

Their owner sends the values when a pass through the pipeline begins. Gradients add up on the
borrower's copy and go back when the last micro-batch is through; the owner takes them for its own.
So there is one parameter, one gradient and one optimizer's state, whatever the data-parallel
strategy does with them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shoal.strategies.pipeline.learning.route import Itinerary
from shoal.strategies.pipeline.running.links import LOANS
from shoal.strategies.pipeline.stages.stage import Stage


class Loans:
    """What this rank lends and borrows."""

    def __init__(self, stage: Stage) -> None:
        """Nothing is borrowed yet."""
        self._stage = stage
        self._copies: dict[str, Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of the copies that this rank has of others' parameters."""
        return sum(copy.nbytes for copy in self._copies.values())

    def _tag(self) -> int:
        return self._stage.num_chunks**2 * 4 + LOANS

    @torch.no_grad()
    def hand_out(self, itinerary: Itinerary) -> None:
        """Values go from owners to borrowers; all ranks of the pipeline call it."""
        stage, parameters = self._stage, self._stage.parameters
        sent = [
            stage.group.post_send(parameters.by_name[name].detach().clone(), peer, self._tag())
            for peer, name in itinerary.lent(parameters.rank_of, stage.rank)
        ]
        for name in itinerary.borrowed.get(stage.rank, ()):
            value = stage.group.recv(src=parameters.rank_of(name), tag=self._tag())
            self._take(name, value)
        for work in sent:
            work.wait()

    def _take(self, name: str, value: Tensor) -> None:
        copy = self._copies.get(name)
        if copy is None:
            copy = self._copies[name] = value
        else:
            copy.copy_(value)
        copy.requires_grad_(self._stage.parameters.by_name[name].requires_grad)
        self._stage.parameters.show(name, copy)

    def withdraw(self) -> None:
        """Frees the copies."""
        for name in self._copies:
            self._stage.parameters.show_absent(name)
        self._copies.clear()

    def lends_trainable(self, itinerary: Itinerary) -> bool:
        """Whether gradients will come back to this rank."""
        parameters = self._stage.parameters
        lent = itinerary.lent(parameters.rank_of, self._stage.rank)
        return any(parameters.by_name[name].requires_grad for _, name in lent)

    def hand_back(self, itinerary: Itinerary) -> list[tuple[nn.Parameter, Tensor]]:
        """Gradients go from borrowers to owners; returns those of this rank's parameters."""
        stage, parameters = self._stage, self._stage.parameters
        sent = []
        for name in itinerary.borrowed.get(stage.rank, ()):
            if parameters.by_name[name].requires_grad:
                copy = self._copies[name]
                gradient = copy.new_empty(0, 0) if copy.grad is None else copy.grad.unsqueeze(0)
                copy.grad = None
                owner = parameters.rank_of(name)
                sent.append(stage.group.post_send(gradient, owner, self._tag()))
        found: dict[str, Tensor] = {}
        for peer, name in itinerary.lent(parameters.rank_of, stage.rank):
            if parameters.by_name[name].requires_grad:
                gradient = stage.group.recv(src=peer, tag=self._tag())
                if gradient.shape[0]:
                    own = gradient.squeeze(0)
                    found[name] = found[name] + own if name in found else own
        for work in sent:
            work.wait()
        return [(parameters.by_name[name], gradient) for name, gradient in found.items()]
