"""A small GPT on bytes of a text that every Python has, for `shoal demo`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 128


@dataclass(frozen=True)
class GPTShape:
    """How large the model and its batches are."""

    width: int = 160
    num_layers: int = 4
    num_heads: int = 4
    context: int = 64
    batch_size: int = 16


class DecoderBlock(nn.Module):
    """Attention and a feed-forward layer, each added to what comes in."""

    def __init__(self, shape: GPTShape) -> None:
        """No biases in the attention: a key's has no gradient in exact arithmetic."""
        super().__init__()
        self._num_heads = shape.num_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.attention_in = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.attention_out = nn.Linear(shape.width, shape.width, bias=False)
        self.expand = nn.Linear(shape.width, 4 * shape.width)
        self.contract = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """The next layer's input."""
        x = x + self._attend(self.norm_1(x))
        out: Tensor = x + self.contract(F.gelu(self.expand(self.norm_2(x))))
        return out

    def _attend(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        split = self.attention_in(x).view(rows, length, 3, self._num_heads, -1)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.attention_out(seen.transpose(1, 2).reshape(rows, length, width))
        return out


class GPT(nn.Module):
    """Predicts the next byte; the last layer shares its weight with the first."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.Sequential(*(DecoderBlock(shape) for _ in range(shape.num_layers)))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.04)
        self.head.weight = self.bytes.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of each next byte."""
        x = self.bytes(tokens) + self.positions.weight[: tokens.shape[1]]
        out: Tensor = self.head(self.norm(self.blocks(x)))
        return out


def loss_fn(scores: Tensor, targets: Tensor) -> Tensor:
    """How surprising the text is to the model, in nats a byte."""
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


@cache
def text() -> Tensor:
    """Python's own help texts, as bytes."""
    from pydoc_data.topics import topics

    data = "\n".join(topics[name] for name in sorted(topics)).encode("ascii", "replace")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


def batch(shape: GPTShape, step: int) -> tuple[Tensor, Tensor]:
    """The global batch of a step: pieces of the text, and the same one byte later."""
    generator = torch.Generator().manual_seed(step)
    last = text().numel() - shape.context - 1
    starts = torch.randint(last, (shape.batch_size, 1), generator=generator)
    pieces = text()[starts + torch.arange(shape.context + 1)]
    return pieces[:, :-1], pieces[:, 1:]
