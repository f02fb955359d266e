"""How the steps of one optimizer are taken: watched, with random streams and users' hooks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.errors import ShoalError
from shoal.optim.proof.judgement import Judgement
from shoal.optim.proof.judging import judge
from shoal.optim.proof.watching import Watch, WatchedHyperparameters
from shoal.optim.stepping.streams import Streams
from shoal.torch_internals.optimizers import hooks_after_step, hooks_before_step


class Supervision:
    """What the kind of an optimizer was decided by, and what follows from it in each step."""

    def __init__(
        self,
        optimizer: Optimizer,
        judgement: Judgement,
        *,
        parameters: Sequence[Sequence[nn.Parameter]],
        numbers: Mapping[int, int] | None = None,
        seed: int | None = None,
        on_violation: Callable[[], None] = lambda: None,
    ) -> None:
        """Begins.

        Args:
            optimizer: The user's.
            judgement: What was decided about it.
            parameters: Those of each group as the user has them.
            numbers: Each parameter's number among all of the user's, by its id.
            seed: The base seed of what it draws; None if it draws nothing.
            on_violation: Called in the middle of a step that must not go on.
        """
        self.judgement = judgement
        self.optimizer, self.parameters, self._numbers = optimizer, parameters, numbers
        self.streams = None if seed is None else Streams(seed)
        self._watch = self._options = None
        self.is_stepping = False
        draws_for_parameters = judgement.draws and judgement.kind.is_divisible
        if judgement.is_watched or draws_for_parameters:
            self._watch = Watch(optimizer, judgement, on_violation)
        if judgement.is_watched:
            self._options = WatchedHyperparameters(optimizer, judgement)

    def check_options(self) -> None:
        """Raises, before anything is stepped, if changed options make the kind wrong."""
        if self._options is None or not self._options.have_changed():
            return
        now, then = judge(self.optimizer, self.parameters), self.judgement
        if then.kind.is_finer_than(now.kind):
            self._options.keep_asking()
            raise ShoalError(
                f"{type(self.optimizer).__name__} was {then.kind} when it was wrapped and is "
                f"{now.kind} with the options it has now: {now.reason}. Nothing has been stepped. "
                f"Give it these options before it is wrapped, or wrap it with "
                f'kind="{now.kind}"'
            )

    @contextlib.contextmanager
    def step(self, stepped: Callable[[], Iterable[Tensor]] | None = None) -> Iterator[None]:
        """Around the optimizer's own step.

        ``stepped`` gives the user's parameter for each tensor that the optimizer has, where these
        are not the user's parameters themselves.
        """
        with contextlib.ExitStack() as stack:
            self.is_stepping = True
            stack.callback(setattr, self, "is_stepping", False)
            if self.streams is not None:
                stack.enter_context(self.streams.step())
            if self._watch is not None:
                numbers = None
                if stepped is not None and self.streams is not None and self._numbers is not None:
                    numbers = [self._numbers[id(parameter)] for parameter in stepped()]
                stack.enter_context(self._watch.step(self.streams, numbers))
            yield

    def outside_of_step(self) -> contextlib.AbstractContextManager[None]:
        """Around a closure that a step calls: what it draws is none of the optimizer's."""
        streams = self.streams
        is_in_step = streams is not None and streams.is_in_step
        return streams.outside() if streams and is_in_step else contextlib.nullcontext()

    def seed(self, seed: int) -> None:
        """What it draws from now on begins with this seed."""
        if self.streams is not None:
            self.streams = Streams(seed)


@contextlib.contextmanager
def users_hooks(
    optimizer: Optimizer,
    wrapped: Optimizer,
    closure: Callable[[], Any] | None,
    *,
    own: Callable[..., Any],
) -> Iterator[None]:
    """Around a step: users' hooks see the parameters, before and after, not what is stepped.

    They are called with ``wrapped``, once for the step of all ranks. ``own`` is a hook that is not
    the user's, and stays.
    """
    before = hooks_before_step(optimizer)
    after = hooks_after_step(optimizer)
    others = {key: hook for key, hook in before.items() if hook != own}
    if not others and not after:
        yield
        return
    args: tuple[Any, ...] = () if closure is None else (closure,)
    for hook in others.values():
        if hook(wrapped, args, {}) is not None:
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
        hook(wrapped, args, {})
