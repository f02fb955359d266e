"""Parts and wholes of parameters: which of them users and optimizers see."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from strategies.tensor.tasks import text_loss
from strategies.tensor.test_tensor_parallel import adam, batch, seeded, wrapped


def run(fn: Any, *args: Any, ranks: int) -> list[Any]:
    return shoal.run(fn, ranks, "memory", args=args, timeout=40)


def test_p22_a_part_is_never_taken_for_the_whole() -> None:
    """A part was given where the full parameter was expected."""

    def check() -> None:
        model, optimizer = wrapped(adam)
        text_loss(model, batch(0)).backward()
        optimizer.step()
        whole = {name: value.shape for name, value in seeded().state_dict().items()}
        assert {name: value.shape for name, value in model.state_dict().items()} == whole
        with model.full_parameters():
            assert {n: p.shape for n, p in model.named_parameters()} == {
                n: p.shape for n, p in seeded().named_parameters()
            }
        parts = {name: value.clone() for name, value in model.module.state_dict().items()}
        with pytest.raises(RuntimeError, match=r"size mismatch for blocks.0.attention.q_proj"):
            model.load_state_dict(parts)
        state = optimizer.state_dict()["state"]
        for number, parameter in enumerate(seeded().parameters()):
            assert state[number]["exp_avg"].shape == parameter.shape

    run(check, ranks=3)


@pytest.mark.parametrize("fused", [None, True])
def test_what_every_rank_has_stays_the_same_where_layers_are_split_unevenly(fused: Any) -> None:
    """Fused kernels round the last elements of a piece of memory differently from the others.

    Ranks with parts of different sizes have other elements there, and drifted apart.
    """

    def train() -> dict[str, Tensor]:
        torch.manual_seed(0)
        norms = nn.LayerNorm(13), nn.LayerNorm(13)
        plain = nn.Sequential(norms[0], nn.Linear(13, 27), nn.ReLU(), nn.Linear(27, 13), norms[1])
        adamw = torch.optim.AdamW(plain.parameters(), 0.01, fused=fused)
        model, optimizer = shoal.as_distributed(plain, adamw, strategy="tensor")
        assert not any(map(model.parts.is_even, model.parts.splits))
        for _ in range(40):
            optimizer.zero_grad()
            model(torch.randn(8, 13)).pow(2).sum().backward()
            optimizer.step()
        assert optimizer.param_groups[0]["fused"] is fused
        return model.state_dict()

    one, other = run(train, ranks=2)
    assert [name for name, value in one.items() if not torch.equal(value, other[name])] == []
