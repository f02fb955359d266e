"""What compressed gradients have left out is in the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal

State = dict[str, Tensor]


def made(strategy: str, compression: Any, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(12, 30), nn.Tanh(), nn.Linear(30, 12))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    return shoal.as_distributed(
        module, optimizer, strategy=strategy, compression=compression, **options
    )


def train(model: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        group = model.data_group
        generator = torch.Generator().manual_seed(10 * step + group.rank)
        x = torch.randn(4, 12, generator=generator)
        optimizer.zero_grad()
        model.train_step(x, x.flip(1), F.mse_loss)
        optimizer.step()


def residual(model: Any) -> State:
    state = model.compression_state
    return {held.name: held.memory.clone() for held in state.held_residual()}


def whole_state(model: Any) -> State:
    return {name: value.clone() for name, value in model.state_dict().items()}


def save_and_go_on(path: Path, strategy: str, compression: Any, options: Any) -> Any:
    model, optimizer = made(strategy, compression, **options)
    train(model, optimizer, range(4))
    shoal.save(path, model, optimizer, step=4)
    kept = residual(model)
    train(model, optimizer, range(4, 8))
    return whole_state(model), kept


def load_and_go_on(path: Path, strategy: str, compression: Any, options: Any) -> Any:
    model, optimizer = made(strategy, compression, **options)
    train(model, optimizer, range(20, 22))  # so that there is something to overwrite
    shoal.load(path, model, optimizer)
    kept = residual(model)
    train(model, optimizer, range(4, 8))
    return whole_state(model), kept


def run(fn: Any, ranks: int, *args: Any) -> list[Any]:
    return shoal.run(fn, ranks, "memory", args=args, timeout=40)


@pytest.mark.parametrize(
    ("compression", "options"),
    [
        ("int8", {}),
        ("topk:0.05", {}),
        ("randomk:0.1", {}),
        ("powersgd:2", {}),
        ("int4", {"compression_warmup": 6}),
        ("sign", {"error_feedback": False}),
    ],
)
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_resumed_to_the_last_bit(
    tmp_path: Path, strategy: str, compression: str, options: Any
) -> None:
    expected = run(save_and_go_on, 2, tmp_path, strategy, compression, options)
    found = run(load_and_go_on, 2, tmp_path, strategy, compression, options)
    for (state, kept), (other, others_kept) in zip(found, expected, strict=True):
        assert all(torch.equal(state[name], other[name]) for name in other)
        for name, value in others_kept.items():
            assert torch.equal(kept[name], value)
        assert bool(kept) == bool(others_kept) or "compression_warmup" in options


def test_other_strategy_same_ranks_has_the_same_residual(tmp_path: Path) -> None:
    expected = run(save_and_go_on, 2, tmp_path, "ddp", "topk:0.05", {})
    found = run(load_and_go_on, 2, tmp_path, "zero2", "topk:0.05", {"min_group_bytes": 500})
    for (_, kept), (_, others_kept) in zip(found, expected, strict=True):
        assert all(torch.equal(kept[name], others_kept[name]) for name in others_kept)


@pytest.mark.parametrize("ranks", [2, 4])
def test_another_number_of_ranks_keeps_the_mean(tmp_path: Path, ranks: int) -> None:
    expected = run(save_and_go_on, 3, tmp_path, "ddp", "topk:0.05", {})
    mean = {
        name: sum(kept[name] for _, kept in expected) / 3  # type: ignore[union-attr]
        for name in expected[0][1]
    }
    for _, kept in run(load_and_go_on, ranks, tmp_path, "zero3", "topk:0.05", {}):
        for name, value in mean.items():
            assert value.any() == name.endswith("weight")  # vectors are not compressed
            assert torch.allclose(kept[name], value, rtol=1e-5, atol=1e-7)


def test_checkpoints_with_and_without_compression(tmp_path: Path) -> None:
    def plain(path: Path) -> State:
        model, optimizer = made("ddp", None)
        shoal.load(path, model, optimizer)
        return whole_state(model)

    def compressed(path: Path) -> State:
        model, optimizer = made("ddp", "topk:0.05")
        train(model, optimizer, range(2))
        shoal.load(path, model, optimizer)
        return residual(model)

    def save(path: Path, compression: str | None) -> State:
        model, optimizer = made("ddp", compression)
        train(model, optimizer, range(2))
        shoal.save(path, model, optimizer)
        return whole_state(model)

    saved = run(save, 2, tmp_path / "compressed", "topk:0.05")[0]
    loaded = run(plain, 2, tmp_path / "compressed")[0]
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)
    run(save, 2, tmp_path / "plain", None)
    for kept in run(compressed, 2, tmp_path / "plain"):
        assert not any(value.any() for value in kept.values())


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("tensor", {"tensor": 2, "seed": 0}),
        ("pipeline", {"pipeline": 2, "micro_batches": 2}),
        ("hybrid", {"tensor": 2, "pipeline": 1, "zero": 3, "seed": 0}),
    ],
)
@pytest.mark.parametrize("compression", ["powersgd:2", "topk:0.05"])
def test_models_that_are_cut(
    tmp_path: Path, strategy: str, options: dict[str, Any], compression: str
) -> None:
    expected = run(save_and_go_on, 4, tmp_path, strategy, compression, options)
    found = run(load_and_go_on, 4, tmp_path, strategy, compression, options)
    for (state, kept), (other, others_kept) in zip(found, expected, strict=True):
        assert all(torch.equal(kept[name], others_kept[name]) for name in others_kept)
        assert all(torch.equal(state[name], other[name]) for name in other)
