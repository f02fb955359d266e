"""What the contest on GPUs trains: models, their batches on one rank, AdamW."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from gpt import Block, Shape
from torch import Tensor, nn
from torch.optim import AdamW

LR = 1e-4


class Decoder(nn.Module):
    """Tokens in, logits out: an embedding, blocks, and a head with weights of its own."""

    def __init__(self, blocks: Iterable[nn.Module], width: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits for the token after each."""
        return self.head(self.norm(self.blocks(self.tokens(tokens))))


class Residual(nn.Module):
    """One small layer on top of the residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Adds little, so that a thousand of them can be trained."""
        return x + F.relu(self.linear(x)) * 0.01


@dataclass(frozen=True)
class Subject:
    """A model and its batch on one rank.

    Attributes:
        shape: Layers, width and heads, and the batch.
        vocabulary: How many tokens there are.
        is_gpt: Whether a layer is a block of a GPT; otherwise it is a `Residual`.
    """

    shape: Shape
    vocabulary: int
    is_gpt: bool = True

    def model(self, device: torch.device, dtype: torch.dtype) -> Decoder:
        """The same one on every rank, made on the device: there it takes no time."""
        torch.manual_seed(0)
        shape = self.shape
        with device:
            blocks = [
                Block(shape) if self.is_gpt else Residual(shape.width) for _ in range(shape.layers)
            ]
            return Decoder(blocks, shape.width, self.vocabulary).to(dtype)

    def batch(self, rank: int, device: torch.device) -> Tensor:
        """A rank's, always the same, with the token that follows the last."""
        generator = torch.Generator().manual_seed(rank + 1)
        size = (self.shape.batch, self.shape.length + 1)
        return torch.randint(self.vocabulary, size, generator=generator).to(device)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """How badly the model foretells each next token."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def adamw(model: nn.Module) -> AdamW:
    """As every contender has it."""
    return AdamW(model.parameters(), lr=LR, fused=True)


def dtype_on(device: torch.device) -> torch.dtype:
    """Of the parameters."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


MODELS = {
    "gpt-0.37b": Subject(Shape(24, 1024, batch=8, length=1024, heads=16), 32000),
    "layers-1000": Subject(Shape(1000, 256, batch=8, length=64), 1000, is_gpt=False),
    "gpt-1.58b": Subject(Shape(48, 1600, batch=4, length=1024, heads=25), 32000),
    "gpt-wide": Subject(Shape(20, 4096, batch=8, length=2048, heads=32), 8000),
    "tiny": Subject(Shape(2, 32, batch=2, length=8), 64),
}
