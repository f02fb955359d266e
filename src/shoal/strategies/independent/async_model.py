"""`AsyncModel`: parameters that ranks update without waiting for each other.

[Note: servers and workers]
Every rank is a worker: it pulls parameters into its replica when a forward of training begins,
computes its own gradient, and pushes it when its optimizer steps. Some ranks are servers besides:
each has some of the parameters, whole ones, and the optimizer's state for them, and makes the steps
that are pushed, one after the other. It does so in the thread that serves what ranks lend (see
[Note: lent tensors]), so its own training goes on. The first server also counts versions; see
[Note: staleness]. Where ranks take turns (`memory`), each pull and each push is one turn: a run
repeats exactly, and has a definition that one process can replay.

[Note: gossip]
Without servers every rank serves the parameters of its own replica to itself, and counts their
versions. After each update it sends them to one other rank. Both go half the way to each other's
parameters: the receiver at once, in its thread, and the sender by what the receiver answers. What
one adds the other subtracts, so the average over all ranks stays what it is, whatever else happens
to either of them meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.comm import Backend, World
from shoal.comm.operation.whole import Barrier
from shoal.errors import ShoalError
from shoal.sharding.extent import Extent
from shoal.sharding.holding import Held
from shoal.sharding.layout import balanced_owners
from shoal.strategies.independent.averaging import average_tensors
from shoal.strategies.independent.replica_model import ReplicaModel
from shoal.strategies.independent.shard import Shard
from shoal.strategies.independent.versions import WHEN_STALE, Admission, VersionCount
from shoal.strategies.independent.worker import Worker
from shoal.strategies.layers.buffers import share_buffers
from shoal.strategies.model import ranks_for
from shoal.torch_support.fingerprint import fingerprint

_CHOICES = {
    "topology": ("server", "gossip"),
    "when_stale": WHEN_STALE,
    "partners": ("random", "ring"),
}


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
        *(
            "servers",
            "shard",
            "worker",
            "versions",
            "waited_for",
            "is_agreed",
            "_seen",
            "_has_stepped",
            "_generator",
        ),
    )
    servers: list[int]
    """The ranks that have parameters, the one that counts versions first."""
    shard: Shard
    """What this rank serves."""
    worker: Worker
    """What pulls and pushes."""
    versions: list[int | None] | None
    """What was pulled, for each optimizer; None if nothing is computed with it yet."""
    is_agreed: bool
    """Whether all ranks serve the same values: always, but with "gossip" from `average` on only."""

    def __init__(
        self,
        module: nn.Module,
        world: World | Backend | None = None,
        *,
        topology: str = "server",
        max_staleness: int = 8,
        when_stale: str = "drop",
        servers: str | Sequence[int] = "all",
        partners: str = "random",
        **options: Any,
    ) -> None:
        """Takes over the module's parameters; every rank starts from rank 0's values.

        Args:
            module: The user's.
            world: The ranks that train it; the current world by default.
            topology: "server": parameters live on servers. "gossip": every rank has its own, and
                averages them with another rank's after each update.
            max_staleness: How many versions may be made between an update's pull and its push.
            when_stale: What happens to others: "drop" refuses them, "damp" scales them down, "wait"
                lets nobody make them so stale.
            servers: The ranks that parameters live on, or "all".
            partners: With "gossip", whom a rank averages with: "random", or the next in a "ring".
            options: See `ShardedModel`.
        """
        chosen = {
            "topology": topology, "max_staleness": max_staleness, "when_stale": when_stale,
            "servers": servers, "partners": partners,
        }  # fmt: skip
        _check_choices(chosen, ranks_for(module, world).size)
        super().__init__(module, world, **options)
        self.options |= chosen
        self.is_agreed = True
        self._generator = torch.Generator()
        self._generator.manual_seed((self.options["seed"] << 20) + self.all_ranks.rank)
        self.versions, self._has_stepped = None, False
        self._seen = self._fingerprint()
        self.shard = Shard()
        self.worker = Worker(self.all_ranks, self.shard)
        self._serve()

    def choose(self, options: Mapping[str, Any]) -> None:
        """Gives it other options, for its first optimizer; every rank calls it."""
        self._check_free("an AsyncSGDOptimizer with options of its own")
        chosen = self.options | dict(options)
        _check_choices(chosen, self.all_ranks.size)
        self.options |= options
        self._serve()

    def _serve(self) -> None:
        """Gives each server its parameters, by the options."""
        size, rank = self.all_ranks.size, self.all_ranks.rank
        servers = self.options["servers"]
        self.servers = list(range(size))
        if servers != "all":  # where there are fewer ranks now, those that are left
            self.servers = [each for each in servers if each < size] or [0]
        if self.is_gossip:
            self.servers = [rank]
        owners = self._owners()
        account, before = self.engine.account, self.shard.num_bytes
        self.shard.parameters = {
            held.name: nn.Parameter(_copy(held), requires_grad=True)
            for held in super().held()
            if owners.get(held.name) == rank
        }
        account.add("parameters", self.shard.num_bytes - before)
        self.worker.servers, self.worker.owners = self.servers, owners

    def move_to(self, backend: Backend) -> None:
        """Other ranks train it from now on, which all call it; see `ShardedModel.move_to`."""
        vars(self).update(_all_ranks=backend, meeting_lane=backend.lane(self))
        alone = backend.split(backend.rank)
        assert alone is not None
        super().move_to(alone)
        waited_for = self.worker.waited_for
        self.versions, self._has_stepped, self._seen = None, False, ""
        self.shard = Shard()
        self.worker = Worker(backend, self.shard)
        self.worker.waited_for = waited_for
        self._serve()

    @property
    def is_gossip(self) -> bool:
        """Whether every rank has parameters of its own; see [Note: gossip]."""
        return bool(self.options["topology"] == "gossip")

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
        self.shard.ledgers.append(
            VersionCount(self.options["max_staleness"], self.options["when_stale"])
        )
        return len(self.shard.ledgers) - 1

    # Pulling ------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module; in training with the newest parameters, until an optimizer steps."""
        is_training = self.module.training and torch.is_grad_enabled()
        if is_training and self._is_behind() and not self.engine.passes.is_recomputing():
            self._pull(begins=True)
        return super().forward(*args, **kwargs)

    def pull(self) -> None:
        """Gets the newest parameters, to look at them or to evaluate; no other rank takes part."""
        if self._is_behind():
            self._pull(begins=False)

    def _is_behind(self) -> bool:
        """Whether there may be newer parameters that no gradient under way depends on."""
        return self.versions is None or self._has_stepped

    def _pull(self, *, begins: bool) -> None:
        self._check_unchanged()
        named, dtypes = self._named(), self.held_dtypes()
        like = {name: torch.empty_like(p, dtype=dtypes[name]) for name, p in named.items()}
        found, versions = self.worker.pull(like, begins=begins)
        if begins:
            self.versions, self._has_stepped = list(versions), False
        self._take(found)

    def _take(self, values: Mapping[str, Tensor]) -> None:
        """Gives this rank's replica new values."""
        parameters = list(self.module.parameters())
        with torch.no_grad(), self.engine.parameters.stepping(parameters, "a pull of parameters"):
            for held in super().held():
                if held.name in values:
                    held.memory.copy_(values[held.name].reshape(-1))
        self._seen = self._fingerprint()

    def _fingerprint(self) -> str:
        """Of this rank's copies: writes to ``.data`` leave no other trace."""
        return fingerprint([each.data for each in self.module.parameters()], None)

    def _check_unchanged(self) -> None:
        if self._seen not in ("", self._fingerprint()):
            self._seen = ""
            raise ShoalError(
                "parameters were changed by hand on this rank. Under strategy 'async' they are "
                "copies, and the next pull would undo the change: change what model.state_dict() "
                "returns, and load it with model.load_state_dict() on every rank"
            )

    # Pushing ------------------------------------------------------------------------------

    def push(
        self, optimizer: int, gradients: Mapping[str, Tensor], options: Sequence[Mapping[str, Any]]
    ) -> Admission:
        """Has the servers make a step; ``options`` are those of each parameter group."""
        version = None if self.versions is None else self.versions[optimizer]
        if self.versions is None or version is None:
            raise ShoalError(
                "optimizer.step() without a forward since the last one: under strategy 'async' an "
                "update is made of gradients that were computed with parameters just pulled. They "
                "are pulled where the wrapped model itself is called, model(...), in training mode "
                "(model.train(); layers in it may be in eval()) and with gradients enabled"
            )
        self.versions[optimizer], self._has_stepped = None, True
        admission = self.worker.push(optimizer, version, gradients, options)
        if self.is_gossip:
            self.is_agreed = False
            if admission.factor and self.all_ranks.size > 1:
                self.worker.mix(self._partner())
        return admission

    def _partner(self) -> int:
        size, rank = self.all_ranks.size, self.all_ranks.rank
        step = 1
        if self.options["partners"] == "random":
            step = int(torch.randint(1, size, (), generator=self._generator))
        return (rank + step) % size

    # What all ranks do together -----------------------------------------------------------

    def meet(self, doing: str) -> None:
        """All ranks are here, so that none pushes; ``doing`` is what they are at, in words."""
        self.meeting_lane.run(Barrier(doing))

    def check_ranks(self, doing: str) -> None:
        """Waits until no rank pushes any more; every rank calls it. Steps may differ."""
        self._check_unchanged()
        self.meet(doing)
        if not self.is_agreed:
            raise ShoalError(
                f'{doing} with topology="gossip", where every rank has other parameters: call '
                "model.average() on every rank first, which gives all of them the average"
            )
        for optimizer in self.optimizers:
            optimizer.average_state()

    def average(self) -> None:
        """Gives all ranks the average of their parameters; every rank calls it.

        With servers there is nothing to do: all ranks have theirs.
        """
        self.meet("average() of an asynchronous model")
        if self.is_gossip:
            served = [parameter.data for parameter in self.shard.parameters.values()]
            average_tensors(served, self.meeting_lane, "average() of an asynchronous model")
        self._restart()

    def synchronize_buffers(self) -> None:
        """Gives all ranks rank 0's buffers, or the average; every rank calls it."""
        averages = self.engine.settings.averages_buffers
        share_buffers(self.module.buffers(), self.meeting_lane, averages=averages)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The servers' parameters, the same on all ranks, which all call it.

        With "gossip" it is the average of all ranks' parameters.
        """
        self._check_unchanged()
        self.meet("state_dict() of an asynchronous model")
        self.synchronize_buffers()
        self._pull(begins=False)
        state = super().state_dict(*args, **kwargs)
        if not self.is_agreed:
            prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
            everything = self.module.named_parameters(remove_duplicate=False)
            served = [state[f"{prefix}{name}"] for name, _ in everything]
            average_tensors(served, self.meeting_lane, "state_dict() of an asynchronous model")
        self.meet("the end of state_dict()")
        return state

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
        self.versions, self._seen, self.is_agreed = None, "", True
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


def _check_choices(options: Mapping[str, Any], size: int) -> None:
    """Refuses what is not there, and what does not go together."""
    for name, choices in _CHOICES.items():
        if options[name] not in choices:
            raise ValueError(f"{name} must be one of {', '.join(choices)}; got {options[name]!r}")
    _check_servers(options["servers"], size)
    is_gossip = options["topology"] == "gossip"
    if not is_gossip and options["partners"] != "random":
        raise ValueError('partners= is for topology="gossip": with "server" there are none')
    if is_gossip and options["servers"] != "all":
        raise ValueError('servers= is for topology="server": with "gossip" there are none')


def _check_servers(servers: str | Sequence[int], size: int) -> None:
    chosen = [] if isinstance(servers, str) else list(servers)
    # Of a rank that is alone any would do: it may be about to join others.
    are_ranks = all(rank in range(size) or (size == 1 and rank >= 0) for rank in chosen)
    if servers != "all" and (not chosen or not are_ranks or len(set(chosen)) < len(chosen)):
        raise ValueError(
            f"servers must be 'all' or different ranks from 0 to {size - 1}; got {servers!r}"
        )
