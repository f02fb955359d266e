"""The proof: a small copy's steps are followed, replayed on other values, and tried divided.

[Note: proof]
Following shows what a step does to the data of its parameters. Replaying shows that following has
seen all of it. Both look at the values of tensors; an optimizer may also count its parameters, or
add up their sizes. So the finest kind that is not ruled out is tried last: each parameter on its
own, and all of them in one row that is cut anywhere. No operation shows a count, and watching no
later step will find it, so these are many steps.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.optim.kinds import Kind
from shoal.optim.proof.following import FORGETS, Following, Level
from shoal.optim.proof.interception import SeededRun, Tape, intercepting
from shoal.optim.proof.judgement import Judgement, StepFinding
from shoal.optim.proof.small_copy import (
    Make,
    SampleData,
    Trained,
    maker,
    numbers_of,
    shapes_for,
    show,
)
from shoal.optim.stepping.streams import Streams
from shoal.torch_internals.trees import tree_leaves
from shoal.torch_support.random_state import RandomState

# Of gradients: of usual size, and far from it, first one way and then the other.
_SCALES = (1.0, 300.0, 1e-3)
_OTHER_SCALES = (1e-3, 1.0, 300.0)
_SEED = 0
# What dividing may change: kernels round the last few elements of a tensor in another way.
_ROUNDING = 1e-6
# More than what is usually left for later: warm-up, and what is done every so many steps.
_NUM_TRIED_STEPS = 60
_NO_STATE = ("param_groups", "state", "defaults")


def prove(
    optimizer: Optimizer, group: dict[str, Any], parameters: Sequence[nn.Parameter]
) -> Judgement:
    """What one parameter group of an optimizer may be divided into; see [Note: proof].

    ``parameters`` are those of the group as the user has them, for their shapes and dtypes.
    """
    outside = RandomState.capture()
    try:
        with torch.inference_mode(mode=False), torch.enable_grad():
            return _Proof(maker(optimizer, group), parameters).judgement()
    except Exception as error:
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        return Judgement(
            Kind.GLOBAL, f"a small copy of it could not be built and stepped ({why})", may_draw=True
        )
    finally:
        outside.restore()


class _Proof(Following):
    """One small copy, and what it is found to do."""

    def __init__(self, make: Make, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self._make = make
        shapes = shapes_for(parameters)
        dtype = parameters[0].dtype if parameters else torch.get_default_dtype()
        self._data = SampleData.drawn(shapes, dtype, 0, _SCALES)
        self._other_data = SampleData.drawn(shapes, dtype, 1, _OTHER_SCALES)
        self._findings: dict[Kind, StepFinding] = {}
        self._tape = Tape(Streams(_SEED))
        self._draws = self._has_changed_generators = False
        self._inputs: list[int] = []

    def found(self, finding: StepFinding) -> None:
        """The first that rules a kind out says why."""
        self._draws |= "draw" in finding.what
        self._findings.setdefault(finding.finest, finding)

    def judgement(self) -> Judgement:
        """All of it."""
        parameters = self._data.start()
        optimizer, written = self._record(parameters)
        self._replay(Trained.of(optimizer, parameters), optimizer)
        self._look_aside(optimizer)
        kind, reason = self._tried(*self._followed())
        return Judgement(
            kind,
            reason,
            is_watched=kind is not Kind.GLOBAL,
            draws=self._draws,
            may_draw=True,
            written_options=written,
            marked_state=self._marked_state(optimizer, parameters),
        )

    def _rule_out(self, finest: Kind, what: str) -> None:
        self._findings.setdefault(finest, StepFinding(finest, what, ""))

    # Following ----------------------------------------------------------------------------

    def _record(self, parameters: list[nn.Parameter]) -> tuple[Optimizer, frozenset[str]]:
        streams = Streams(_SEED)
        self._tape = Tape(streams)
        self._inputs += [self._tape.number_of(parameter) for parameter in parameters]
        memory = [parameter.data_ptr() for parameter in parameters]
        self.begin(parameters, [[] for _ in parameters])
        with intercepting(self, self._tape.run):
            optimizer = self._make(parameters)
        before = dict(numbers_of(optimizer))
        for gradients in self._data.gradients:
            self._record_step(optimizer, parameters, gradients, streams)
        if memory != [parameter.data_ptr() for parameter in parameters]:
            self._rule_out(Kind.GLOBAL, "its step gives parameters other memory")
        after = dict(numbers_of(optimizer))
        return optimizer, frozenset(name for name in after if after[name] != before.get(name))

    def _record_step(
        self,
        optimizer: Optimizer,
        parameters: list[nn.Parameter],
        gradients: Sequence[Tensor],
        streams: Streams,
    ) -> None:
        show(parameters, gradients)
        own = [parameter.grad for parameter in parameters]
        self._inputs += [self._tape.number_of(gradient) for gradient in own]  # type: ignore[arg-type]
        self.expect_only([*parameters, *own, *_held(tree_leaves(dict(optimizer.state)))])  # type: ignore[list-item]
        self.begin(parameters, [[gradient] for gradient in own])  # type: ignore[list-item]
        self._tape.next_step()
        with streams.step():
            before = _other_generators()
            with intercepting(self, self._tape.run):
                optimizer.step()
            if before != _other_generators():
                self._draws = True
                self._rule_out(Kind.GLOBAL, "its step draws random numbers with Python or numpy")
        if any(parameter.grad is None for parameter in parameters):
            self._rule_out(Kind.GLOBAL, f"its step {FORGETS}")

    def _followed(self) -> tuple[Kind, str]:
        for kind in (Kind.GLOBAL, Kind.PER_PARAMETER):
            if kind in self._findings:
                return kind, str(self._findings[kind])
        return Kind.ELEMENT_WISE, "nothing in its steps looks beyond an element"

    def _marked_state(
        self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]
    ) -> dict[str, bool]:
        marked: dict[str, bool] = {}
        for parameter in parameters:
            for name, value in optimizer.state.get(parameter, {}).items():
                leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
                marks = [self.marks.find(leaf) for leaf in leaves]
                has_data = any(mark and mark.level is Level.DATA for mark in marks)
                marked[name] = marked.get(name, False) or has_data
        return marked

    def _look_aside(self, optimizer: Optimizer) -> None:
        """What is not in the state is not cut where parameters are, nor saved or loaded."""
        for name, value in vars(optimizer).items():
            if name not in _NO_STATE and any(map(self.marks.find, _tensors(tree_leaves(value)))):
                what = f"its step keeps data of parameters in `{name}`, outside of its state"
                self._rule_out(Kind.GLOBAL, what)
        leaves = tree_leaves(dict(optimizer.state))
        within = _held([leaf for leaf in leaves if not isinstance(leaf, Tensor)])
        if any(map(self.marks.find, within)):
            what = "its step keeps data of a parameter in an object, which cannot be cut"
            self._rule_out(Kind.PER_PARAMETER, what)

    # Replaying ----------------------------------------------------------------------------

    def _replay(self, recorded: Trained, optimizer: Optimizer) -> None:
        data = self._other_data
        tensors = [*data.values, *(each for step in data.gradients for each in step)]
        inputs = {n: t.clone() for n, t in zip(self._inputs, tensors, strict=True)}
        real = self._train(data)
        with torch.no_grad():
            values = self._tape.replay(inputs, Streams(_SEED))
        replayed = [values[number] for number in self._inputs[: len(data.values)]]
        replayed += [values[self._tape.number_of(leaf)] for leaf in _tensors(recorded.state)]
        if recorded.numbers != real.numbers or _numbers(recorded.state) != _numbers(real.state):
            self._rule_out(Kind.GLOBAL, "its step keeps a number that depends on the data")
        elif not _are_same([*real.parameters, *_tensors(real.state)], replayed, rounding=0):
            self._rule_out(
                Kind.GLOBAL, "its step does something that torch's operations do not show"
            )

    def _train(self, data: SampleData, numbers: Sequence[int] | None = None) -> Trained:
        """Steps for real; only draws are seen to, where there are any."""
        streams, following, parameters = Streams(_SEED), Following(), data.start()

        def seeing_to_draws() -> contextlib.AbstractContextManager[None]:
            if not self._draws:
                return contextlib.nullcontext()
            return intercepting(following, SeededRun(streams, numbers))

        following.begin(parameters, [[] for _ in parameters])
        with seeing_to_draws():
            optimizer = self._make(parameters)
        for gradients in data.gradients:
            show(parameters, gradients)
            following.begin(parameters, [[parameter.grad] for parameter in parameters])  # type: ignore[list-item]
            with streams.step(), seeing_to_draws():
                optimizer.step()
        return Trained.of(optimizer, parameters)

    # Trying -------------------------------------------------------------------------------

    def _tried(self, kind: Kind, reason: str) -> tuple[Kind, str]:
        """Is there anything left that a division changes?"""
        if kind is Kind.GLOBAL:
            return kind, reason
        data = self._data.repeated(_NUM_TRIED_STEPS)
        together = self._train(data)
        apart = [
            self._train(data.only(which), [which]).parameters[0]
            for which in range(len(data.values))
        ]
        if not _are_same(together.parameters, apart, rounding=_ROUNDING):
            return Kind.GLOBAL, "stepping each parameter on its own gives another result"
        if kind is Kind.ELEMENT_WISE and not self._may_be_cut(data, together):
            return Kind.PER_PARAMETER, "stepping parameters cut into pieces gives another result"
        return kind, reason

    def _may_be_cut(self, data: SampleData, together: Trained) -> bool:
        try:
            cut = self._train(data.cut()).parameters
        except Exception:  # some refuse tensors that are not matrices
            return False
        rows = [torch.cat([each.reshape(-1) for each in tensors]) for tensors in (
            together.parameters, cut
        )]  # fmt: skip
        return _are_same(rows[:1], rows[1:], rounding=_ROUNDING)


def _other_generators() -> tuple[Any, Any]:
    name, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), (name, keys.tobytes(), rest)  # type: ignore[union-attr]


def _tensors(leaves: Sequence[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _held(values: Sequence[Any], depth: int = 4) -> Iterator[Tensor]:
    """Tensors among values, and in objects among them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif depth and hasattr(value, "__dict__") and not isinstance(value, type):
            yield from _held(tree_leaves(dict(vars(value))), depth - 1)


def _numbers(leaves: Sequence[Any]) -> list[Any]:
    return [leaf for leaf in leaves if isinstance(leaf, bool | int | float | str)]


def _are_same(left: Sequence[Tensor], right: Sequence[Tensor | None], *, rounding: float) -> bool:
    return len(left) == len(right) and all(
        b is not None and a.shape == b.shape and _is_same(a, b, rounding)
        for a, b in zip(left, right, strict=True)
    )


def _is_same(left: Tensor, right: Tensor, rounding: float) -> bool:
    if rounding and left.is_floating_point():
        rounding = max(rounding, 4 * torch.finfo(left.dtype).eps)
        size = left.detach().abs().nan_to_num().max() if left.numel() else torch.zeros(())
        return torch.allclose(left, right, rtol=0, atol=rounding * float(size), equal_nan=True)
    return torch.equal(left.nan_to_num(), right.nan_to_num())
