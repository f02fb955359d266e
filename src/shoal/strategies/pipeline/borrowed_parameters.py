"""Parameters that a rank needs and another has: above all an embedding tied to the last layer.

Their owner sends the values when a batch begins. Gradients add up on the borrower's copy and go
back after the last micro-batch; the owner adds them to its own. So there is one parameter, one
gradient and one optimizer state, for every data-parallel strategy.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shoal.strategies.pipeline.learning.route import Route
from shoal.strategies.pipeline.runner import LinkMessage
from shoal.strategies.pipeline.stage import Stage


class BorrowedParameters:
    """What this rank lends to other ranks and borrows from them."""

    def __init__(self, stage: Stage) -> None:
        self._group, self._parameters, self._rank = stage.group, stage.parameters, stage.rank
        self._copies: dict[str, Tensor] = {}
        # Beyond the tags of the links between chunks.
        self._tag = stage.num_chunks**2 * len(LinkMessage)

    def _lent(self, route: Route) -> list[tuple[int, str]]:
        """The borrowers and names of what this rank lends, in the order of sending."""
        return [
            (borrower, name)
            for borrower, names in sorted(route.borrowed.items())
            for name in names
            if self._parameters.rank_of(name) == self._rank
        ]

    @torch.no_grad()
    def exchange_values(self, route: Route) -> None:
        """Owners send values to borrowers; all ranks of the pipeline call it."""
        parameters = self._parameters
        pending = [
            self._group.start_send(parameters.by_name[name].detach().clone(), peer, self._tag)
            for peer, name in self._lent(route)
        ]
        for name in route.borrowed[self._rank]:
            value = self._group.recv(src=parameters.rank_of(name), tag=self._tag)
            copy = self._copies.setdefault(name, value)
            if copy is not value:
                copy.copy_(value)
            parameters.show(name, copy.requires_grad_(parameters.by_name[name].requires_grad))
        for work in pending:
            work.wait()

    def free(self) -> None:
        """Frees the copies."""
        for name in self._copies:
            self._parameters.show_absent(name)
        self._copies.clear()

    def awaits_gradients(self, route: Route) -> bool:
        """Whether borrowers will return gradients to this rank."""
        by_name = self._parameters.by_name
        return any(by_name[name].requires_grad for _, name in self._lent(route))

    def return_gradients(self, route: Route) -> list[tuple[nn.Parameter, Tensor]]:
        """Borrowers send gradients to owners; returns those of this rank's parameters."""
        by_name = self._parameters.by_name
        pending = []
        for name in route.borrowed[self._rank]:
            if by_name[name].requires_grad:
                copy = self._copies[name]
                gradient = copy.new_empty(0, 0) if copy.grad is None else copy.grad.unsqueeze(0)
                copy.grad = None
                owner = self._parameters.rank_of(name)
                pending.append(self._group.start_send(gradient, owner, self._tag))
        found: dict[str, Tensor] = {}
        for peer, name in self._lent(route):
            if by_name[name].requires_grad:
                gradient = self._group.recv(src=peer, tag=self._tag)
                if gradient.shape[0]:
                    own = gradient.squeeze(0)
                    found[name] = found[name] + own if name in found else own
        for work in pending:
            work.wait()
        return [(by_name[name], gradient) for name, gradient in found.items()]
