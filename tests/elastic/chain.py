"""A model whose layers can be split, and that can be cut into stages."""

from __future__ import annotations

import torch
from torch import nn


class Block(nn.Module):
    """What is split unevenly between two ranks, with a buffer that is saved and one that is not.

    Where there is dropout, the result also depends on what a rank has seen.
    """

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(5, 7), nn.Linear(7, 5), nn.LayerNorm(5)
        self.dropout, self.rate = nn.Dropout(dropout), 1e-2 if dropout else 0.0
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(5), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += self.rate
            self.mean += self.rate * x.detach().mean(0)
        inner = self.dropout(torch.tanh(self.up(self.norm(x))))
        return x + self.down(inner) + self.mean


class Chain(nn.Module):
    """Blocks, of which two share a weight, and layers before and behind them; a bias is frozen."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.begin, self.end = nn.Linear(3, 5), nn.Linear(5, 5)
        self.blocks = nn.ModuleList([Block(dropout) for _ in range(3)])
        self.blocks[2].norm.weight = self.blocks[0].norm.weight
        self.end.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.begin(x)
        for block in self.blocks:
            x = block(x)
        return self.end(x)
