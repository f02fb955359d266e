"""Strategy "async" and its definition: pulls and pushes of a run, replayed in one process.

Which update comes when is not part of the definition; so the first server notes it, and what it
noted is replayed. Over memory that is the order of all servers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.comm.world import current
from shoal.strategies import AsyncModel
from shoal.torch_support.random_state import RandomStream
from shoal.verification.comparison import Comparison, default_tolerance
from shoal.verification.experiment import Experiment, Findings
from shoal.verification.trainers.local_replay import Replica
from shoal.verification.trainers.one_process import BUILD_SEED, WholeBatch, rank_stream
from shoal.verification.trainers.trainer import Observed, Setup, share

Event = tuple[str, int, float]


def train_async_on_rank(experiment: Experiment) -> Findings:
    """Trains all steps, then compares; rank 0's findings are the ones that count."""
    world = current()
    ranks = _train(experiment)
    comparison = Comparison(experiment.tolerance or default_tolerance(ranks.setup.model))
    if world.rank == 0:
        replay = _Replay(experiment, world.size)
        expected = replay.losses(ranks.events)
        for step in range(experiment.steps):
            found = [Observed("loss", "", losses[step]) for losses in ranks.losses]
            own = [Observed("loss", "", losses[step]) for losses in expected]
            comparison.compare(step, own, found)
        got = (Observed("parameter", name, ranks.state[name]) for name in replay.names())
        comparison.compare(experiment.steps - 1, replay.parameters(), got)
    return Findings(
        comparison.tolerance, comparison.first, comparison.largest, "", float("inf"), world.size
    )


class _Trained(NamedTuple):
    """What the ranks bring together."""

    setup: Setup
    events: list[Event]
    losses: list[list[Tensor]]  # of each rank
    state: dict[str, Any]


def _train(experiment: Experiment) -> _Trained:
    world = current()
    with RandomStream(BUILD_SEED).drawing():
        setup = Setup.build(experiment.build, experiment.steps)
    model, (optimizer,) = experiment.wrap(
        setup.model, setup.optimizers, strategy=experiment.strategy, **experiment.options
    )
    assert isinstance(model, AsyncModel)
    ledger, events = model.shard.ledgers[0], list[Event]()
    ledger.events = events
    stream, losses = rank_stream(world.rank), []
    for batch in setup.batches:
        inputs, targets = share(batch, world.rank, world.size)
        with stream.drawing():
            losses.append(model.train_step(inputs, targets, setup.loss_fn))
        optimizer.step()
        optimizer.zero_grad()
    state = model.state_dict()
    noted = world.broadcast_object(events, root=model.servers[0])
    return _Trained(setup, noted, world.all_gather_object(losses), state)


class _Replay:
    """A server and the ranks' replicas, in one process."""

    def __init__(self, experiment: Experiment, num_ranks: int) -> None:
        self._server = WholeBatch(experiment.build, 1)
        build, steps = experiment.build, experiment.steps
        self._replicas = [Replica(build, steps, rank, num_ranks) for rank in range(num_ranks)]

    def names(self) -> list[str]:
        """Of the parameters."""
        return [name for name, _ in self._server.setup.model.named_parameters()]

    def parameters(self) -> Iterator[Observed]:
        """The server's."""
        return self._server.parameters()

    def losses(self, events: Sequence[Event]) -> list[list[Tensor]]:
        """Replays everything; the losses of each rank."""
        losses: list[list[Tensor]] = [[] for _ in self._replicas]
        for event, rank, factor in events:
            replica = self._replicas[rank]
            if event == "pull":
                _copy(self._server, replica)
                continue
            losses[rank].append(replica.compute(len(losses[rank])))
            if factor:
                self._update(replica, factor)
            replica.forget()
        return losses

    def _update(self, replica: Replica, factor: float) -> None:
        (optimizer,) = self._server.setup.optimizers
        pairs = zip(_parameters(self._server), _parameters(replica), strict=True)
        for parameter, own in pairs:
            parameter.grad = own.grad
        rates = [group.get("lr") for group in optimizer.param_groups]
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None and factor != 1.0:
                group["lr"] = rate * factor
        optimizer.step()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = rate


def _parameters(trainer: WholeBatch) -> list[Any]:
    return list(trainer.setup.model.parameters())


@torch.no_grad()
def _copy(source: WholeBatch, target: WholeBatch) -> None:
    for own, value in zip(_parameters(target), _parameters(source), strict=True):
        own.copy_(value)
