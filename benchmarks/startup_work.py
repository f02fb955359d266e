"""What the ranks of `startup.py` do: in a module of its own, as users' functions are."""

from __future__ import annotations


def nothing() -> None:
    """Starts and ends."""


def training() -> None:
    """Makes an optimizer and steps it once: torch loads its compiler for that."""
    import torch

    weight = torch.nn.Parameter(torch.ones(4))
    adamw = torch.optim.AdamW([weight])
    weight.sum().backward()
    adamw.step()
