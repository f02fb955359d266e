"""Compression of gradients as users ask for it, and what it does not go with."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from shoal.compression import Choose, Codec, RandomK, parse
from shoal.strategies.engine.engine import Engine
from shoal.strategies.settings import Compression


def parse_compression(
    compression: str | Codec | None, module: nn.Module, *, error_feedback: bool, warmup_steps: int
) -> Compression | None:
    """What a user's options mean for a module; None for uncompressed gradients.

    Raises:
        ValueError: If they do not go together, or not with the module.
    """
    if compression is None:
        if warmup_steps:
            raise ValueError(
                "compression_warmup= is for compressed gradients: say compression= too, for "
                'example compression="int8"'
            )
        return None
    codec = parse(compression)
    if error_feedback:
        _refuse_enlarged(codec)
    for name, parameter in module.named_parameters():
        if parameter.is_complex():
            raise ValueError(
                f"{name} is complex, and compression is for real gradients: leave out compression=,"
                " or keep real and imaginary parts as two parameters"
            )
    return Compression(codec, error_feedback, warmup_steps)


def _refuse_enlarged(codec: Codec) -> None:
    inner = [codec]
    if isinstance(codec, Choose):
        inner = [codec.codec, codec.small, codec.vectors or codec.codec, *codec.names.values()]
    if any(isinstance(each, RandomK) and each.unbiased for each in inner):
        raise ValueError(
            "RandomK(unbiased=True) makes what it keeps larger, and error feedback would add what "
            "it left out besides: say unbiased=False, or error_feedback=False"
        )


def check_replicas(num_replicas: int) -> None:
    """Raises where shards are averaged once more, over their copies."""
    if num_replicas > 1:
        raise ValueError(
            "compression= does not go with replica=: the shards would be compressed, but their "
            "average over the replicas would not. Leave out one of both"
        )


def compression_in_words(engine: Engine) -> Iterator[str]:
    """How gradients are compressed and what that takes, for people; nothing if they are not."""
    compression = engine.settings.compression
    if compression is None:
        return
    if engine.gradients.exchanges is None:
        yield f"gradients are not compressed to {compression.codec}: one rank sends none"
        return
    about = f"gradients are compressed to {compression.codec}"
    if compression.warmup_steps:
        about += f" after {compression.warmup_steps} steps"
    if not compression.error_feedback:
        yield f"{about}, without error feedback: what is left out is lost"
        return
    num_bytes = sum(g.layout.num_elements * g.master_dtype.itemsize for g in engine.groups)
    yield f"{about}; what is left out takes {num_bytes:,} bytes on every rank"
