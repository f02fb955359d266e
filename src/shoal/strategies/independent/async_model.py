"""`AsyncModel`: parameters that ranks update without waiting for each other.

[Note: servers and workers]
Every rank is a worker: it pulls parameters into its replica when a forward of training begins,
computes its own gradient, and pushes it when its optimizer steps. Some ranks are servers besides:
each has some of the parameters, whole ones, and the optimizer's state for them, and makes the steps
that are pushed, one after the other. It does so in the thread that serves what ranks lend (see
[Note: lent tensors]), so its own training goes on. The first server also counts versions; see
[Note: staleness]. Where ranks take turns (`memory`), each pull and each push is one turn: a run
repeats exactly, and has a definition that one process can replay.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.comm import Backend, World
from shoal.comm.operation.whole import Barrier
from shoal.comm.peer_tensors.lending import Answer, PeerTensors
from shoal.errors import DeadlockError, PeerError, ShoalError
from shoal.sharding.extent import Extent
from shoal.sharding.holding import Held
from shoal.sharding.layout import balanced_owners
from shoal.strategies.independent.replica_model import ReplicaModel
from shoal.strategies.independent.shard import Shard, pack, unpack
from shoal.strategies.independent.versions import WHEN_STALE, Admission, Ledger
from shoal.strategies.layers.buffers import share_buffers
from shoal.system.deadline import Deadline, staleness_text
from shoal.torch_internals.tensors import sum_of_versions

_TOPOLOGIES = ("server",)
_POLL_S = 0.002


class AsyncModel(ReplicaModel):
    """Every rank trains with parameters that it pulls, and pushes updates when it has them.

    Example:
        >>> model = AsyncModel(module, max_staleness=8, when_stale="damp")
        >>> optimizer = AsyncSGDOptimizer(torch.optim.SGD(module.parameters(), lr=0.1), model)
    """

    strategy = "async"
    settled = (*ReplicaModel.settled, "compression", "error_feedback", "check_every")
    own_attributes = (
        *ReplicaModel.own_attributes,
        *("servers", "shard", "peers", "versions", "waited_for", "_seen"),
    )
    servers: list[int]
    """The ranks that have parameters, the one that counts versions first."""
    shard: Shard
    """What this rank serves."""
    peers: PeerTensors
    versions: list[int] | None
    """What was pulled, for each optimizer; None if nothing is computed with it yet."""
    waited_for: Counter[int]
    """How often this rank has waited for another, by rank."""

    def __init__(
        self,
        module: nn.Module,
        world: World | Backend | None = None,
        *,
        topology: str = "server",
        max_staleness: int = 8,
        when_stale: str = "drop",
        servers: str | Sequence[int] = "all",
        **options: Any,
    ) -> None:
        """Takes over the module's parameters; every rank starts from rank 0's values.

        Args:
            module: The user's.
            world: The ranks that train it; the current world by default.
            topology: "server": parameters live on servers.
            max_staleness: How many versions may be made between an update's pull and its push.
            when_stale: What happens to others: "drop" refuses them, "damp" scales them down, "wait"
                lets nobody make them so stale.
            servers: The ranks that parameters live on, or "all".
            options: See `ShardedModel`.
        """
        _check_choice("topology", topology, _TOPOLOGIES)
        _check_choice("when_stale", when_stale, WHEN_STALE)
        super().__init__(module, world, **options)
        self.options |= {
            "topology": topology, "max_staleness": max_staleness, "when_stale": when_stale,
            "servers": servers,
        }  # fmt: skip
        self.servers = _checked_servers(servers, self.all_ranks.size)
        self.versions, self.waited_for, self._seen = None, Counter(), -1
        owned = {name for name, owner in self._owners().items() if owner == self.all_ranks.rank}
        masters = {held.name: held for held in super().held()}
        self.shard = Shard(
            {
                name: nn.Parameter(_copy(masters[name]), requires_grad=True)
                for name in self._named()
                if name in owned
            }
        )
        self.engine.account.add("parameters", sum(p.nbytes for p in self.shard.parameters.values()))
        self.peers = self.all_ranks.lend(self.shard)

    def _named(self) -> dict[str, nn.Parameter]:
        """What can be trained, by full names."""
        named = self.module.named_parameters()
        return {name: p for name, p in named if p.is_floating_point() or p.is_complex()}

    def _owners(self) -> dict[str, int]:
        """The server of each parameter."""
        named = self._named()
        load = [0] * len(self.servers)
        owners = balanced_owners([p.numel() for p in named.values()], len(self.servers), load)
        return {name: self.servers[owner] for name, owner in zip(named, owners, strict=True)}

    def add_ledger(self) -> int:
        """For one more optimizer; returns its number."""
        self.shard.ledgers.append(Ledger(self.options["max_staleness"], self.options["when_stale"]))
        return len(self.shard.ledgers) - 1

    # Pulling ------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module; in training with the newest parameters, until an optimizer steps."""
        is_training = self.module.training and torch.is_grad_enabled()
        if is_training and self.versions is None and not self.engine.passes.is_recomputing():
            self.peers.hand_over()
            self._pull(begins=True)
        return super().forward(*args, **kwargs)

    def pull(self) -> None:
        """Gets the newest parameters, to look at them or to evaluate; no other rank takes part."""
        if self.versions is None:
            self.peers.hand_over()
            self._pull(begins=False)

    def _pull(self, *, begins: bool) -> None:
        self._check_unchanged()
        found: dict[str, Tensor] = {}
        for server in self.servers:
            first = server == self.servers[0]
            request = {"kind": "pull", "rank": self.all_ranks.rank, "begins": begins and first}
            answer = self._call_in_turn(server, request)
            assert answer.values is not None
            found |= self._unpacked(server, answer.values)
            if begins and first:
                self.versions = answer.data["versions"]
        self._take(found)

    def _unpacked(self, server: int, values: Tensor) -> dict[str, Tensor]:
        named, owners, dtypes = self._named(), self._owners(), self.held_dtypes()
        names = [name for name in named if owners[name] == server]
        like = [torch.empty_like(named[name], dtype=dtypes[name]) for name in names]
        return dict(zip(names, unpack(values, like), strict=True))

    def _take(self, values: Mapping[str, Tensor]) -> None:
        """Gives this rank's replica new values."""
        parameters = list(self.module.parameters())
        with torch.no_grad(), self.engine.parameters.stepping(parameters, "a pull of parameters"):
            for held in super().held():
                if held.name in values:
                    held.memory.copy_(values[held.name].reshape(-1))
        self._seen = sum_of_versions(parameters)

    def _check_unchanged(self) -> None:
        changes = sum_of_versions(list(self.module.parameters()))
        if self._seen not in (-1, changes):
            self._seen = -1
            raise ShoalError(
                "parameters were changed by hand on this rank. Under strategy 'async' they are the "
                "servers', and the next pull would undo the change: change what model.state_dict() "
                "returns, and load it with model.load_state_dict() on every rank"
            )

    def _call(self, rank: int, request: dict[str, Any], values: Tensor | None) -> Answer:
        return self.peers.call(rank, request, values, Deadline(self.all_ranks.timeout))

    def _call_in_turn(self, rank: int, request: dict[str, Any]) -> Answer:
        """A call that may have to wait for the slowest rank; see [Note: staleness]."""
        deadline, waiting = Deadline(self.all_ranks.timeout), None
        while True:
            answer = self._call(rank, request, None)
            slowest = answer.data.get("waits_for")
            if slowest is None:
                return answer
            if slowest != waiting:
                self.waited_for[slowest] += 1
                waiting = slowest
            self._await(slowest, deadline)

    def _await(self, slowest: int, deadline: Deadline) -> None:
        """Waits a little for a rank whose update would become too stale."""
        rank, other = self.all_ranks.ranks[self.all_ranks.rank], self.all_ranks.ranks[slowest]
        reason = self.peers.absence(slowest)
        where = "it has pulled parameters and not pushed since"
        if reason is not None:
            raise PeerError(other, reason, staleness_text(0.0, rank, other, where))
        if not self.peers.hand_over():
            raise DeadlockError(staleness_text(0.0, rank, other, f"{where}, and cannot go on"))
        deadline.enforce(staleness_text, rank, other, where)
        if self.peers.takes_time:
            time.sleep(_POLL_S)

    # Pushing ------------------------------------------------------------------------------

    def push(
        self, optimizer: int, gradients: Mapping[str, Tensor], options: Sequence[Mapping[str, Any]]
    ) -> Admission:
        """Has the servers make a step; ``options`` are those of each parameter group."""
        if self.versions is None:
            raise ShoalError(
                "optimizer.step() without a forward since the last one: under strategy 'async' an "
                "update is made of gradients that were computed with parameters just pulled"
            )
        self.peers.hand_over()
        admission = self._admitted(optimizer, self.versions[optimizer])
        owners = self._owners()
        for server in self.servers if admission.factor else ():
            names = [name for name in gradients if owners[name] == server]
            if names:
                request = {
                    "kind": "push", "optimizer": optimizer, "names": names,
                    "factor": admission.factor, "options": list(options),
                }  # fmt: skip
                self._call(server, request, pack([gradients[name] for name in names]))
        self.versions = None
        return admission

    def _admitted(self, optimizer: int, version: int) -> Admission:
        rank = self.all_ranks.rank
        request = {"kind": "admit", "optimizer": optimizer, "rank": rank, "version": version}
        return Admission(**self._call_in_turn(self.servers[0], request).data)

    # What all ranks do together -----------------------------------------------------------

    def meet(self, doing: str) -> None:
        """All ranks are here, so that none pushes; ``doing`` is what they are at, in words."""
        meeting = Barrier()
        meeting.signature = doing
        self.meeting_lane.run(meeting)

    def check_ranks(self, doing: str) -> None:
        """Waits until no rank pushes any more; every rank calls it. Steps may differ."""
        self.meet(doing)

    def synchronize_buffers(self) -> None:
        """Gives all ranks rank 0's buffers, or the average; every rank calls it."""
        averages = self.engine.settings.averages_buffers
        share_buffers(self.module.buffers(), self.meeting_lane, averages=averages)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The servers' parameters, the same on all ranks, which all call it."""
        self.meet("state_dict() of an asynchronous model")
        self.synchronize_buffers()
        self._pull(begins=False)
        self.meet("the end of state_dict()")
        return super().state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Loads a full state; every rank calls it."""
        self.meet("load_state_dict() of an asynchronous model")
        with super().full_parameters():
            outcome = self.module.load_state_dict(state_dict, strict=strict)
        with torch.no_grad():
            for held in super().held():
                if held.name in self.shard.parameters:
                    self.shard.parameters[held.name].view(-1).copy_(held.memory)
        self._restart()
        return outcome

    def _restart(self) -> None:
        """The servers have new values; nobody has computed anything with them."""
        for ledger in self.shard.ledgers:
            ledger.reset()
        self.versions, self._seen = None, -1
        self.meet("new values for an asynchronous model")
        self._pull(begins=False)
        self.meet("new values for an asynchronous model, pulled")

    def full_parameters(self) -> contextlib.AbstractContextManager[None]:
        """Inside, all parameters are whole; they are this rank's copies, and changes are refused.

        The next pull raises if they were changed.
        """
        return self.whole_parameters(keep_changes=False)

    def held(self) -> Iterator[Held]:
        """What this rank serves, and what cannot be trained, which all ranks have."""
        for name, parameter in self.shard.parameters.items():
            yield Held(name, Extent.whole(parameter.shape), parameter.data.view(-1))
        served = self._named()
        yield from (held for held in super().held() if held.name not in served)

    @contextlib.contextmanager
    def receiving(self) -> Iterator[None]:
        """Inside, what `held` gives may be written to; afterwards all ranks pull it."""
        with torch.no_grad():
            yield
        self._restart()


def _copy(held: Held) -> Tensor:
    return held.memory.detach().clone().view(held.extent.shape)


def _check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}; got {value!r}")


def _checked_servers(servers: str | Sequence[int], size: int) -> list[int]:
    if servers == "all":
        return list(range(size))
    chosen = [] if isinstance(servers, str) else list(servers)
    are_ranks = all(rank in range(size) for rank in chosen)
    if not chosen or not are_ranks or len(set(chosen)) < len(chosen):
        raise ValueError(
            f"servers must be 'all' or different ranks from 0 to {size - 1}; got {servers!r}"
        )
    return chosen
