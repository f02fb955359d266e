"""State of every kind of optimizer moves bit by bit: per element, per parameter, global."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from checkpoint.training import (
    STRATEGIES,
    Net,
    assert_same,
    build,
    load_and_train,
    on_ranks,
    state,
    train,
    train_and_save,
    wrap,
)
from shoal.errors import CheckpointMismatchError
from shoal.optim.division import segmentation


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad and p.numel()]


def muon_and_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [p for p in trainable(model) if p.dim() == 2]
    others = [p for p in trainable(model) if p.dim() != 2]
    return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others, lr=0.01, eps=1e-3)]


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda m: torch.optim.SGD(trainable(m), lr=0.1),
    "momentum": lambda m: torch.optim.SGD(trainable(m), lr=0.1, momentum=0.9),
    "amsgrad": lambda m: torch.optim.AdamW(trainable(m), lr=0.01, eps=1e-3, amsgrad=True),
    "adagrad": lambda m: torch.optim.Adagrad(trainable(m), lr=0.02, eps=1e-3),
    "rmsprop": lambda m: torch.optim.RMSprop(trainable(m), lr=0.01, centered=True, momentum=0.5),
    "adafactor": lambda m: torch.optim.Adafactor(trainable(m), lr=0.01),
    "tensor rate": lambda m: torch.optim.Adam(trainable(m), lr=torch.tensor(0.01), eps=1e-3),
    "muon and adamw": muon_and_adamw,
}
WAYS = [("ddp", 2, "zero3", 3), ("zero3", 4, "zero1", 2), ("zero2", 3, "plain", 1)]


def save(path: Path, name: str, strategy: str, num_steps: int) -> Any:
    model, optimizer = wrap(strategy, *build(OPTIMIZERS[name]))
    train(model, optimizer, range(num_steps))
    shoal.save(path, model, optimizer)
    return state(model, optimizer)


def load(path: Path, name: str, strategy: str, steps_before: int = 0) -> Any:
    model, optimizer = wrap(strategy, *build(OPTIMIZERS[name]))
    train(model, optimizer, range(10, 10 + steps_before))
    shoal.load(path, model, optimizer)
    loaded = state(model, optimizer)
    train(model, optimizer, [7])  # and it can go on
    return loaded


def anywhere(fn: Any, ranks: int, path: Path, name: str, strategy: str, *args: Any) -> Any:
    if strategy == "plain":
        return fn(path, name, strategy, *args)
    return on_ranks(fn, ranks, path, name, strategy, *args)[0]


@pytest.mark.parametrize(
    ("name", "way"), [(name, WAYS[n % len(WAYS)]) for n, name in enumerate(OPTIMIZERS)], ids=str
)
def test_state_moves(tmp_path: Path, name: str, way: tuple[str, int, str, int]) -> None:
    before, ranks_before, after, ranks_after = way
    saved = anywhere(save, ranks_before, tmp_path, name, before, 2)
    assert_same(anywhere(load, ranks_after, tmp_path, name, after), saved)


@pytest.mark.full
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("before", [*STRATEGIES, "plain"])
@pytest.mark.parametrize("after", [*STRATEGIES, "plain"])
def test_all_ways(tmp_path: Path, name: str, before: str, after: str) -> None:
    saved = anywhere(save, 3, tmp_path, name, before, 2)
    assert_same(anywhere(load, 2, tmp_path, name, after), saved)


@pytest.mark.parametrize("name", ["momentum", "adagrad", "adafactor"])
def test_before_the_first_step(tmp_path: Path, name: str) -> None:
    """State that is made in the first step is not there; an optimizer that has some forgets it."""
    saved = anywhere(save, 2, tmp_path, name, "zero3", 0)
    assert_same(anywhere(load, 3, tmp_path, name, "zero2", 2), saved)


def lbfgs(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(trainable(model), lr=0.1, max_iter=3, history_size=4)


def closure_steps(model: Any, optimizer: Any, steps: Any) -> None:
    for step in steps:
        x = torch.randn(24, 7, generator=torch.Generator().manual_seed(step)).double()

        def evaluate(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        optimizer.step(evaluate)


def lbfgs_save(path: Path, strategy: str) -> Any:
    model, optimizer = wrap(strategy, *build(lbfgs))
    closure_steps(model, optimizer, [0, 1])
    shoal.save(path, model, optimizer)
    saved = state(model, optimizer)
    closure_steps(model, optimizer, [2])
    return saved, state(model, optimizer)


def lbfgs_load(path: Path, strategy: str) -> Any:
    model, optimizer = wrap(strategy, *build(lbfgs))
    shoal.load(path, model, optimizer)
    loaded = state(model, optimizer)
    closure_steps(model, optimizer, [2])
    return loaded, state(model, optimizer)


def test_an_optimizer_that_couples_everything(tmp_path: Path) -> None:
    saved, after = on_ranks(lbfgs_save, 2, tmp_path, "ddp")[0]
    for loaded, end in on_ranks(lbfgs_load, 3, tmp_path, "ddp"):
        assert_same(loaded, saved)
        assert_same(end, after, tolerance=1e-6)
    loaded, _ = lbfgs_load(tmp_path, "plain")
    assert_same(loaded, saved)


# Mixed precision: masters move, not what is computed with -----------------------------------


def mixed(path: Path, strategy: str, precision: str | None, do: str) -> Any:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 13))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = wrap(strategy, model, optimizer, mixed_precision=precision)
    if do == "save":
        train(model, optimizer, range(3))
        shoal.save(path, model, optimizer)
    else:
        shoal.load(path, model, optimizer)
    full = state(model, optimizer)
    predicted = model(torch.ones(2, 7)).float()
    return full, predicted


@pytest.mark.parametrize(
    ("before", "after"), [("ddp", "fsdp"), ("zero1", "ddp"), ("zero3", "zero2")]
)
def test_masters_move(tmp_path: Path, before: str, after: str) -> None:
    saved, predicted = on_ranks(mixed, 2, tmp_path, before, "bf16", "save")[0]
    for loaded, again in on_ranks(mixed, 3, tmp_path, after, "bf16", "load"):
        assert_same(loaded, saved)
        assert torch.equal(again, predicted)
    assert_same(on_ranks(mixed, 2, tmp_path, after, None, "load")[0][0], saved)


# Other ways to hold parameters ---------------------------------------------------------------


def with_options(path: Path, do: str, options: dict[str, Any]) -> Any:
    model, optimizer = wrap("fsdp", *build(), **options)
    if do == "save":
        train(model, optimizer, range(2))
        shoal.save(path, model, optimizer)
    else:
        shoal.load(path, model, optimizer)
    return state(model, optimizer)


@pytest.mark.parametrize("options", [{"replica": 2}, {"resident_below": 20}], ids=str)
def test_replicas_and_residents(tmp_path: Path, options: dict[str, Any]) -> None:
    saved = on_ranks(with_options, 4, tmp_path / "a", "save", options)[0]
    for loaded in on_ranks(with_options, 3, tmp_path / "a", "load", {}):
        assert_same(loaded, saved)
    plain = on_ranks(with_options, 3, tmp_path / "b", "save", {})[0]
    for loaded in on_ranks(with_options, 4, tmp_path / "b", "load", options):
        assert_same(loaded, plain)


# What does not fit ---------------------------------------------------------------------------


def test_another_optimizer(tmp_path: Path) -> None:
    model, optimizer = build()
    train(model, optimizer, [0])
    shoal.save(tmp_path, model, optimizer)
    with pytest.raises(CheckpointMismatchError, match="state of AdamW where SGD"):
        shoal.load(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.1))
    adam = torch.optim.Adam(model.parameters(), lr=0.1)
    with pytest.raises(CheckpointMismatchError, match=r"of the groups \[0, 1\]"):
        shoal.load(tmp_path, model, adam, strict=False)
    with pytest.raises(CheckpointMismatchError, match="1 optimizers, and 2"):
        shoal.load(tmp_path, model, [optimizer, adam])


def test_no_optimizer_was_saved(tmp_path: Path) -> None:
    model, optimizer = build()
    shoal.save(tmp_path, model)
    with pytest.raises(CheckpointMismatchError, match="0 optimizers, and 1"):
        shoal.load(tmp_path, model, optimizer)
    shoal.load(tmp_path, model, optimizer, strict=False)


class Grown(Net):
    def __init__(self) -> None:
        super().__init__()
        self.added = nn.Linear(3, 2)


def grow(path: Path, strategy: str) -> Any:
    """A new layer keeps its values, and the state it has; Adagrad cannot step without."""
    model, optimizer = wrap(strategy, *build(OPTIMIZERS["adagrad"], Grown))
    with pytest.raises(CheckpointMismatchError, match=r"missing in the checkpoint: added\.weight"):
        shoal.load(path, model, optimizer)
    before = model.state_dict()["added.weight"]
    shoal.load(path, model, optimizer, strict=False)
    assert torch.equal(model.state_dict()["added.weight"], before)
    full = state(model, optimizer)
    train(model, optimizer, [5])
    return full


@pytest.mark.parametrize("strategy", ["plain", "ddp", "zero3"])
def test_a_model_that_has_grown(tmp_path: Path, strategy: str) -> None:
    saved = anywhere(save, 2, tmp_path, "adagrad", "zero2", 2)
    ranks = [grow(tmp_path, strategy)] if strategy == "plain" else None
    full = (ranks or on_ranks(grow, 3, tmp_path, strategy))[0]
    assert_same(
        {k: full[k] for k in saved if k.startswith("model/")},
        {k: v for k, v in saved.items() if k.startswith("model/")},
    )
    assert full["0/0/sum"].equal(saved["0/0/sum"])
    assert [key for key in full if key.endswith("/sum")][-1] == "0/9/sum"


@pytest.mark.parametrize(("cached_bytes", "num_ranks"), [(8, 2), (40, 3)])
def test_state_that_is_stepped_in_short_segments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached_bytes: int, num_ranks: int
) -> None:
    """It is loaded in long runs: every segment has its part of them, and a counter of its own."""
    monkeypatch.setattr(segmentation, "_CACHED_BYTES", cached_bytes)
    saved = on_ranks(train_and_save, num_ranks, tmp_path, "zero1", range(3))[0]
    loaded, after = on_ranks(load_and_train, 2, tmp_path, "zero3", range(3, 5))[0]
    assert_same(loaded, saved)
    monkeypatch.undo()
    # Fused kernels may round the last few elements of a segment in another way.
    uncut = on_ranks(load_and_train, 2, tmp_path, "zero3", range(3, 5))[0][1]
    assert_same(after, uncut, tolerance=1e-6)
