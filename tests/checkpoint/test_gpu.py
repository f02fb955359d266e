"""Checkpoints of models on a GPU: from any layout to any other, and between devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from checkpoint import training
from checkpoint.test_layouts import (
    AFTER,
    BEFORE,
    LAYOUTS,
    USUAL,
    build,
    everywhere,
    read,
    train,
    write,
)
from checkpoint.training import assert_same, on_ranks, state
from shoal.checkpoint import saving
from shoal.torch_support.random_state import RandomState
from strategies.models import moved

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PAIRS = [*USUAL, ("ddp-2", "tensor-2"), ("tensor-2", "ddp-2"), ("hybrid-2-2", "pipeline-2")]
optimizers = pytest.mark.parametrize("optimizer", ["adamw", "fused"])


def uninterrupted(optimizer: str, device: str) -> dict[str, Any]:
    model, made = build(0, LAYOUTS["plain"], optimizer, device)
    train(model, made, [*BEFORE, *AFTER])
    return moved(state(model, made), "cpu")


def check(folder: Path, pair: tuple[str, str], optimizer: str, devices: tuple[str, str]) -> None:
    writer, reader = pair
    saved = [
        moved(each, "cpu") for each in everywhere(write, folder, writer, optimizer, devices[0])
    ]
    for other in saved[1:]:
        assert_same(saved[0], other)
    expected = uninterrupted(optimizer, devices[1])
    for loaded, after in everywhere(read, folder, reader, optimizer, devices[1]):
        assert {value.device.type for key, value in after.items() if key.startswith("model/")} == {
            devices[1]
        }
        assert_same(moved(loaded, "cpu"), saved[0])
        assert_same(moved(after, "cpu"), expected, tolerance=1e-9)


@pytest.mark.parametrize("pair", PAIRS, ids="-to-".join)
@optimizers
def test_any_layout_reads_any_other(tmp_path: Path, pair: tuple[str, str], optimizer: str) -> None:
    check(tmp_path, pair, optimizer, ("cuda", "cuda"))


@pytest.mark.parametrize("devices", [("cuda", "cpu"), ("cpu", "cuda")], ids="-to-".join)
@pytest.mark.parametrize("pair", [("zero3-4", "hybrid-2-2"), ("tensor-2", "plain")], ids=str)
@optimizers
def test_between_devices(
    tmp_path: Path, pair: tuple[str, str], optimizer: str, devices: tuple[str, str]
) -> None:
    check(tmp_path, pair, optimizer, devices)


# Of odd models, with what goes on while it is written -----------------------------------------


def save_and_go_on(path: Path, strategy: str) -> dict[str, Any]:
    """Training overwrites what is being saved."""
    model, optimizer = on_gpu(strategy)
    go_on(model, optimizer, 3)
    pending = shoal.save(path, model, optimizer, step=3, wait=False)
    held = state(model, optimizer)
    go_on(model, optimizer, 5)
    pending.wait()
    return moved(held, "cpu")


def load(path: Path, strategy: str) -> dict[str, Any]:
    model, optimizer = on_gpu(strategy)
    assert shoal.load(path, model, optimizer).step == 3
    return moved(state(model, optimizer), "cpu")


def on_gpu(strategy: str) -> Any:
    model, _ = training.build()
    model = model.cuda()
    return training.wrap(strategy, model, training.adamw(model))


def go_on(model: Any, optimizer: Any, steps: int) -> None:
    for step in range(steps):
        numbers = torch.randn(12, 7, generator=torch.Generator().manual_seed(step)).double().cuda()
        model(numbers).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("strategy", training.STRATEGIES)
def test_saved_in_the_background(tmp_path: Path, strategy: str) -> None:
    saved = on_ranks(save_and_go_on, 3, tmp_path, strategy)
    for loaded in on_ranks(load, 2, tmp_path, strategy):
        assert_same(loaded, saved[0])


@pytest.mark.parametrize("wait", [True, False])
def test_saved_on_a_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait: bool) -> None:
    """Threads that copy work on the stream of whoever saves, and not before it is through."""
    monkeypatch.setattr(saving, "own_cores", lambda: frozenset(range(4)))
    monkeypatch.setattr(saving, "_LEAST_BYTES", 1 << 20)
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8))).cuda()
    shoal.save(tmp_path, model, wait=wait).wait()
    with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():  # type: ignore[no-untyped-call]
        torch.cuda._sleep(300_000_000)
        for parameter in model.parameters():
            parameter.fill_(2)
        pending = shoal.save(tmp_path, model, wait=wait)
    pending.wait()
    shoal.load(tmp_path, model)
    assert all((parameter == 2).all() for parameter in model.parameters())


# Random numbers, and states that went through other hands --------------------------------------


def draw_after(path: Path, is_saving: bool) -> torch.Tensor:
    model, optimizer = on_gpu("zero3")
    torch.manual_seed(100 * is_saving + shoal.world().rank)
    torch.rand(5, device="cuda")
    (shoal.save if is_saving else shoal.load)(path, model, optimizer)
    return torch.rand(4, device="cuda")


def test_generators_of_the_gpu_go_on(tmp_path: Path) -> None:
    drawn = on_ranks(draw_after, 3, tmp_path, True)
    assert not torch.equal(drawn[0], drawn[1])
    for number, other in zip(drawn, on_ranks(draw_after, 3, tmp_path, False), strict=True):
        assert torch.equal(number, other)


@pytest.mark.parametrize(
    "damaged",
    [torch.zeros(16), torch.zeros(5, dtype=torch.uint8), torch.ones(16, dtype=torch.uint8)],
    ids=["dtype", "size", "values"],
)
def test_states_that_are_none_are_found_before_anything_changes(damaged: torch.Tensor) -> None:
    good = RandomState.capture().to_plain()
    RandomState.from_plain(good)
    with pytest.raises(ValueError, match="no states of random generators"):
        RandomState.from_plain({**good, "cuda": [damaged] * torch.cuda.device_count()})


def take_over(layout: Any, given: Any, optimizer: str) -> Any:
    model, made = build(1, layout, optimizer, "cuda")
    model.load_state_dict(given[0])
    made.load_state_dict(given[1])
    train(model, made, AFTER)
    return state(model, made)


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "plain"])
@optimizers
def test_plain_states_that_were_on_the_cpu(name: str, optimizer: str) -> None:
    """As `torch.load(..., map_location="cpu")` gives them."""
    model, made = build(0, LAYOUTS["plain"], optimizer, "cuda")
    train(model, made, BEFORE)
    given = moved((model.state_dict(), made.state_dict()), "cpu")
    expected = uninterrupted(optimizer, "cuda")
    for after in on_ranks(take_over, LAYOUTS[name][1], LAYOUTS[name], given, optimizer):
        assert_same(moved(after, "cpu"), expected, tolerance=1e-9)
