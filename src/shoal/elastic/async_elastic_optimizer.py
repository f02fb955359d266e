"""`AsyncElasticOptimizer`: updates without barriers, while ranks come and go."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from shoal.comm import World
from shoal.elastic.async_keeper import AsyncKeeper
from shoal.elastic.async_recovery import AsyncRecovery
from shoal.elastic.elastic_optimizer import ElasticOptimizer
from shoal.elastic.kept_part import KeptPart, Seat
from shoal.elastic.recovery import Recovery
from shoal.elastic.snapshot import AttemptSnapshot
from shoal.errors import NotHeldError, PeerError
from shoal.strategies.independent.async_model import AsyncModel
from shoal.strategies.independent.worker import Unmade

T = TypeVar("T")


class AsyncElasticOptimizer(ElasticOptimizer):
    """What `ElasticOptimizer` is under strategy "async"; see [Note: copies of a server].

    An attempt counts on its own rank. One in which a rank is lost counts if its update had been
    admitted; else it is void, and the loop goes on with the next batch.

    Attributes:
        copy_every: After how many updates of its own a server sends its shard to its buddy.
        num_committed: How many updates this rank has made. Who joins begins with the number of
            those who have made the fewest.
    """

    copy_every = 8
    is_together = False
    """Whether this rank waits for all others, in `together`."""
    model: AsyncModel
    keeper: AsyncKeeper
    _buffers: list[Tensor]
    _unmade: tuple[Seat, Unmade] | None

    def _make_keeper(self) -> AsyncKeeper:
        self._buffers, self._unmade = [], None
        return AsyncKeeper()

    def take_along(self, each: Any) -> None:
        """Has something go back with an attempt that is void."""
        if hasattr(each, "follow"):
            raise ValueError(
                'elastic=True with strategy="async" takes no loader: ranks are at different places '
                "of an epoch, which cannot be divided anew. Give each rank a loader of its own data"
            )
        super().take_along(each)

    def together(self, act: Callable[[], T]) -> T:
        """What all ranks do at one place of the script, such as a save or the end of training.

        It is done again if a rank is lost meanwhile, and this rank serves while it waits. Who
        joins meanwhile begins with the update before it, and so takes part.

        Example:
            >>> state = optimizer.together(model.state_dict)
        """
        self.is_together = True
        try:
            while True:
                with self.attempt():
                    return act()
        finally:
            self.is_together = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update, inside of an attempt."""
        try:
            return super().step(closure)
        except (PeerError, NotHeldError):
            if self.model.worker.unmade is None:
                raise
            self._unmade = self.keeper.seat, self.model.worker.unmade  # made after the recovery
            self._has_stepped = True
            return None

    # Attempts -----------------------------------------------------------------------------------

    def _change_if_due(self) -> bool:
        membership = self._membership
        if membership is None or not self._is_member:
            return False
        if membership.is_leaving:  # which nobody has been told of so far
            self._hand_over()
        is_due = membership.wants_change() or bool(self.model.worker.absent())
        if is_due:
            self.recover(is_agreed=True)
        return is_due

    def _open_window(self) -> None:
        super()._open_window()
        self._buffers = [buffer.detach().clone() for buffer in self.model.module.buffers()]

    def _is_on_any(self, flag: bool) -> bool:
        return flag

    def _commit(self) -> None:
        self.num_committed += 1
        self._close_window()
        self.has_committed = True
        if self._is_member and self.num_committed % self.copy_every == 0:
            with contextlib.suppress(PeerError, NotHeldError):  # the next attempt finds it, too
                self._send_copy()

    def is_loss(self, error: BaseException) -> bool:
        """Whether an error says that the world has lost a rank, or is being left."""
        return self._is_member and (isinstance(error, NotHeldError) or super().is_loss(error))

    # Copies -------------------------------------------------------------------------------------

    def _renew(self) -> None:
        if self._is_member and self._is_stale:
            with contextlib.suppress(NotHeldError):
                self._send_copy()
                self._is_stale = False

    def _take_copy(self) -> KeptPart:
        with self.model.shard.lock:
            return self.keeper.take(self._collect(), self.model.shard.made)

    def _send_copy(self) -> None:
        if self.model.all_ranks.size > 1:
            self.keeper.send(self._take_copy(), [self.keeper.buddy])

    def _hand_over(self) -> None:
        """Before this rank leaves: the others have all of its shard, and nobody changes it."""
        with self.model.shard.lock:
            self.model.shard.frozen_by = self.model.all_ranks.rank
        part = self._take_copy()
        for rank in self.keeper.others_of_world:
            with contextlib.suppress(PeerError, NotHeldError):
                self.keeper.send(part, [rank])

    def _forget(self) -> None:
        super()._forget()
        self.model.meet("the end of a load")  # none sends a copy that another drops

    # Changes ------------------------------------------------------------------------------------

    def recover(self, *, is_agreed: bool = False) -> None:
        """Goes on in the next world; see `AsyncRecovery`."""
        if self._is_attempting and self._has_stepped:
            self._commit()
        lost = self.generation
        super().recover(is_agreed=is_agreed)
        unmade, self._unmade = self._unmade, None
        if unmade is not None and unmade[0].generation == lost:
            names = self.keeper.left_out(unmade[1], unmade[0].rank)
            with contextlib.suppress(PeerError, NotHeldError):
                self.model.worker.make(unmade[1].update, names)

    def _recovery(self, world: World, *, is_joining: bool) -> Recovery:
        if is_joining:
            return AsyncRecovery(self, world, None, [])
        if self.keeper.is_current:  # nobody is served any more: it stays as it is
            self.keeper.own.append(self._take_copy())
        snapshot, buffers = self._snapshot, self._buffers
        if snapshot is None:
            snapshot = AttemptSnapshot.take(self.num_committed, self.num_steps, self, self.also)
            buffers = [buffer.detach().clone() for buffer in self.model.module.buffers()]
            self._snapshot, self._buffers = snapshot, buffers
        return AsyncRecovery(self, world, snapshot, buffers)


ElasticOptimizer.kinds[AsyncModel.strategy] = AsyncElasticOptimizer
