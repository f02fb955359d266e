"""`ShardedOptimizer`: the user's optimizer, stepping only what this rank owns."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, SparseAdam
from torch.utils._pytree import tree_leaves

from shoal.errors import ShoalError
from shoal.optim.kinds import Judgement, Kind, judge
from shoal.optim.state.fresh_state import renew_state
from shoal.optim.state.full_state import as_loaded, assemble, fragments
from shoal.optim.state.reception import (
    Reception,
    copy_held,
    divided,
    fresh_state,
    full_states,
    held_whole,
    receive_whole,
)
from shoal.optim.state.tensor_state import State, comparable
from shoal.optim.stepping import kernels
from shoal.optim.stepping.hyperparameters import Hyperparameters
from shoal.optim.stepping.segment import ParameterSegment
from shoal.optim.stepping.segmentation import Segmentation
from shoal.optim.stepping.supervision import Supervision, declared
from shoal.sharding.extent import Extent
from shoal.sharding.holding import FullState, Held, HeldState
from shoal.strategies.consistency.progress import compare
from shoal.strategies.engine.flat_group import FlatGroup
from shoal.strategies.model import ShardedModel


class ShardedOptimizer(Optimizer):
    """Wraps any torch optimizer, built before or after the model was wrapped.

    The user's object is kept, with its ``param_groups``, so hyperparameters and learning-rate
    schedulers go on working; while it steps, it has this rank's memory in the place of the
    parameters. What an optimizer needs to see at once (`Kind`) is known, proved, or declared.
    """

    model_class: ClassVar[type[ShardedModel]] = ShardedModel
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
        self._check_pair(optimizer, model)
        self.optimizer, self.model = optimizer, model
        self._options = Hyperparameters(optimizer)
        compare(model.all_ranks, self.facts())
        judgement = self._judge(optimizer, kind)
        self.kind = judgement.kind
        self._check_parameters()
        if self.kind is Kind.GLOBAL and model.engine.settings.compute_dtype is not None:
            raise ValueError(
                f"mixed_precision does not go with {type(optimizer).__name__}, which may couple "
                "any of its parameters. If it works element by element or parameter by "
                'parameter, say so with kind="element-wise" or "per-parameter".'
            )
        renew_state(optimizer)
        self._originals = [list(group["params"]) for group in optimizer.param_groups]
        self._check_kind()
        self.supervision = self._supervise(judgement)
        if self.kind is Kind.PER_PARAMETER:
            model.keep_whole([p for group in optimizer.param_groups for p in group["params"]])
        if self.kind is Kind.GLOBAL and model.sharding.optimizer:
            warnings.warn(
                f"{type(optimizer).__name__} may couple any of its parameters, so every rank steps "
                "all of them: the result is right, but no memory is saved. If it works element by "
                'element or parameter by parameter, say so with kind="element-wise" or '
                '"per-parameter".',
                stacklevel=2,
            )
        self._num_states = self._state_bytes = 0
        self._num_averaged = 0
        self._is_stepping = False
        self._segments = Segmentation(
            optimizer,
            model.engine,
            self.kind,
            may_fuse=self._may_fuse(),
            is_watched=judgement.is_watched,
        )
        if self.kind is not Kind.GLOBAL:
            self._segments.take_over()
            optimizer.register_state_dict_pre_hook(_refuse_state)
            optimizer.register_load_state_dict_pre_hook(_refuse_state)
        optimizer.register_step_pre_hook(self._check_step)
        model.optimizers.append(self)
        self.num_steps = 0
        """How many steps this rank has made."""
        self._engine.progress.follow(self)

    def facts(self) -> dict[str, str]:
        """What must be the same on every rank; see [Note: ranks that train alike]."""
        kind = type(self.optimizer)
        return {"the class": f"{kind.__module__}.{kind.__qualname__}"} | self._options.facts()

    def _check_pair(self, optimizer: Optimizer, model: ShardedModel) -> None:
        self._check_optimizer(optimizer)
        if not isinstance(model, self.model_class):
            raise TypeError(
                f"{type(self).__name__} goes with {self.model_class.__name__}; "
                f"got a {type(model).__name__}"
            )

    def _check_optimizer(self, optimizer: Optimizer) -> None:
        if isinstance(optimizer, ShardedOptimizer):
            raise TypeError("the optimizer is wrapped already")
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"need a torch.optim.Optimizer to wrap; got {type(optimizer).__name__}")
        if isinstance(optimizer, SparseAdam):
            raise TypeError(
                "SparseAdam steps sparse gradients only, and gradients are averaged over the ranks "
                "as dense ones (also those of nn.Embedding(sparse=True)): use Adam, or SGD or "
                "Adagrad, whose steps are the same for both"
            )

    @staticmethod
    def _judge(optimizer: Optimizer, kind: Kind | str | Judgement | None) -> Judgement:
        if kind is None or isinstance(kind, Judgement):
            return kind or judge(optimizer)
        return declared(Kind(kind), optimizer)

    def _supervise(self, judgement: Judgement) -> Supervision:
        seed = None
        if judgement.may_draw:
            seed = self.model.all_ranks.broadcast_object(torch.initial_seed())
        return Supervision(
            self.optimizer,
            judgement,
            parameters=self._originals,
            seed=seed,
            on_violation=lambda: self._engine.tear(),
        )

    def _check_kind(self) -> None:
        """Refuses kinds that do not go with how the model is held; all do, in general."""

    def _check_parameters(self) -> None:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if self._engine.locate(parameter) is None:
                    raise ValueError(
                        f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is "
                        "not part of the model: build it from this model's parameters"
                    )

    def describe(self) -> str:
        """Its kind, and how that is known."""
        judgement = self.supervision.judgement
        watched = "; every step is watched" if judgement.is_watched else ""
        return f"{type(self.optimizer).__name__} is {judgement}{watched}"

    # An Optimizer in all but its own state ------------------------------------------------

    @property
    def _engine(self) -> Any:
        return self.model.engine

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The user's."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The user's optimizer's."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The user's optimizer's."""
        return self.optimizer.defaults

    def __getattr__(self, name: str) -> Any:
        """Whatever else the user's optimizer has."""
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The model's, that this optimizer was built for."""
        return [parameter for group in self._originals for parameter in group]

    # The whole state ----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The whole state, as the plain optimizer would have it; every rank calls it."""
        if self.kind is Kind.GLOBAL:
            return self.supervision.with_streams(self.optimizer.state_dict())
        numbers = {id(parameter): number for number, parameter in enumerate(self.parameters)}
        own = list(fragments(self.optimizer, list(self._segments), numbers))
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            | {"params": [numbers[id(parameter)] for parameter in originals]}
            for group, originals in zip(self.param_groups, self._originals, strict=True)
        ]
        whole = assemble(self._engine.shards, own, self.parameters)
        return self.supervision.with_streams({"state": whole, "param_groups": groups})

    @torch.inference_mode(mode=False)
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over a whole state, of this optimizer or a plain one; every rank calls it."""
        self.supervision.load_streams(state_dict)
        if self.kind is Kind.GLOBAL:
            self.optimizer.load_state_dict(state_dict)
            return
        saved = state_dict["param_groups"]
        sizes = [len(group["params"]) for group in saved]
        if sizes != [len(originals) for originals in self._originals]:
            raise ValueError(
                f"the state was saved for groups of {sizes} parameters; this optimizer has groups "
                f"of {[len(originals) for originals in self._originals]}"
            )
        order = [(number, group) for group in saved for number in group["params"]]
        self.optimizer.state.clear()
        for (number, options), parameter in zip(order, self.parameters, strict=True):
            which, _ = self._engine.locate(parameter)
            master = self._engine.groups[which].master
            state = state_dict["state"].get(number, {})
            loaded = {key: as_loaded(key, value, master, options) for key, value in state.items()}
            if loaded:
                self.optimizer.state[parameter] = loaded
        for group, own in zip(saved, self.param_groups, strict=True):
            own.update({key: value for key, value in group.items() if key != "params"})
        self._segments.take_over()

    # What this rank holds -----------------------------------------------------------------

    @property
    def names(self) -> dict[int, str]:
        """Full names of its parameters, by their id."""
        return {id(parameter): self._name_of(parameter) for parameter in self.parameters}

    def _name_of(self, parameter: nn.Parameter) -> str:
        group, place = self._engine.locate(parameter)
        name: str = self._engine.groups[group].names[place]
        return name

    def held_groups(self) -> list[tuple[list[str], dict[str, Any]]]:
        """For each parameter group the full names of its parameters, and its hyperparameters."""
        return [
            (
                [self._name_of(parameter) for parameter in originals],
                {key: value for key, value in group.items() if key != "params"},
            )
            for group, originals in zip(self.param_groups, self._originals, strict=True)
        ]

    def held_state(self) -> Iterator[HeldState]:
        """This rank's part of the state, under full names."""
        if self.kind is Kind.GLOBAL:
            yield from held_whole(self.optimizer, self.names)
            return
        for segment in self._segments:
            state = self.optimizer.state.get(segment.parameter, {})
            if not state:
                continue
            tensors, shared = divided(state, self._state_like(segment))
            pieces = list(self._pieces(segment))
            for name, extent, own in pieces:
                part = tensors if len(pieces) == 1 else {k: v[own] for k, v in tensors.items()}
                yield HeldState(name, extent, part, shared)

    def _state_like(self, segment: ParameterSegment) -> Tensor:
        """What per-element state of a segment has the shape of."""
        return segment.parameter

    def _pieces(self, segment: ParameterSegment) -> Iterator[tuple[str, Extent, slice]]:
        """A segment's parameters by full name: which elements, and where in the segment."""
        for place, start, stop, offset in segment.pieces():
            slot = segment.group.layout.slots[place]
            split = self.model.split_of(slot.name)
            shape = slot.shape if split is None else split.shape
            extent = Extent(shape, start, stop, split)
            yield slot.name, extent, slice(offset, offset + stop - start)

    @torch.inference_mode(mode=False)
    def receive(
        self, saved: Mapping[str, FullState], options: Sequence[Mapping[str, Any]]
    ) -> Reception:
        """Makes room for a state that is loaded, beside the one there is.

        Args:
            saved: What there is for each parameter by full name. Parameters that are not in it
                keep the state they have.
            options: The hyperparameters of each parameter group.
        """
        if self.kind is Kind.GLOBAL:
            return receive_whole(self.optimizer, self.names, saved, options)
        old = self._held_besides(saved)
        known = {**saved, **full_states(old)}
        segments = self._segments_for(known)
        wanted: list[tuple[str, Held]] = []
        rooms: dict[tuple[int, int], tuple[ParameterSegment, State]] = {}
        for settings, own in zip(options, self._segments_for(known, is_short=False), strict=True):
            for run in own:
                pieces = list(self._pieces(run))
                full = known.get(pieces[0][0], FullState())
                memory, state = fresh_state(full, self._state_like(run), settings)
                rooms |= {(run.group.index, place): (run, state) for place in run.places}
                wanted += [
                    (key, Held(name, extent, flat[part]))
                    for key, flat in memory.items()
                    for name, extent, part in pieces
                ]
        kept = {held.name for held in old}
        copy_held(old, [each for each in wanted if each[1].name in kept])
        missing = [each for each in wanted if each[1].name not in kept]
        states: dict[Tensor, State] = {}
        for segment in (segment for own in segments for segment in own):
            run, state = rooms[segment.group.index, segment.places[0]]
            if state:
                states[segment.parameter] = run.state_of_part(state, segment)
        return Reception(missing, lambda: self._accept(segments, states, options))

    def _held_besides(self, saved: Mapping[str, FullState]) -> list[HeldState]:
        """The state of parameters that nothing was saved for."""
        if saved.keys() >= set(self.names.values()):
            return []
        return [held for held in self.held_state() if held.name not in saved]

    def _segments_for(
        self, known: Mapping[str, FullState], *, is_short: bool = True
    ) -> list[list[ParameterSegment]]:
        def kind_of(which: int, group: FlatGroup, place: int) -> object:
            full = known.get(group.names[place], FullState())
            shared = [(key, comparable(value)) for key, value in sorted(full.shared.items())]
            return which, tuple(sorted(full.dtypes.items(), key=str)), tuple(shared)

        with self._segments.in_place():  # whose state says how they can be stepped
            return self._segments.cut(self._originals, kind_of, is_short=is_short)

    def _accept(
        self,
        segments: list[list[ParameterSegment]],
        states: Mapping[Tensor, State],
        options: Sequence[Mapping[str, Any]],
    ) -> None:
        self.optimizer.state.clear()
        self.optimizer.state.update(states)
        for group, settings in zip(self.param_groups, options, strict=True):
            group.update(settings)
        self._segments.adopt(segments)
        self._num_states = -1
        self._account()

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

    # Steps --------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step on this rank's memory; then everybody has the new parameters.

        Raises:
            MismatchError: If the ranks do not train alike, or their weights have drifted apart.
        """
        self._options.begin_step()
        self.supervision.check_options()
        with self._users_hooks(closure):
            loss = (
                self._step_everything(closure)
                if self.kind is Kind.GLOBAL
                else self._step_own_part(closure)
            )
        self._options.ignore_changes()
        self._engine.note_step()
        self.num_steps += 1
        return loss

    @contextlib.contextmanager
    def _users_hooks(self, closure: Callable[[], Any] | None) -> Iterator[None]:
        """Hooks that users hung on steps see the parameters, before and after, not segments."""
        before = self.optimizer._optimizer_step_pre_hooks
        after = self.optimizer._optimizer_step_post_hooks
        args: tuple[Any, ...] = () if closure is None else (closure,)
        others = {key: hook for key, hook in before.items() if hook != self._check_step}
        if not others and not after:
            yield
            return
        for hook in others.values():
            if hook(self, args, {}) is not None:
                raise ShoalError(
                    "a hook before a step must not replace the step's arguments: there are several "
                    "ranks that make the same step"
                )
        kept = dict(after)
        for key in others:
            del before[key]
        after.clear()
        try:
            yield
        finally:
            before.update(others)
            after.update(kept)
        for hook in kept.values():
            hook(self, args, {})

    def _step_own_part(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = self._mean(closure())
        self._engine.check_averaged(self.parameters)
        self._engine.adopt_gradients(self._num_averaged)
        self._check_ranks()
        for which, segment in self._segments.by_group():
            self._hand_out(which, segment)
        try:
            with self._engine.stepping(self.parameters), self._stepping():
                self._inner_step()
        finally:
            for segment in self._segments:
                segment.parameter.grad = None
        self._num_averaged = self._engine.num_averaged
        self._account()
        return loss

    def _check_ranks(self) -> None:
        """Now and then, when all gradients are there and nothing has been stepped yet."""
        if self is self.model.optimizers[0]:
            self._engine.check_step(self.num_steps + 1)

    @contextlib.contextmanager
    def _stepping(self) -> Iterator[None]:
        """Around a step of the user's optimizer."""
        is_global = self.kind is Kind.GLOBAL  # it steps the parameters themselves
        self._is_stepping = True
        try:
            with contextlib.nullcontext() if is_global else self._segments.in_place():
                yield
        finally:
            self._is_stepping = False

    def _check_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Refuses a step of the user's object that this one does not make."""
        if optimizer is self.optimizer and not self._is_stepping:
            raise ShoalError(
                "this optimizer was wrapped for several ranks: step the one that "
                "shoal.as_distributed(model, optimizer) returned instead"
            )

    def _inner_step(self) -> None:
        """The user's optimizer, on this rank's memory."""
        with self._kernels(), self.supervision.step(self._stepped_numbers):
            self.optimizer.step()

    def _stepped_numbers(self) -> list[int]:
        """For each tensor that is stepped, the number of its (first) parameter."""
        numbers = self._numbers_by_id()
        return [numbers[id(each.group.parameters[each.places[0]])] for each in self._segments]

    def _numbers_by_id(self) -> dict[int, int]:
        """Each parameter's number among all of the user's, by its id."""
        return {id(parameter): number for number, parameter in enumerate(self.parameters)}

    def _kernels(self) -> contextlib.AbstractContextManager[None]:
        """Around a step: which kernels make it."""
        may_fuse = self._may_fuse()
        return kernels.fused_where_free(self.optimizer) if may_fuse else contextlib.nullcontext()

    def _may_fuse(self) -> bool:
        """Not in mixed precision: a last bit of a master may be more in its copy."""
        return self._engine.settings.compute_dtype is None

    def _account(self) -> None:
        """Says how much memory the state takes, when there is more of it than before."""
        if len(self.optimizer.state) != self._num_states:
            self._num_states = len(self.optimizer.state)
            tensors = tree_leaves(list(self.optimizer.state.values()))
            held = sum(value.nbytes for value in tensors if isinstance(value, Tensor))
            self._engine.account.add("state", held - self._state_bytes)
            self._state_bytes = held

    def _step_everything(self, closure: Callable[[], Any] | None) -> Any:
        """Every rank makes the same step on everything."""

        def evaluate() -> Any:
            with self.supervision.outside_of_step():
                loss = self._mean(closure()) if closure is not None else None
                self._engine.gather_gradients(self._num_averaged)
            return loss

        if closure is None:
            evaluate()
            self._check_ranks()
        with self._engine.full_parameters(), self._stepping(), self.supervision.step():
            loss = self.optimizer.step(evaluate if closure is not None else None)
        with self._engine.hand_made.final():  # the step may have changed them, the same everywhere
            self._engine.hand_made.adopt()
        self._num_averaged = self._engine.num_averaged
        self._account()
        return loss

    def _mean(self, loss: Any) -> Any:
        """The loss of the whole batch: what a closure returns is this rank's."""
        if not isinstance(loss, Tensor):
            return loss
        return self._engine.backend.all_reduce(loss.detach().clone(), "average")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients of its parameters, or makes them zero."""
        self._engine.zero_gradients(self.parameters, set_to_none=set_to_none)

    def _hand_out(self, which: int, segment: ParameterSegment) -> None:
        """Gives a segment its gradient, if its parameters have one."""
        gradients = self._engine.gradients[segment.group.index]
        used = [place in gradients.used for place in segment.places]
        if any(used) and not all(used):
            for part in self._segments.divide(which, segment, used):
                self._hand_out(which, part)
            return
        buffer = gradients.own() if self._engine.sharding.optimizer else gradients.held()
        segment.show(buffer if used[0] else None)


def _refuse_state(*_: Any) -> NoReturn:
    raise ShoalError(
        "this optimizer was wrapped for several ranks, and this rank has a part of its state: save "
        "and load with the one that shoal.as_distributed(model, optimizer) returned instead"
    )
