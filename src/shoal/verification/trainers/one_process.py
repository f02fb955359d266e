"""One process: on the whole batch, or replaying the ranks' local batches one after the other."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.compression import Codec
from shoal.optim.proof.judging import judge
from shoal.optim.stepping.kernels import fused_where_free
from shoal.optim.stepping.supervision import Supervision
from shoal.strategies.layers.precision import Precision
from shoal.strategies.training import call_module, count_items
from shoal.torch_internals.modules import with_parameters
from shoal.torch_internals.trees import tree_map
from shoal.torch_support.random_state import RandomStream
from shoal.verification.trainers.trainer import Batch, Build, Observed, Setup, Trainer, share

BUILD_SEED = 0
_TRAIN_SEED = 1
_SIXTEEN_BIT = (torch.float16, torch.bfloat16)


def rank_stream(rank: int, variation: int = 0) -> RandomStream:
    """What a rank draws from while it trains; one process draws as rank 0 would."""
    return RandomStream(_TRAIN_SEED + rank + 1_000_003 * variation)


class WholeBatch(Trainer):
    """One process on the whole batch."""

    def __init__(
        self,
        build: Build,
        num_steps: int,
        *,
        variation: int = 0,
        compute_dtype: torch.dtype | None = None,
        gather_codec: Codec | None = None,
    ) -> None:
        """Another ``variation`` trains the same model with other random numbers."""
        with RandomStream(BUILD_SEED).drawing():
            self.setup = Setup.build(build, num_steps)
        self._stream = rank_stream(0, variation)
        self._supervisions = {id(each): _supervise(each) for each in self.setup.optimizers}
        self._narrow = _RoundedModel(self.setup.model, compute_dtype, gather_codec)

    def compute(self, step: int) -> Tensor:
        """Forward and backward of the whole batch."""
        with self._stream.drawing(), self._narrow.computing():
            loss = self._loss(self.setup.batches[step])
            loss.backward()
        return loss.detach()

    def _loss(self, batch: Batch) -> Tensor:
        output = call_module(self._narrow, self.setup.model, batch[0])
        return self.setup.loss_fn(output, batch[1])

    def gradients(self) -> Iterator[Observed]:
        """Each is measured against the largest of all: noise comes in that size."""
        named = [(name, p.grad) for name, p in self.setup.model.named_parameters()]
        sizes = [float(g.detach().abs().max()) for _, g in named if g is not None and g.numel()]
        for name, gradient in named:
            yield Observed("gradient", name, gradient, max(sizes, default=1.0))

    def parameters(self) -> Iterator[Observed]:
        """The parameters as they are after the last update."""
        for name, parameter in self.setup.model.named_parameters():
            yield Observed("parameter", name, parameter.detach())

    def update(self, step: int) -> None:
        """The optimizers' step."""
        with self._stream.drawing():
            super().update(step)

    def stepping(self, optimizer: Optimizer) -> contextlib.AbstractContextManager[None]:
        """Around a step: the optimizer draws from the streams that ranks have."""
        supervision = self._supervisions[id(optimizer)]
        return contextlib.nullcontext() if supervision is None else supervision.step()

    def to_double(self) -> None:
        """Goes on in float64, where rounding does not matter."""
        self.setup.model.double()
        self.setup.batches = [_double(batch) for batch in self.setup.batches]


def _supervise(optimizer: Optimizer) -> Supervision | None:
    judgement = judge(optimizer)
    if not judgement.may_draw:
        return None
    parameters = [group["params"] for group in optimizer.param_groups]
    return Supervision(optimizer, judgement, parameters=parameters, seed=BUILD_SEED)


class SplitBatch(WholeBatch):
    """One process that replays the ranks' local batches and averages in rank order."""

    def __init__(
        self,
        build: Build,
        num_steps: int,
        num_ranks: int,
        *,
        weight: Callable[[Any, Any], Any] | None = None,
        variation: int = 0,
        compute_dtype: torch.dtype | None = None,
        averages_buffers: bool = False,
        gather_codec: Codec | None = None,
    ) -> None:
        """Each local batch has the random numbers that its rank would have."""
        super().__init__(
            build,
            num_steps,
            variation=variation,
            compute_dtype=compute_dtype,
            gather_codec=gather_codec,
        )
        self._streams = [rank_stream(rank, variation) for rank in range(num_ranks)]
        self._weight, self._averages_buffers = weight, averages_buffers
        is_rounded = compute_dtype is not None or gather_codec is not None
        self._kernels = contextlib.nullcontext if is_rounded else fused_where_free

    def compute(self, step: int) -> Tensor:
        """Forward and backward of each rank's rows, all from the same parameters and buffers."""
        num_ranks = len(self._streams)
        batches = [share(self.setup.batches[step], rank, num_ranks) for rank in range(num_ranks)]
        weights = [self._weigh(*batch) for batch in batches]
        losses: list[tuple[Tensor, float]] = []
        total = self._adding_up()
        buffers = _Buffers(self.setup.model, self._averages_buffers)
        for rank, batch in enumerate(batches):
            if weights[rank]:
                buffers.rewind()
                with self._streams[rank].drawing(), self._narrow.computing():
                    loss = self._loss(batch)
                    (loss * _factor(loss, weights[rank] * num_ranks / sum(weights))).backward()
                losses.append((loss.detach(), weights[rank]))
                total.add()
                buffers.remember()
        buffers.finish()
        total.finish(num_ranks)
        return _mean(losses)

    def _adding_up(self) -> GradientSum:
        return GradientSum(self.setup.model)

    def _weigh(self, inputs: Any, targets: Any) -> float:
        return count_items(inputs) if self._weight is None else float(self._weight(inputs, targets))

    def update(self, step: int) -> None:
        """The optimizers' step, with the kernels that ranks use."""
        with contextlib.ExitStack() as stack:
            for optimizer in self.setup.optimizers:
                stack.enter_context(self._kernels(optimizer))
            super().update(step)


def _factor(loss: Tensor, factor: float) -> Tensor:
    """Rounded as the ranks round it."""
    return torch.tensor(factor, dtype=torch.float64).to(loss.dtype).to(loss.device)


def _mean(losses: Sequence[tuple[Tensor, float]]) -> Tensor:
    """Of losses and their weights: added in rank order, in float64, as ranks do."""
    first, _ = losses[0]
    total = torch.zeros((), dtype=torch.float64, device=first.device)
    for loss, weight in losses:
        total = total + loss.double() * weight
    return (total / sum(weight for _, weight in losses)).to(first.dtype)


class GradientSum:
    """Gradients of several local batches, added in rank order and then divided, once."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Of no batch yet."""
        self._model = model
        self._sums: dict[str, Tensor] = {}
        model.zero_grad()

    def add(self) -> None:
        """Takes the gradients of one more; sixteen-bit ones are added in float32, as ranks do."""
        for name, parameter in self._model.named_parameters():
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None:
                wide = gradient.float() if gradient.dtype in _SIXTEEN_BIT else gradient
                self._sums[name] = self._sums[name] + wide if name in self._sums else wide

    def finish(self, num_ranks: int) -> None:
        """Gives the model the average."""
        for name, parameter in self._model.named_parameters():
            if name in self._sums:
                parameter.grad = self._sums[name].div(num_ranks).to(parameter.dtype)


class _Buffers:
    """Running statistics and the like: every rank begins a step with rank 0's, or the average."""

    def __init__(self, model: torch.nn.Module, averages: bool = False) -> None:
        self._buffers, self._averages = list(model.buffers()), averages
        self._begin = [buffer.clone() for buffer in self._buffers]
        self._seen: list[list[Tensor]] = []

    def rewind(self) -> None:
        self._set(self._begin)

    def remember(self) -> None:
        if self._averages or not self._seen:
            self._seen.append([buffer.clone() for buffer in self._buffers])

    def finish(self) -> None:
        if self._averages and self._seen:
            self._set([average_buffer(of_ranks) for of_ranks in zip(*self._seen, strict=True)])
        else:
            self._set(self._seen[0] if self._seen else self._begin)

    def _set(self, values: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for buffer, value in zip(self._buffers, values, strict=True):
                buffer.copy_(value)


def average_buffer(of_ranks: Sequence[Tensor]) -> Tensor:
    """The average of floating numbers; of other numbers the first rank's."""
    first = of_ranks[0]
    if not first.is_floating_point():
        return first
    # In rank order and from the first one's, as ranks do it.
    apart = torch.zeros_like(first, dtype=torch.float64)
    for each in of_ranks:
        apart = apart + torch.where(each == first, 0, each.double() - first.double())
    return (first.double() + apart / len(of_ranks)).to(first.dtype)


def _double(batch: Batch) -> Batch:
    def widen(leaf: object) -> object:
        is_float = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.double() if is_float else leaf  # type: ignore[attr-defined]

    return tree_map(widen, batch[0]), tree_map(widen, batch[1])


class _RoundedModel:
    """A model that computes with other parameters than it has, as ranks do.

    They are narrower, matrices are what an 8-bit payload stands for, or both.
    """

    def __init__(
        self, model: nn.Module, compute_dtype: torch.dtype | None, gather_codec: Codec | None
    ) -> None:
        self._model, self._codec = model, gather_codec
        self._is_narrow = compute_dtype is not None
        self._precision = Precision(model, compute_dtype)
        self._precision.install(model)

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Around forward and backward: backward may call parts of the model again."""
        if not self._is_narrow and self._codec is None:
            yield
            return
        rounded = {name: self._rounded(p) for name, p in self._model.named_parameters()}
        with with_parameters(self._model, rounded):
            yield

    def _rounded(self, parameter: nn.Parameter) -> Tensor:
        narrow = parameter.to(self._precision.dtype_of(parameter) or parameter.dtype)
        if self._codec is None or parameter.dim() < 2 or not parameter.is_floating_point():
            return narrow
        rounded: Tensor = _Rounded.apply(narrow, self._codec)  # type: ignore[no-untyped-call]
        return rounded

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_narrow:
            args, kwargs = self._precision.narrowed((args, kwargs))
        return self._precision.widened(self._model(*args, **kwargs))


class _Rounded(torch.autograd.Function):
    """What a codec makes of a tensor; the gradient is that of the tensor."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, codec: Codec) -> Tensor:
        return codec.decode(codec.encode(values))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None
