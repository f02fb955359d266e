"""`GradientCompressionOptimizer`: any optimizer, on gradients that travel compressed."""

from __future__ import annotations

from typing import Any, Self

from torch.optim import Optimizer

from shoal.compression import Codec, parse
from shoal.errors import ShoalError
from shoal.optim.kinds import Kind
from shoal.optim.optimizer import ShardedOptimizer
from shoal.optim.proof.judgement import Judgement
from shoal.optim.registry import PAIRS
from shoal.strategies.compressing import parse_compression
from shoal.strategies.model import ShardedModel
from shoal.strategies.options import check_options


class GradientCompressionOptimizer(ShardedOptimizer):
    """Steps as the strategy's own optimizer does, and compresses the gradients of its model.

    It is one of the strategy's own class, too: of `DDPOptimizer`, say. The same is said by
    ``as_distributed(..., compression=...)``.

    Example:
        >>> model = DDPModel(module)
        >>> optimizer = GradientCompressionOptimizer(
        ...     torch.optim.AdamW(module.parameters()), model, compression="powersgd:2"
        ... )
    """

    def __new__(cls, optimizer: Optimizer, model: ShardedModel, *_: Any, **__: Any) -> Self:
        """One that also is what goes with the model."""
        if not isinstance(model, ShardedModel):
            raise TypeError(
                f"{cls.__name__} goes with a wrapped model: wrap it first, for example as "
                f"shoal.strategies.DDPModel(module); got a {type(model).__name__}"
            )
        joined: type[Self] = _joined(cls, PAIRS[model.strategy].optimizer)
        return super().__new__(joined)

    def __init__(
        self,
        optimizer: Optimizer,
        model: ShardedModel,
        compression: str | Codec = "int8",
        error_feedback: bool = True,
        warmup_steps: int = 0,
        *,
        kind: Kind | str | Judgement | None = None,
    ) -> None:
        """Compresses the gradients of the model from now on.

        Args:
            optimizer: The user's.
            model: The wrapped model whose parameters it has.
            compression: See `shoal.compression.parse`.
            error_feedback: Whether what compression leaves out is added to the next gradients.
            warmup_steps: How many steps are made with uncompressed gradients first.
            kind: See `ShardedOptimizer`.
        """
        self._pair(optimizer, model)
        if model.engine.settings.compression is not None:
            raise ShoalError(
                "the model's gradients are compressed already: leave out compression= where it is "
                "wrapped, or take the strategy's own optimizer"
            )
        codec = parse(compression)
        asked: dict[str, object] = {"compression": codec, "error_feedback": error_feedback}
        if warmup_steps:
            asked["compression_warmup"] = warmup_steps
        check_options(asked, model.strategy, {name: pair.model for name, pair in PAIRS.items()})
        wanted = parse_compression(
            codec, model.module, error_feedback=error_feedback, warmup_steps=warmup_steps
        )
        assert wanted is not None
        self._compare(model, vars(wanted))
        model.compress(wanted, "GradientCompressionOptimizer")
        super().__init__(optimizer, model, kind=kind)


_JOINED: dict[tuple[type, type], Any] = {}


def _joined(cls: type, partner: type) -> Any:
    """One class that is both."""
    if (cls, partner) not in _JOINED:
        content = {"__module__": cls.__module__, "__doc__": cls.__doc__}
        _JOINED[cls, partner] = type(cls.__name__, (cls, partner), content)
    return _JOINED[cls, partner]
