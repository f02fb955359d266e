"""Compression of gradients and of gathers as users ask for it, and what it does not go with."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from shoal.compression import Choose, Codec, Quantize, RandomK, parse
from shoal.strategies.engine.engine import Engine
from shoal.strategies.settings import Compression, Sharding


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


def parse_gather_compression(
    compression: str | Codec | None, strategy: str, sharding: Sharding
) -> Quantize | None:
    """What parameters are gathered as; None for as they are.

    Raises:
        ValueError: If they cannot travel so, or do not travel at all.
    """
    if compression is None:
        return None
    if not sharding.optimizer:
        raise ValueError(
            "gather_compression= is for parameters that are gathered, under 'zero1', 'zero2', "
            f"'zero3' and 'fsdp'; {strategy!r} gathers none"
        )
    codec = compression if isinstance(compression, Codec) else _codec_named(compression)
    if not isinstance(codec, Quantize) or codec.bits != 8 or codec.stochastic:
        raise ValueError(
            'gather_compression must be "int8" or a Quantize(8) that rounds to the nearest; got '
            f"{compression!r}"
        )
    return codec


def _codec_named(name: str) -> Codec | None:
    try:
        return parse(name)
    except ValueError:
        return None


def compression_in_words(engine: Engine) -> Iterator[str]:
    """What is compressed and what that takes, for people; nothing where nothing is."""
    yield from _gathers_in_words(engine)
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


def _gathers_in_words(engine: Engine) -> Iterator[str]:
    codec = engine.settings.gather_codec
    if codec is None:
        return
    rounded = [group for group in engine.groups if group.rounding is not None]
    if not rounded:
        why = "one rank gathers none" if engine.shard_group.size == 1 else "there are no matrices"
        yield f"parameters are not gathered as {codec}: {why}"
        return
    count = sum(slot.shape.numel() for group in rounded for slot in group.layout.slots)
    how = f"{count:,} parameters are rounded to {codec} on all ranks, and their masters stepped"
    if engine.shard_group.shares_memory:
        yield f"{how}; ranks share memory, so that nothing is encoded to travel"
    else:
        yield f"{how}; they are gathered as {codec}"
