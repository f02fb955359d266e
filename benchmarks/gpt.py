"""A small GPT in plain torch: something that takes as long as a training step does."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 2048


@dataclass(frozen=True)
class Shape:
    """A model and its batch on one rank."""

    layers: int
    width: int
    batch: int
    length: int = 64
    heads: int = 4

    @property
    def key(self) -> str:
        """A short name: ``6x256``."""
        return f"{self.layers}x{self.width}"

    def __str__(self) -> str:
        return f"{self.layers} layers, d={self.width}, batch {self.batch}x{self.length}"


class Block(nn.Module):
    """Attention and a wide layer, each on top of the residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Adds to the residual twice."""
        x = x + self._attend(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    def _attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class GPT(nn.Module):
    """Tokens in, logits out; the embedding also serves as the last layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, shape.width)
        self.places = nn.Embedding(shape.length, shape.width)
        # With torch's own the first loss is 20, not log(2048), and gradients are as small as
        # Adam's eps, which makes differences of rounding visible.
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.blocks = nn.Sequential(*(Block(shape) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits for the token after each."""
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        return F.linear(self.norm(self.blocks(x)), self.tokens.weight)


class Training:
    """A model that can be trained for a step: forward, backward, AdamW."""

    def __init__(self, shape: Shape) -> None:
        torch.manual_seed(0)
        self.model = GPT(shape)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self._tokens = torch.randint(VOCABULARY, (shape.batch, shape.length + 1))

    def step(self) -> None:
        """Always on the same batch."""
        logits = self.model(self._tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), self._tokens[:, 1:].flatten())
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
