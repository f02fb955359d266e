"""From a world that has lost a rank, or is to change, to the next one, with the same state."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shoal.checkpoint.load.tensor_source import Wanted
from shoal.checkpoint.load.transaction import LoadTransaction, Target
from shoal.checkpoint.together import together
from shoal.checkpoint.training_state import Companions, unsaved_buffers
from shoal.comm import Backend, World
from shoal.elastic.choosing import Chosen, Head, inherited, missing_parts, newest_complete
from shoal.elastic.kept_part import BUFFER, KeptPart, Seat
from shoal.elastic.kept_source import KeptSource
from shoal.elastic.snapshot import AttemptSnapshot
from shoal.errors import ShoalError
from shoal.sharding.extent import Extent
from shoal.system.rank_names import name_ranks

if TYPE_CHECKING:
    from shoal.elastic.elastic_optimizer import ElasticOptimizer


class Recovery:
    """One rank's way into a new world, whose ranks all take it together.

    If one of them is lost on the way, another begins, in the world after that: what is kept of the
    last step stays as it is until the new ranks have kept it themselves.
    """

    def __init__(
        self, optimizer: ElasticOptimizer, world: World, snapshot: AttemptSnapshot | None
    ) -> None:
        """``snapshot``: of the attempt that is void; None for one who comes."""
        self._optimizer, self._backend = optimizer, world.backend
        self._keeper = optimizer.keeper
        self._snapshot = snapshot

    def run(self) -> int:
        """Goes on from the newest step that is complete, and returns it."""
        heads = [list(Head.of(part)) for part in self._keeper.parts]
        reports = self._backend.all_gather_object(heads)
        chosen = newest_complete(reports)
        if chosen is None:
            return self._fall_back(reports)
        snapshot = self._agree_on_snapshot(chosen)
        self._rebuild(snapshot)
        self._load(chosen)
        self._put_back(snapshot)
        return chosen.step

    # What is not divided ------------------------------------------------------------------------

    def _own_part(self, chosen: Chosen) -> KeptPart | None:
        parts = [part for part in self._parts(chosen).values() if part in self._keeper.own]
        return parts[0] if parts else None

    def _parts(self, chosen: Chosen) -> dict[int, KeptPart]:
        """What this rank has of the chosen step, by the rank whose part it is."""
        return {
            part.seat.rank: part
            for part in self._keeper.parts
            if (part.seat.generation, part.step) == (chosen.generation, chosen.step)
        }

    def _agree_on_snapshot(self, chosen: Chosen) -> AttemptSnapshot:
        """This rank's own; who has none takes the first rank's that has one."""
        own = self._snapshot
        if own is None or own.step != chosen.step:  # its attempt was committed after all
            part = self._own_part(chosen)
            own = None if part is None else part.local
        has_one = self._backend.all_gather_object(own is not None)
        first = has_one.index(True)
        common = self._backend.broadcast_object(own.common() if own else None, root=first)
        return own if own is not None else AttemptSnapshot.of(common)

    def _rebuild(self, snapshot: AttemptSnapshot) -> None:
        optimizer, model = self._optimizer, self._optimizer.model
        optimizer.let_go()
        snapshot.put_options(optimizer)  # ranks compare them below
        model.move_to(self._backend)
        optimizer.follow_model(snapshot.num_steps)
        for each in optimizer.also:
            if hasattr(each, "move_to"):
                each.move_to(model)

    def _put_back(self, snapshot: AttemptSnapshot) -> None:
        """What a rank has of its own, after what is divided was loaded."""
        snapshot.put_options(self._optimizer)
        snapshot.put_also(self._optimizer.also)
        if self._snapshot is not None:
            snapshot.random.restore()

    # What is divided ----------------------------------------------------------------------------

    def _load(self, chosen: Chosen) -> None:
        own = self._parts(chosen)
        rank = self._backend.rank
        mine = [r for r, holder in chosen.holders.items() if holder == rank]
        told = self._backend.all_gather_object({str(r): own[r].about() for r in mine})
        abouts = {int(r): about for each in told for r, about in each.items()}
        source = KeptSource.open(abouts, chosen.holders, own, self._backend)
        try:
            self._load_from(source, self._random_of(chosen))
            self._backend.barrier()  # nobody reads any more
        finally:
            source.close()

    def _random_of(self, chosen: Chosen) -> int:
        """Whose generators this rank goes on with, among those of the chosen step."""
        part = self._own_part(chosen)
        seats = self._backend.all_gather_object(None if part is None else part.seat.rank)
        return inherited(self._backend.rank, seats, Seat(chosen.generation, 0, chosen.size))

    def _load_from(self, source: KeptSource, number: int) -> None:
        optimizer, backend = self._optimizer, self._backend
        target = Target(optimizer.model, [optimizer], Companions(), True, True, number)
        transaction = LoadTransaction(source, target)
        found = together(backend, transaction.resolve, "looking at what is kept")
        transaction.check(found)
        together(backend, transaction.read, "reading what is kept")
        transaction.commit()
        self._load_buffers(source)

    def _load_buffers(self, source: KeptSource) -> None:
        """Those that this rank does not save."""
        wanted = []
        for name, buffer in unsaved_buffers(self._optimizer.model).items():
            key = next((k for k in (BUFFER + name, f"model/{name}") if k in source.tensors), None)
            if key is not None:
                values = torch.empty(buffer.numel(), dtype=source.tensors[key].dtype)
                wanted.append((Wanted(key, Extent.whole(buffer.shape), values), buffer))
        source.read([each for each, _ in wanted])
        for each, buffer in wanted:
            buffer.detach().copy_(each.memory.view(buffer.shape))

    # Nothing is kept ----------------------------------------------------------------------------

    def _fall_back(self, reports: list[list[list[int]]]) -> int:
        step, lost = missing_parts(reports)
        what = (
            f"the state of {name_ranks(lost)} after step {step}, and the copy of it, were lost "
            "together"
            if lost
            else "ranks were lost before any state was kept"
        )
        return self._optimizer.load_checkpoint(self._backend, self._rebuild, what)


def refuse(backend: Backend, what: str) -> None:
    """There is nothing to go on from."""
    raise ShoalError(
        f"{what}, and this run has neither saved nor loaded a checkpoint: training cannot go on. "
        "Save one now and then with shoal.save(), or place ranks on more hosts"
    )
