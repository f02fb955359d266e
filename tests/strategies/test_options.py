"""Options that a strategy does not have, or not with this value: what is said of them."""

from __future__ import annotations

import numpy as np
import pytest
from torch import nn

import shoal
from shoal.optim import PAIRS
from shoal.strategies.options import check_options, options_of

MODELS = {name: pair.model for name, pair in PAIRS.items()}


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


@pytest.mark.parametrize(
    ("strategy", "option", "words"),
    [
        ("ddp", "find_unused_parameters", "'ddp' has no option 'find_unused_parameters': param"),
        ("ddp", "broadcast_buffers", "average_buffers=True"),
        ("fsdp", "ignored_params", "requires_grad_"),
        ("fsdp", "ignored_modules", "requires_grad_"),
        ("zero3", "reshard_after_forward", "'zero2' keeps them"),
        ("zero2", "mixed_precison", "did you mean 'mixed_precision'"),
        ("zero2", "sequence_parallel", "it is one of 'tensor'"),
        ("ddp", "stage", "choose strategy='zero1'"),
        ("tensor", "colour", "It has tensor, data, zero"),
    ],
)  # fmt: skip
def test_options_that_there_are_not(strategy, option, words) -> None:
    with pytest.raises(TypeError, match=words):
        shoal.run(
            lambda: shoal.as_distributed(build(), strategy=strategy, **{option: 1}), 1, "memory"
        )


def test_options_that_there_are() -> None:
    assert "average_buffers" in options_of(PAIRS["ddp"][0])
    assert {"tensor", "zero", "seed", "replica"} <= set(options_of(PAIRS["tensor"][0]))
    assert {"pipeline", "micro_batches", "tensor"} <= set(options_of(PAIRS["hybrid"][0]))


@pytest.mark.parametrize(
    ("option", "value", "error", "words"),
    [
        ("check_every", "often", TypeError, "'check_every' must be a whole number; got 'often'"),
        ("check_every", 0.5, TypeError, "'check_every' must be a whole number; got 0.5"),
        ("check_every", True, TypeError, "'check_every' must be a whole number; got True"),
        ("check_every", -1, ValueError, "'check_every' must not be negative; got -1"),
        ("average_buffers", "no", TypeError, "'average_buffers' must be True or False; got 'no'"),
        ("average_buffers", 1, TypeError, "'average_buffers' must be True or False; got 1"),
        ("enabled", "false", TypeError, "'enabled' must be True or False; got 'false'"),
        ("min_group_bytes", "1", TypeError, "'min_group_bytes' must be a whole number or None"),
        ("prefetch_bytes", -1, ValueError, "'prefetch_bytes' must not be negative; got -1"),
        ("resident_below", -3, ValueError, "'resident_below' must not be negative; got -3"),
    ],
)  # fmt: skip
def test_options_of_another_type(option, value, error, words) -> None:
    with pytest.raises(error, match=words):
        shoal.run(lambda: shoal.as_distributed(build(), **{option: value}), 1, "memory")


def test_types_of_all_options_are_known() -> None:
    options = {name for pair in PAIRS.values() for name in options_of(pair.model)}
    check_options({"plan": {"0": "column"}, "tensor": 1, "seed": -1}, "tensor", MODELS)
    check_options({"cut": ["0"], "balance": {"0": 1.0}, "data": None}, "pipeline", MODELS)
    check_options({"min_group_bytes": np.int64(3), "check_every": 0}, "ddp", MODELS)
    assert {"check_every", "plan", "micro_batches"} <= options
