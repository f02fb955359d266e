"""What tensor parallelism costs: bytes and calls of a step, and memory, against theory.

A block of attention and feed-forward takes two sums of its activations in forward and two of their
gradients in backward. With t ranks a rank holds a t-th of what is split.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shoal
from strategies.models import GPT, random_tokens
from strategies.tensor.tasks import WIDTH, Encoder, padded, padded_loss

LAYERS, VOCABULARY, ITEMS, LENGTH, FLOAT = 3, 30, 4, 6, 8
HIDDEN = ITEMS * LENGTH * WIDTH * FLOAT


class Log:
    """What runs in a group: operations, and bytes of each."""

    def __init__(self, group: Any) -> None:
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self._run, self._group = group.run, group
        group.run = self._note

    def _note(self, operation: Any, **options: Any) -> Any:
        before = self._group.stats()
        result = self._run(operation, **options)
        for name, counter in self._group.stats().items():
            old = before.get(name)
            calls = counter.calls - (old.calls if old else 0)
            self.calls[name] += calls
            self.bytes[name] += counter.num_bytes - (old.num_bytes if old else 0)
        return result


def make() -> nn.Module:
    torch.manual_seed(0)
    return GPT(VOCABULARY, WIDTH, LAYERS).double()


def step(model: Any, optimizer: Any) -> None:
    tokens = random_tokens(0, VOCABULARY, ITEMS, LENGTH)
    F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_calls_and_bytes_of_a_step() -> None:
    def measure() -> tuple[Counter[str], Counter[str]]:
        module = make()
        optimizer: Any = torch.optim.AdamW(module.parameters())
        model, optimizer = shoal.as_distributed(module, optimizer, strategy="tensor", check_every=0)
        step(model, optimizer)
        log = Log(model.tensor_group)
        step(model, optimizer)
        return log.calls, log.bytes

    sums = 1 + 2 * LAYERS + 2 * LAYERS + 1  # embedding, blocks forward and backward, head
    for calls, num_bytes in shoal.run(measure, 2, "memory", timeout=40):
        # One gather is of the logits, the other has the generator's state and the fingerprints; the
        # ranks meet once for the step.
        assert +calls == {"all_reduce": sums, "all_gather": 2, "barrier": 1}
        assert num_bytes["all_reduce"] == sums * HIDDEN
        assert 0 < num_bytes["all_gather"] - ITEMS * LENGTH * VOCABULARY * FLOAT < 6000


def test_a_sequence_parallel_step_moves_as_much() -> None:
    def measure(sequence_parallel: bool) -> Counter[str]:
        torch.manual_seed(0)
        model = shoal.as_distributed(
            Encoder().double(), strategy="tensor", sequence_parallel=sequence_parallel
        )
        log = Log(model.tensor_group)
        padded_loss(model, padded(0, ITEMS)).backward()
        return log.bytes

    def wire(moved: Counter[str]) -> float:
        """What a rank sends over a ring; what is counted is the whole of each operation."""
        return moved["all_gather"] + moved["reduce_scatter"] + 2 * moved["all_reduce"]

    moved = shoal.run(measure, 2, "memory", args=(False,), timeout=40)[0]
    beginning = moved["all_gather"]  # what each forward begins with: a generator's state
    assert beginning < 6000
    whole = wire(moved) - beginning
    part = wire(shoal.run(measure, 2, "memory", args=(True,), timeout=40)[0]) - beginning
    # Beyond that: into the stack and out of it, and sums of the gradients of norms and biases.
    hidden = ITEMS * 5 * WIDTH * FLOAT
    extra = 2 * 2 * (4 + 2) * WIDTH * FLOAT
    assert whole == 2 * (2 * 4 - 1) * hidden  # the model's input needs no gradient
    assert part <= whole + 2 * hidden + extra


@pytest.mark.parametrize("ranks", [2, 3])
def test_each_rank_holds_its_part_of_what_is_split(ranks: int) -> None:
    def measure() -> tuple[int, int, int, int]:
        module = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(WIDTH, 6, 4 * WIDTH), 2, enable_nested_tensor=False
        )
        optimizer: Any = torch.optim.AdamW(module.parameters())
        model, optimizer = shoal.as_distributed(module, optimizer, strategy="tensor")
        model(torch.randn(3, 2, WIDTH)).sum().backward()
        optimizer.step()
        memory = shoal.world().stats().memory
        split = [split.shape.numel() for split in model.parts.splits.values()]
        own = [split.local_shape.numel() for split in model.parts.splits.values()]
        held = memory["parameters"].current + memory["state"].current
        return sum(split), sum(own), sum(p.numel() for p in model.parameters()), held

    total = 2 * sum(p.numel() for p in nn.TransformerEncoderLayer(WIDTH, 6, 4 * WIDTH).parameters())
    for split, own, parameters, held in shoal.run(measure, ranks, "memory", timeout=40):
        assert own * ranks == split
        assert parameters == total - split + split // ranks
        assert split > 0.9 * total
        assert held == pytest.approx(3 * 4 * parameters, rel=0.03)  # and Adam's two numbers
