"""`LocalSGDOptimizer`: steps of a rank's own, and averages of parameters now and then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from shoal.optim.independent.average_state import averaged_states, whole_states
from shoal.optim.independent.outer_step import OuterStep
from shoal.optim.kinds import Kind
from shoal.optim.optimizer import ShardedOptimizer
from shoal.optim.proof.judgement import Judgement
from shoal.sharding.holding import HeldState
from shoal.strategies.gradients.compressed.exchange import CompressedExchange
from shoal.strategies.independent.averaging import averaged_groups
from shoal.strategies.independent.local_model import (
    LocalModel,
    Outer,
    check_every_steps,
    check_outer,
)

_OUTER = "outer"
"""Under what a state has that of the outer optimizer."""


class LocalSGDOptimizer(ShardedOptimizer):
    """Each rank steps by itself; after so many steps all go on with the average of parameters.

    Its own state stays a rank's own. With ``outer`` the average is a direction that another
    optimizer takes a step in, the same on all ranks; see [Note: rounds of local steps].

    Example:
        >>> model = LocalModel(module)
        >>> optimizer = LocalSGDOptimizer(
        ...     torch.optim.AdamW(module.parameters()),
        ...     model,
        ...     every=50,
        ...     outer=lambda ps: torch.optim.SGD(ps, lr=0.7, momentum=0.9, nesterov=True),
        ... )

    Attributes:
        every: How many steps a round has.
        num_local_steps: How many were made since the last average.
    """

    model_class = LocalModel
    model: LocalModel

    def __init__(
        self,
        optimizer: Optimizer,
        model: LocalModel,
        every: int | None = None,
        outer: Outer | None = None,
        *,
        kind: Kind | str | Judgement | None = None,
    ) -> None:
        """Makes the optimizer step this rank's replica.

        Args:
            optimizer: The user's.
            model: The wrapped model whose parameters it has.
            every: After how many steps parameters are averaged; by default the model's.
            outer: Makes the optimizer of the averages; by default the model's, if it has one.
            kind: See `ShardedOptimizer`.
        """
        self._pair(optimizer, model)
        self.every: int = model.options["every"] if every is None else every
        check_every_steps(self.every)
        check_outer(outer)
        self._compare(
            model, {"every": self.every} | ({} if outer is None else {"outer": "a function"})
        )
        self.num_local_steps = 0
        self._averages: list[HeldState] | None = None
        super().__init__(optimizer, model, kind=kind)
        queue = model.exchanging()
        groups = averaged_groups(model, self.parameters, model.meeting_lane, queue)
        make = model.options["outer"] if outer is None else outer
        self._outer_step = OuterStep(groups, make, model.all_ranks)
        model.engine.account.add("state", self._outer_step.num_bytes_kept)

    @property
    def outer(self) -> Optimizer | None:
        """The optimizer of the averages; its learning rate may be changed, on every rank alike."""
        return self._outer_step.optimizer

    def describe(self) -> str:
        """Its kind, and when parameters are averaged."""
        when = f"parameters are averaged after every {self.every} steps"
        if self.outer is not None:
            when += f", and {type(self.outer).__name__} steps with what that changes"
        return f"{super().describe()}; {when}"

    # Rounds -------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of this rank's own; the last one of a round ends with the average of all.

        Raises:
            MismatchError: At the end of a round, if the ranks do not train alike.
        """
        loss = super().step(closure)
        self.num_local_steps += 1
        if self.num_local_steps >= self.every:
            self.average()
        return loss

    @torch.inference_mode(mode=False)
    def average(self) -> None:
        """Ends the round now; every rank calls it, after the same number of steps."""
        if not self.num_local_steps:
            return
        doing = f"average of parameters after {self.num_local_steps} local steps"
        self.model.meet(doing)
        with torch.no_grad(), self.model.engine.parameters.stepping(self.parameters, doing):
            self._outer_step.end_round(doing)
        self.num_local_steps = 0
        self.model.end_round()

    def begin_round(self) -> None:
        """All ranks have been given the same parameters."""
        self.num_local_steps = 0
        self._outer_step.begin_round()

    def exchanges(self) -> Iterator[CompressedExchange]:
        """What it averages compressed."""
        for group in self._outer_step.groups:
            if group.exchange is not None:
                yield group.exchange

    # State --------------------------------------------------------------------------------

    def own_state(self) -> list[HeldState]:
        """This rank's, parameter by parameter."""
        return whole_states(super().held_state())

    def average_state(self) -> None:
        """The next `held_state` is the average over the ranks; every rank calls it."""
        self._averages = averaged_states(self.own_state(), self.model.meeting_lane)

    def held_state(self) -> Iterator[HeldState]:
        """The average over the ranks, once `average_state` was called; else this rank's own."""
        averages, self._averages = self._averages, None
        return super().held_state() if averages is None else iter(averages)

    def state_dict(self) -> dict[str, Any]:
        """The average of all ranks' states, and the outer optimizer's; every rank calls it."""
        numbers = {self.division.names[id(p)]: n for n, p in enumerate(self.parameters)}
        averages = averaged_states(self.own_state(), self.model.meeting_lane)
        count = 0
        groups = []
        for names, options in self.held_groups():
            groups.append({**options, "params": list(range(count, count + len(names)))})
            count += len(names)
        state = {numbers[each.name]: _plain(each) for each in averages}
        saved = {"state": state, "param_groups": groups, **self.saved_streams()}
        return saved if self.outer is None else saved | {_OUTER: self.outer.state_dict()}

    @torch.inference_mode(mode=False)
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over a whole state, of this optimizer or a plain one; every rank calls it."""
        super().load_state_dict({k: v for k, v in state_dict.items() if k != _OUTER})
        if self.outer is not None and _OUTER in state_dict:
            self.outer.load_state_dict(state_dict[_OUTER])

    @property
    def outer_names(self) -> dict[int, str]:
        """Full names of the outer optimizer's parameters, by their id."""
        return self._outer_step.names


def _plain(held: HeldState) -> dict[str, Any]:
    """As the plain optimizer has it."""
    tensors = {key: value.view(held.extent.shape) for key, value in held.tensors.items()}
    return {**held.shared, **tensors}
