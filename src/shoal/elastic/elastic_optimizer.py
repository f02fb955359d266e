"""`ElasticOptimizer`: steps that are made by all ranks or by nobody, while ranks come and go."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch.optim import Optimizer

from shoal.checkpoint.loading import load
from shoal.checkpoint.save.rank_state import RankState, collect
from shoal.checkpoint.training_state import Companions, unsaved_buffers
from shoal.comm import Backend
from shoal.comm.control.membership import Change, Membership, Regrouped, RunComplete
from shoal.comm.world import World, current
from shoal.elastic.keeper import IS_LEAVING, WANTS_CHANGE, Keeper
from shoal.elastic.kept_part import BUFFER, Share
from shoal.elastic.recovery import Recovery, refuse
from shoal.elastic.snapshot import AttemptSnapshot
from shoal.errors import CheckpointWarning, LaunchError, PeerError, ShoalError
from shoal.optim.kinds import Kind
from shoal.optim.optimizer import ShardedOptimizer
from shoal.optim.proof.judgement import Judgement
from shoal.optim.registry import ELASTIC, PAIRS
from shoal.strategies.model import ShardedModel


class ElasticOptimizer(ShardedOptimizer):
    """Steps as the strategy's own optimizer does, in attempts that a lost rank makes void.

    It is one of the strategy's own class, too. The same is said by
    ``as_distributed(..., elastic=True)``. In a world whose ranks do not change an attempt is no
    more than a ``with`` block.

    Attributes:
        also: Schedulers, scalers and loaders: whatever goes back with an attempt that is void. It
            may be extended before the first attempt.
        num_committed: How many steps all ranks have made together. One that was left out, by a
            scaler or by the script, is among them.
        has_committed: Whether the last attempt at a step counts, and no other was void since. What
            a script does after it is for those who made it: who joins begins with the next batch.
        num_in_window: How many attempts have accumulated gradients since; they begin anew where an
            attempt is void.
        generation: The number of the world that this rank is in.

    Example:
        >>> optimizer = ElasticOptimizer(torch.optim.AdamW(module.parameters()), model)
        >>> for inputs, targets in loader:
        ...     with optimizer.attempt():
        ...         model.train_step(inputs, targets, loss_fn)
        ...         optimizer.step()
        ...         optimizer.zero_grad()
    """

    also: list[Any]
    num_committed: int
    has_committed: bool
    num_in_window: int
    keeper: Keeper
    kinds: ClassVar[dict[str, type[ElasticOptimizer]]] = {}
    """Of strategies whose ranks have no steps in common."""

    def __new__(cls, optimizer: Optimizer, model: ShardedModel, *_: Any, **__: Any) -> Self:
        """One that also is what goes with the model."""
        if not isinstance(model, ShardedModel):
            raise TypeError(
                f"{cls.__name__} goes with a wrapped model: wrap it first, for example as "
                f"shoal.strategies.DDPModel(module); got a {type(model).__name__}"
            )
        _check_elastic(model)
        kind = cls.kinds.get(model.strategy, ElasticOptimizer)
        joined: type[Self] = _joined(
            cls if issubclass(cls, kind) else kind, PAIRS[model.strategy].optimizer
        )
        return super().__new__(joined)

    def __init__(
        self,
        optimizer: Optimizer,
        model: ShardedModel,
        min_ranks: int = 1,
        max_ranks: int | None = None,
        on_change: Callable[[Change], None] | None = None,
        also: Sequence[Any] = (),
        *,
        kind: Kind | str | Judgement | None = None,
    ) -> None:
        """All ranks call it.

        Args:
            optimizer: The user's.
            model: The wrapped model whose parameters it has.
            min_ranks: With fewer ranks the run ends.
            max_ranks: More are not let in.
            on_change: Called on every rank when the ranks have changed and training goes on.
            also: See the attribute.
            kind: See `ShardedOptimizer`.
        """
        super().__init__(optimizer, model, kind=kind)
        self.also = []
        self.num_committed = self.num_in_window = 0
        self.keeper = self._make_keeper()
        self._on_change = on_change
        self._snapshot: AttemptSnapshot | None = None
        self._is_attempting = self._has_stepped = self._is_window_open = False
        self._is_stale, self.has_committed = True, False
        self._has_changed = self._is_new = False
        self._change_due: list[int] | None = None
        self._checkpoint: tuple[Path, Mapping[str, Sequence[Any]], int] | None = None
        for each in also:
            self.take_along(each)
        if self._membership is not None:
            size = model.ranks_per_replica
            self._membership.require(max(min_ranks, size), max_ranks, size)
        if self._is_member:
            self._keep_with_others()

    def _make_keeper(self) -> Keeper:
        return Keeper()

    @property
    def _membership(self) -> Membership | None:
        return current().membership

    @property
    def _is_member(self) -> bool:
        """Whether there are others to go on with; not in a world whose ranks do not change."""
        return self._membership is not None and self._membership.generation > 0

    @property
    def generation(self) -> int:
        """The number of the world that this rank is in; 0 for one that waits to be a member."""
        return 1 if self._membership is None else self._membership.generation

    def take_along(self, each: Any) -> None:
        """Has something go back with an attempt that is void; loaders hand out samples again."""
        self.also.append(each)
        if hasattr(each, "follow"):
            each.follow(self)

    # Attempts -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        """Around all that makes up a step: it counts on all ranks, or on none.

        If a rank is lost inside, `MembershipChanged` is raised there and ends here: everything is
        as it was before the attempt, on the ranks that are left and those that came, and the loader
        hands out the same samples again. An attempt that leaves gradients without a step is part
        of the next one. One that trains nothing, as for a save, is of its own.
        """
        if self._is_attempting:
            raise ShoalError("optimizer.attempt() cannot be inside of another one")
        self._check_is_alone()
        self.become_member()
        if self._first_loader is None:
            self._change_if_due()
        was_open, num_trained = self._is_window_open, self.model.engine.passes.num_trained
        self._open_window()
        self._is_attempting, self._has_stepped = True, False
        try:
            yield
            if self._has_stepped:
                self._commit()
            elif self.model.engine.passes.num_trained > num_trained:
                self._end_without_step()
            elif not was_open:
                self._close_window()
        except ShoalError as error:
            self.has_committed = False
            if not self.is_loss(error):
                raise
            self.recover()
        finally:
            self._is_attempting = False

    def _end_without_step(self) -> None:
        """Gradients are accumulated; or a step was left out, and what it has changed counts."""
        if self._is_on_any(self._has_gradients()):
            self.num_in_window += 1
            self.has_committed = False
        else:
            self._commit()

    def _has_gradients(self) -> bool:
        """Whether a later step is to use what there is, as far as this rank can tell."""
        assert self._snapshot is not None
        for each, before in zip(self.also, self._snapshot.also, strict=True):
            if isinstance(each, torch.amp.GradScaler) and each.get_scale() < before.get("scale", 0):
                return False  # it has found an infinity, and left the step out
        return self.model.engine.gradients.are_there

    def _is_on_any(self, flag: bool) -> bool:
        """Whether it is so on some rank: one that holds frozen layers only has no gradients."""
        flags = torch.tensor([int(flag)])
        return bool(self.model.all_ranks.all_reduce(flags, "max").item())

    def _check_is_alone(self) -> None:
        if len(self.model.optimizers) > 1:
            raise ShoalError(
                f"the model has {len(self.model.optimizers)} optimizers, and the state of one is "
                "kept while ranks come and go: make one, with a parameter group for each part"
            )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step, inside of an attempt."""
        if not self._is_attempting:
            raise ShoalError(
                "an elastic optimizer steps inside of an attempt only: put all that makes up a "
                "step, from the forward on, into `with optimizer.attempt():`"
            )
        loss = super().step(closure)
        self._has_stepped = True
        return loss

    def before_batch(self, loader: Any) -> None:
        """A loader is about to fetch a batch: what follows can be done again from here."""
        self.become_member()
        if self._is_window_open or self._is_attempting:
            return
        self._renew()
        self._snapshot = self._take_snapshot(self.num_committed)
        if loader is self._first_loader:
            self._change_if_due()
            if self._has_changed:
                self._meet(loader)
                self._snapshot = self._take_snapshot(self.num_committed)

    def no_batch(self) -> None:
        """The epoch has ended: what follows, such as a save, begins after it."""
        if not self._is_window_open:
            self._snapshot = None

    def _meet(self, loader: Any) -> None:
        """After a change all go on from where the first of them is.

        A rank may have been lost in a save between two epochs, say, and the others have done what
        comes after it, which a new one has not; nor has one that had still to see the last commit.
        """
        ranks, state = self.model.all_ranks, loader.state_dict()
        place = [not self._is_new, state["epoch"], state["batches"]]
        places = ranks.all_gather_object(place)
        first = places.index(max(places))
        common = self._take_snapshot(self.num_committed).common() if ranks.rank == first else None
        common = ranks.broadcast_object(common, root=first)
        if place != places[first]:
            snapshot = AttemptSnapshot.of(common)
            snapshot.put_options(self)
            snapshot.put_also(self.also)
        self._has_changed = self._is_new = False

    def _open_window(self) -> None:
        if self._is_window_open:
            return
        if self._is_stale or self._snapshot is None:
            with contextlib.suppress(PeerError):  # the body meets the same, and can be undone
                self._renew()
            self._snapshot = self._take_snapshot(self.num_committed)
        self._is_window_open = True

    def _close_window(self) -> None:
        self._snapshot, self._is_window_open, self.num_in_window = None, False, 0

    def _renew(self) -> None:
        """Keeps the state again that was changed outside of steps, as by a load."""
        if self._is_member and self._is_stale:
            self._keep(self.num_committed)

    def _take_snapshot(self, step: int) -> AttemptSnapshot:
        return AttemptSnapshot.take(step, self.num_steps, self, self.also)

    # Commits ------------------------------------------------------------------------------------

    def _commit(self) -> None:
        step = self.num_committed + 1
        words = self._keep(step) if self._is_member else []
        self.num_committed = step
        self._close_window()
        self.has_committed = True
        if any(word & WANTS_CHANGE for word in words):
            self._change_due = words

    @property
    def _first_loader(self) -> Any:
        return next((each for each in self.also if hasattr(each, "follow")), None)

    def _change_if_due(self) -> bool:
        """Lets others in and out, at the place in the script where one that joins begins."""
        words, self._change_due = self._change_due, None
        if words is not None:
            with contextlib.suppress(PeerError):  # it ends before it had handed all over
                self.keeper.hand_over(words)
            self.recover(is_agreed=True)
        return words is not None

    def _keep_with_others(self) -> None:
        """Keeps the step that there is in a new world."""
        model = self.model
        self.keeper.move_to(model.all_ranks, self.generation, model.ranks_per_replica)
        self._keep(self.num_committed)

    def _keep(self, step: int) -> list[int]:
        model = self.model
        share = Share(model.data_group.rank, model.data_group.size)
        words = self.keeper.commit(
            self._collect(),
            step,
            self._take_snapshot(step),
            share=None if model.sharding.optimizer else share,
            word=self._word,
        )
        self._is_stale = False
        return words

    def _word(self) -> int:
        membership = self._membership
        assert membership is not None
        wants = WANTS_CHANGE if membership.wants_change() or membership.is_leaving else 0
        return wants | (IS_LEAVING if membership.is_leaving else 0)

    def _collect(self) -> RankState:
        state = collect(self.model, [self], Companions(), {}, self.model.all_ranks.rank)
        if self.model.data_group.rank == 0:  # its buffers are those that all go on with
            for name, buffer in unsaved_buffers(self.model).items():
                state.add_whole(BUFFER + name, buffer)
        return state

    # Changes ------------------------------------------------------------------------------------

    def is_loss(self, error: BaseException) -> bool:
        """Whether an error says that the world has lost a rank."""
        if not self._is_member:
            return False
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, PeerError):
            cause = cause.__cause__ or cause.__context__
        return cause is not None

    def become_member(self) -> None:
        """One that has come late takes part from here on."""
        if self._membership is not None and self._membership.generation == 0:
            self.recover()

    def recover(self, *, is_agreed: bool = False) -> None:
        """Goes on in the next world; see `Recovery`.

        ``is_agreed``: nobody is lost, and who leaves has handed over what it had. After a loss it
        leaves with the step after.
        """
        origins: list[int | None] | None = None
        reasons: dict[int, str] = {}
        while True:
            regrouped = self._regroup(stays=not is_agreed)
            old_ranks = list(regrouped.old_ranks)
            if origins is not None:
                gone = {origins[rank]: why for rank, why in regrouped.reasons.items()}
                reasons.update((rank, why) for rank, why in gone.items() if rank is not None)
                old_ranks = [None if old is None else origins[old] for old in old_ranks]
            else:
                old_size, reasons = regrouped.old_size, dict(regrouped.reasons)
            origins = old_ranks
            try:
                is_joining = origins[regrouped.world.rank] is None
                self._has_changed, self._is_new = True, self._is_new or is_joining
                self.num_committed = self._recovery(regrouped.world, is_joining=is_joining).run()
                self._keep_with_others()
                break
            except PeerError:
                is_agreed = False
        self._close_window()
        self._change_due = None
        if self._on_change is not None:
            change = _change(self.generation, old_size, origins, self.num_committed)
            self._on_change(replace(change, reasons=reasons))

    def _recovery(self, world: World, *, is_joining: bool) -> Recovery:
        return Recovery(self, world, None if is_joining else self._snapshot)

    def _regroup(self, *, stays: bool) -> Regrouped:
        membership = self._membership
        assert membership is not None
        try:
            return membership.regroup(stays=stays)
        except LaunchError as error:
            if membership.is_leaving or isinstance(error, RunComplete):
                raise SystemExit(0) from None
            raise

    # Checkpoints --------------------------------------------------------------------------------

    def note_checkpoint(self, path: Path, companions: Mapping[str, Sequence[Any]]) -> None:
        """What can be gone back to, if more is lost than is kept."""
        self._checkpoint = path, companions, self.num_committed

    def load_checkpoint(
        self, backend: Backend, rebuild: Callable[[AttemptSnapshot], None], what: str
    ) -> int:
        """Goes back to the newest checkpoint of this run; all ranks call it."""
        known = None
        if self._checkpoint is not None:
            path, companions, step = self._checkpoint
            own = self._take_snapshot(step)
            numbers = {name: [_place(x, self.also) for x in xs] for name, xs in companions.items()}
            known = [str(path), step, numbers, own.common()]
        found = [each for each in backend.all_gather_object(known) if each is not None]
        if not found:
            refuse(backend, what)
        path, step, numbers, common = max(found, key=lambda each: each[1])
        warnings.warn(
            f"{what}: training goes back to {path}, to step {step}",
            CheckpointWarning,
            stacklevel=4,
        )
        rebuild(replace(AttemptSnapshot.of(common), step=step))
        self.num_committed = int(step)  # which the load below takes note of, with the checkpoint
        given = {
            name: [self.also[n] for n in own] for name, own in numbers.items() if min(own) >= 0
        }
        load(
            path,
            self.model,
            self,
            scheduler=given.get("scheduler"),
            scaler=given.get("scaler"),
            sampler=given.get("sampler"),
        )
        self.keeper.drop_all()
        return self.num_committed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over a whole state; see `ShardedOptimizer`."""
        super().load_state_dict(state_dict)
        self._forget()

    def note_load(self) -> None:
        """Model and optimizer have another state, which the next attempt goes back to."""
        self._forget()

    def _forget(self) -> None:
        self._is_stale = True
        self.keeper.drop_all()


def _place(each: Any, also: Sequence[Any]) -> int:
    return next((number for number, other in enumerate(also) if other is each), -1)


def _change(generation: int, old_size: int, origins: Sequence[int | None], step: int) -> Change:
    left = tuple(rank for rank in range(old_size) if rank not in origins)
    joined = tuple(rank for rank, old in enumerate(origins) if old is None)
    return Change(generation, old_size, len(origins), left, joined, step)


def _check_elastic(model: ShardedModel) -> None:
    known = (*ELASTIC, *ElasticOptimizer.kinds)
    if model.strategy not in known:
        raise ShoalError(
            f"ranks cannot come and go under strategy={model.strategy!r}: choose one of "
            f"{', '.join(known)}. With 'hybrid' layers are split (tensor=2) or cut into stages "
            "(pipeline=2) as with 'tensor' and 'pipeline', and whole replicas come and go"
        )
    if model.options.get("topology", "server") != "server":
        raise ShoalError(
            'ranks cannot come and go with topology="gossip", where nobody else has what a rank '
            'has learned: choose topology="server"'
        )
    if model.options.get("replica", 1) != 1:
        raise ShoalError("ranks cannot come and go with replica=: leave it out")


_JOINED: dict[tuple[type, type], Any] = {}


def _joined(cls: type, partner: type) -> Any:
    """One class that is both."""
    if (cls, partner) not in _JOINED:
        content = {"__module__": cls.__module__, "__doc__": cls.__doc__}
        _JOINED[cls, partner] = type(cls.__name__, (cls, partner), content)
    return _JOINED[cls, partner]
