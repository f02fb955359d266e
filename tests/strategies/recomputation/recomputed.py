"""A model that draws random numbers of all kinds, trained with and without a policy."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from pools import Team
from strategies.models import GPT

WIDTH, VOCABULARY = 10, 29


class Calls:
    """How often a block was called: an object, as attributes are put back after a second call."""

    num = 0


class DropBlock(nn.Module):
    """A block that draws random numbers of all kinds, and counts its calls."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(0.3)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.calls = Calls()

    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Tensor:
        self.calls.num += 1
        noise = 1 + 0.1 * random.random() + 0.1 * float(np.random.random())
        y = self.drop(self.down(self.drop(F.gelu(self.up(self.norm(x))))))
        return x + y * noise * (1.0 if scale is None else scale)


class DropNet(nn.Module):
    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(DropBlock() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, scale=x.detach().abs().mean())
        return self.head(x)


MODELS = {"drop": DropNet, "deep": lambda: DropNet(8), "gpt": lambda: GPT(layers=4)}


def text_loss(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def train(kind: str, strategy: str, options: dict[str, Any]) -> tuple[dict[str, Tensor], int]:
    """The state after some steps, and how often blocks of this rank were called in each."""
    seed_all(0)
    module = MODELS[kind]().double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = shoal.as_distributed(
        module, optimizer, strategy=strategy, min_group_bytes=300, **options
    )
    for step in range(3):
        apart = 0 if strategy in ("tensor", "hybrid") else 10  # these have one replica's batch
        seed_all(step + apart * shoal.world().rank)
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, VOCABULARY, (8, 7), generator=generator)
        for block in module.blocks:
            block.calls = Calls()
        model.train_step(tokens[:, :-1], tokens[:, 1:], text_loss)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), sum(block.calls.num for block in module.blocks)


def assert_equal_states(results: list[Any], expected: list[Any]) -> None:
    for (state, _), (other, _) in zip(results, expected, strict=True):
        assert [name for name in state if not torch.equal(state[name], other[name])] == []


def compare(
    team: Team, kind: str, strategy: str, policy: Any, *, auto: Any = None, **options: Any
) -> tuple[int, int]:
    """Bit-equal; returns how often blocks were called on rank 0, without and with."""
    plain = team.run(train, kind, strategy, options)
    with_policy = {**options, "activations": policy, **(auto or {})}
    again = team.run(train, kind, strategy, with_policy)
    assert_equal_states(again, plain)
    return plain[0][1], again[0][1]


FOUR = Team("memory", 4)
