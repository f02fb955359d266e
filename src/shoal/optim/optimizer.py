"""`ShardedOptimizer`: the user's optimizer, stepping only what this rank owns."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, SparseAdam

from shoal.comm.operation.whole import Barrier
from shoal.errors import ShoalError
from shoal.optim.division import DIVISIONS, WorkDivision
from shoal.optim.kinds import Kind
from shoal.optim.proof.judgement import Judgement
from shoal.optim.proof.judging import judge_or_believe
from shoal.optim.state import Reception, refuse_more_to_save, renew_state
from shoal.optim.stepping.supervision import Supervision, users_hooks
from shoal.sharding.holding import FullState, HeldState
from shoal.strategies.consistency.progress import PLACE, StepRecord, compare
from shoal.strategies.foreign import refuse_foreign_optimizer
from shoal.strategies.model import ShardedModel

_STREAMS = "streams"
"""Under what a saved state has what it takes to go on drawing."""


class ShardedOptimizer(Optimizer):
    """Wraps any torch optimizer, built before or after the model was wrapped.

    The user's object is kept, with its ``param_groups``, so hyperparameters and learning-rate
    schedulers go on working; while it steps, it has this rank's memory in the place of the
    parameters. What an optimizer needs to see at once (`Kind`) is known, proved, or declared.

    Attributes:
        optimizer: The user's.
        model: The wrapped model.
        kind: What the optimizer needs to see at once.
        division: How its work is divided over the ranks.
    """

    model_class: ClassVar[type[ShardedModel]] = ShardedModel
    divisions: ClassVar[Mapping[Kind, type[WorkDivision]]] = DIVISIONS
    optimizer: Optimizer
    model: ShardedModel
    kind: Kind
    division: WorkDivision
    supervision: Supervision
    _record: StepRecord
    _hooks: list[Any]
    # A fused optimizer has it, but would not see the scale that a scaler leaves on this object.
    _step_supports_amp_scaling = False

    def __init__(
        self,
        optimizer: Optimizer,
        model: ShardedModel,
        *,
        kind: Kind | str | Judgement | None = None,
    ) -> None:
        """Makes the optimizer step this rank's memory.

        Args:
            optimizer: The user's.
            model: The wrapped model whose parameters it has.
            kind: "element-wise", "per-parameter" or "global", if it need not be found out.
        """
        self._pair(optimizer, model)
        self.optimizer, self.model = optimizer, model
        self._hooks = []
        self._take_over(kind)

    def _take_over(self, kind: Kind | str | Judgement | None) -> None:
        optimizer, model = self.optimizer, self.model
        self._record = StepRecord(optimizer)
        compare(model.all_ranks, self._record.facts())
        judgement = judge_or_believe(optimizer, kind)
        self.kind = judgement.kind
        for parameter in (each for group in self.param_groups for each in group["params"]):
            if id(parameter) not in model.engine.index_of:
                refuse_parameter(parameter)
        compare(model.engine.backend, self._order())
        division_class = self.division_for(self.kind)
        division_class.admit(optimizer, model)
        renew_state(optimizer)
        self.supervision = _supervise(optimizer, model, judgement, self._numbers())
        self.division = division_class(model, self.supervision)
        self._hooks = [optimizer.register_step_pre_hook(self._check_step)]
        model.optimizers.append(self)
        model.engine.progress.follow(self._record)

    def let_go(self) -> None:
        """Takes its hooks off the user's optimizer and drops the state there is; asks nobody."""
        for handle in self._hooks:
            handle.remove()
        self.division.let_go()
        self.model.optimizers[:] = [each for each in self.model.optimizers if each is not self]

    def follow_model(self, num_steps: int) -> None:
        """Takes the user's optimizer again, after `let_go`, for a model over other ranks.

        It has no state until that is loaded. ``num_steps``: how many it has made so far.
        """
        self._take_over(self.supervision.judgement)
        self._record.num_steps = num_steps

    @property
    def num_steps(self) -> int:
        """How many steps this rank has made."""
        return self._record.num_steps

    @classmethod
    def division_for(cls, kind: Kind) -> type[WorkDivision]:
        """How the work of an optimizer of this kind is divided under the strategy."""
        if kind not in cls.divisions:
            raise ShoalError(
                f"the strategy {cls.model_class.strategy!r} cannot divide an optimizer that is "
                f"{kind}: choose another strategy, or give {cls.__name__}.divisions an entry"
            )
        return cls.divisions[kind]

    def _pair(self, optimizer: Optimizer, model: ShardedModel) -> None:
        """Refuses what does not go together, before anything is changed."""
        check_optimizer(optimizer)
        if not isinstance(model, self.model_class):
            self._refuse_model(model)

    def _compare(self, model: ShardedModel, options: Mapping[str, Any]) -> None:
        """Raises on all ranks if they have different options of this class."""
        words = [f"{name}={value!r}" for name, value in options.items()]
        model.all_ranks.run(Barrier(f"{type(self).__name__}({', '.join(words)})"))

    def _refuse_model(self, model: ShardedModel) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} goes with {self.model_class.__name__}; "
            f"got a {type(model).__name__}"
        )

    def _numbers(self) -> dict[int, int]:
        """Each parameter's number among all of the user's, by its id."""
        parameters = [each for group in self.param_groups for each in group["params"]]
        return {id(parameter): number for number, parameter in enumerate(parameters)}

    def _order(self) -> dict[str, str]:
        """Where each parameter stands; each rank steps its part with the options of that group."""
        names = {id(each): name for name, each in self.model.engine.module.named_parameters()}
        return {
            f"{PLACE}{names[id(each)]} in the optimizer": f"group {which}, number {number}"
            for which, group in enumerate(self.param_groups)
            for number, each in enumerate(group["params"])
        }

    def describe(self) -> str:
        """Its kind, and how that is known."""
        judgement = self.supervision.judgement
        watched = "; every step is watched" if judgement.is_watched else ""
        return f"{type(self.optimizer).__name__} is {judgement}{watched}"

    # An Optimizer in all but its own state ------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The user's."""
        return self.optimizer.param_groups

    @property  # type: ignore[override]
    def state(self) -> Mapping[Tensor, Any]:
        """The state on this rank, by the user's parameters; to read only, where it is divided."""
        return self.division.state

    @state.setter
    def state(self, value: Any) -> NoReturn:
        """Refused: the state is divided among the ranks, and cannot be replaced on one of them."""
        raise ShoalError(
            "optimizer.state is this rank's part of the state and cannot be replaced: give a whole "
            "state to load_state_dict() on every rank, or wrap a new optimizer to begin anew"
        )

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The user's optimizer's."""
        return self.optimizer.defaults

    def __getattr__(self, name: str) -> Any:
        """Whatever else the user's optimizer has."""
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """What the user's optimizer has, or may look for, is set there: its steps go by it."""
        users = vars(self).get("optimizer")
        is_own = users is None or name in vars(self) or name in _own_names(type(self))  # type: ignore[arg-type]
        if not is_own and (hasattr(users, name) or not name.startswith("_")):
            setattr(users, name, value)
        else:
            super().__setattr__(name, value)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The model's, that this optimizer was built for."""
        return self.division.flat_parameters

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: the memory is laid out when the optimizer is wrapped."""
        raise ShoalError(
            "add parameter groups to the optimizer before it is wrapped; parameters that are to "
            "be trained later may be in one already, with requires_grad=False"
        )

    def __reduce__(self) -> NoReturn:
        """Refused: this rank has a part of the state only."""
        raise ShoalError(
            "a wrapped optimizer cannot be copied or pickled: save its state_dict(), or use "
            "shoal.save()"
        )

    # State --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The whole state, as the plain optimizer would have it; every rank calls it."""
        if self.kind.is_divisible:
            refuse_more_to_save(self.optimizer)
        return self.division.state_dict() | self.saved_streams()

    @torch.inference_mode(mode=False)
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over a whole state, of this optimizer or a plain one; every rank calls it."""
        self.load_streams(state_dict)
        self.division.load_state_dict(state_dict)

    def saved_streams(self) -> dict[str, Any]:
        """Where its draws go on, as an entry of a state; a plain optimizer does not look at it."""
        streams = self.supervision.streams
        return {} if streams is None else {_STREAMS: streams.state_dict()}

    def load_streams(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on drawing where a state says, if it does."""
        streams = self.supervision.streams
        if streams is not None and _STREAMS in state_dict:
            streams.load_state_dict(state_dict[_STREAMS])

    def held_groups(self) -> list[tuple[list[str], dict[str, Any]]]:
        """For each parameter group the full names of its parameters, and its hyperparameters."""
        return [
            (
                [self.division.names[id(parameter)] for parameter in own],
                {key: value for key, value in group.items() if key != "params"},
            )
            for group, own in zip(self.param_groups, self.division.parameters, strict=True)
        ]

    def held_state(self) -> Iterator[HeldState]:
        """This rank's part of the state, under full names."""
        refuse_more_to_save(self.optimizer)
        return self.division.held_state()

    def own_state(self) -> list[HeldState] | None:
        """This rank's state where every rank has another one; None where they share one."""
        return None

    @torch.inference_mode(mode=False)
    def receive(
        self, saved: Mapping[str, FullState], options: Sequence[Mapping[str, Any]]
    ) -> Reception:
        """Makes room for a state that is loaded, beside the one there is.

        ``saved`` is by full name: parameters that are not in it keep the state they have.
        ``options`` are the hyperparameters of each parameter group.
        """
        return self.division.receive(saved, options)

    def note_checkpoint(self, path: Path, companions: Mapping[str, Sequence[Any]]) -> None:
        """A checkpoint of its state is on disk, with what was saved along."""

    def note_load(self) -> None:
        """Its state, and the model's, were loaded."""

    # Steps --------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step on this rank's memory; then all ranks have the new parameters.

        Raises:
            MismatchError: If the ranks do not train alike, or their weights have drifted apart.
        """
        self._check_groups()
        self._record.begin_step()
        self.supervision.check_options()
        with users_hooks(self.optimizer, self, closure, own=self._check_step):
            loss = self.division.step(closure, self._check_ranks)
        self._record.end_step()
        self.model.engine.progress.note_step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients of its parameters, or makes them zero."""
        if type(self.optimizer).zero_grad is not Optimizer.zero_grad:  # it may do something else
            self.optimizer.zero_grad(*(() if set_to_none else (False,)))
        else:
            self.model.engine.gradients.zero(self.parameters, set_to_none=set_to_none)

    def _check_groups(self) -> None:
        """Refuses parameters that were taken out of the groups, or put in, after wrapping."""
        here = [group["params"] for group in self.param_groups]
        known = self.division.parameters
        if list(map(len, here)) != list(map(len, known)) or not all(
            all(map(operator.is_, own, users)) for own, users in zip(here, known, strict=True)
        ):
            raise ShoalError(
                "the parameters of the optimizer's param_groups have changed since it was wrapped: "
                "its memory is laid out for those that it had then. Nothing has been stepped. To "
                "train some of them only, freeze the others on every rank "
                "(parameter.requires_grad_(False)), or wrap a new optimizer"
            )

    def _check_ranks(self) -> None:
        """Now and then, when all gradients are there and nothing has been stepped yet."""
        if self is self.model.optimizers[0]:
            self.model.engine.replicas.check_step(self._record.num_steps + 1)

    def _check_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Refuses a step of the user's object that this one does not make."""
        if optimizer is self.optimizer and not self.supervision.is_stepping:
            raise ShoalError(
                "this optimizer was wrapped for several ranks: step the one that "
                "shoal.as_distributed(model, optimizer) returned instead"
            )


@functools.cache
def _own_names(wrapper: type[ShardedOptimizer]) -> frozenset[str]:
    """Attributes that a wrapped optimizer has itself: those that its classes have or annotate."""
    classes = [each for each in wrapper.__mro__ if issubclass(each, ShardedOptimizer)]
    annotated = (name for each in classes for name in inspect.get_annotations(each))
    return frozenset(annotated) | frozenset(dir(wrapper))


def check_optimizer(optimizer: Optimizer) -> None:
    """Refuses what cannot be wrapped."""
    if isinstance(optimizer, ShardedOptimizer):
        raise TypeError("the optimizer is wrapped already")
    refuse_foreign_optimizer(optimizer)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"need a torch.optim.Optimizer to wrap; got {type(optimizer).__name__}")
    if isinstance(optimizer, SparseAdam):
        raise TypeError(
            "SparseAdam steps sparse gradients only, and gradients are averaged over the ranks "
            "as dense ones (also those of nn.Embedding(sparse=True)): use Adam, or SGD or "
            "Adagrad, whose steps are the same for both"
        )


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether ``step`` cannot be called without a closure, as LBFGS's cannot."""
    inner = optimizer.optimizer if isinstance(optimizer, ShardedOptimizer) else optimizer
    closure = inspect.signature(inner.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def refuse_parameter(parameter: Tensor) -> NoReturn:
    """Of another model, or of none."""
    raise ValueError(
        f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not part of the "
        "model: build it from this model's parameters"
    )


def _supervise(
    optimizer: Optimizer, model: ShardedModel, judgement: Judgement, numbers: Mapping[int, int]
) -> Supervision:
    def tear() -> None:
        model.engine.steps.is_torn = True

    seed = None
    if judgement.may_draw:
        seed = model.all_ranks.broadcast_object(torch.initial_seed())
    return Supervision(
        optimizer,
        judgement,
        parameters=[list(group["params"]) for group in optimizer.param_groups],
        numbers=numbers,
        seed=seed,
        on_violation=tear,
    )
