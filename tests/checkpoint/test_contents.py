"""What else is in a checkpoint: extras, schedulers, scalers, samplers, random numbers, buffers."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import shoal
from checkpoint.training import assert_same, build, on_ranks, state, train, wrap
from shoal.errors import CheckpointError, CheckpointMismatchError


def test_extras(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    extra = {
        "epoch": 3,
        "best": float("nan"),
        "history": [0.5, (1, "two"), {"a": None, 7: b"\0\xff"}],
        "counts": Counter({3: 2}),
        "large": torch.randn(40, 3),
        "small": torch.tensor(7, dtype=torch.int16),
        "empty": torch.empty(0, 3),
        "brain": torch.randn(50).bfloat16(),
        "strided": torch.arange(60).reshape(20, 3).T,
        "complex": torch.randn(20, dtype=torch.complex128),
        "flags": torch.tensor([True, False] * 50),
        "$odd": {"$tensor": 1},
    }
    shoal.save(tmp_path, model, extra=extra, step=12)
    loaded = shoal.load(tmp_path, model)
    assert (loaded.step, loaded.path) == (12, tmp_path / "000001-step-12")
    assert loaded.keys() == extra.keys()
    for key, value in extra.items():
        if isinstance(value, torch.Tensor):
            assert loaded[key].dtype == value.dtype
            assert torch.equal(loaded[key], value)
        else:
            assert repr(loaded[key]) == repr(value)


class Odd:
    pass


@pytest.mark.parametrize("value", [Odd(), [Odd()], {"a": {"b": Odd()}}, len, np.zeros(3)])
def test_what_needs_pickle_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(TypeError, match=r"extra/x.* which only pickle could save"):
        shoal.save(tmp_path, nn.Linear(2, 2), extra={"x": value})
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(TypeError, match="contains itself"):
        shoal.save(tmp_path, nn.Linear(2, 2), extra={"x": endless})
    assert not list(tmp_path.glob("0*"))


def refuse_on_one_rank(path: Path) -> str:
    extra = {"x": Odd()} if shoal.world().rank == 1 else {}
    model, optimizer = wrap("ddp", *build())
    with pytest.raises((TypeError, CheckpointError)) as error:
        shoal.save(path, model, optimizer, extra=extra)
    return str(error.value)


def test_a_refusal_is_everybodys(tmp_path: Path) -> None:
    assert all("pickle" in text for text in on_ranks(refuse_on_one_rank, 3, tmp_path))


# Companions ----------------------------------------------------------------------------------

SCHEDULERS = {
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
    "milestones": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4]),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "sequence": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.LinearLR(o, total_iters=2),
            torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
        ],
        [2],
    ),
}


def advance(optimizer: Any, scheduler: Any, count: int) -> list[float]:
    rates = []
    for _ in range(count):
        optimizer.step()
        is_plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        scheduler.step(*([1.0] if is_plateau else []))
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_go_on(tmp_path: Path, name: str) -> None:
    def make() -> Any:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, optimizer, SCHEDULERS[name](optimizer)

    model, optimizer, scheduler = make()
    advance(optimizer, scheduler, 3)
    shoal.save(tmp_path, model, optimizer, scheduler=scheduler)
    expected = advance(optimizer, scheduler, 5)
    model, optimizer, scheduler = make()
    shoal.load(tmp_path, model, optimizer, scheduler=scheduler)
    assert advance(optimizer, scheduler, 5) == expected


def everything(path: Path, do: str) -> Any:
    model, optimizer = wrap("zero3", *build())
    scaler = shoal.optim.GradScaler("cpu", init_scale=2.0**7)
    sampler = shoal.sampler(60, 12, seed=5)
    if do == "save":
        taken = iter(sampler)
        for _ in range(2):
            next(taken)
        scaler.scale(torch.ones(()))
        scaler.update(2.0**9)
        shoal.save(path, model, optimizer, scaler=scaler, sampler=sampler)
    else:
        shoal.load(path, model, optimizer, scaler=scaler, sampler=sampler)
        taken = iter(sampler)
    return scaler.get_scale(), [index for batch in taken for index in batch]


def test_scalers_and_samplers_go_on(tmp_path: Path) -> None:
    saved = on_ranks(everything, 2, tmp_path, "save")
    loaded = on_ranks(everything, 3, tmp_path, "load")
    assert {scale for scale, _ in [*saved, *loaded]} == {2.0**9}
    rest = sorted(index for _, indices in saved for index in indices)
    assert sorted(index for _, indices in loaded for index in indices) == rest
    assert len(rest) == 36


class Stubborn:
    def __init__(self, content: int) -> None:
        self.content = content

    def state_dict(self) -> dict[str, int]:
        return {"content": self.content}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if state["content"] == 1:
            raise RuntimeError("not that one")
        self.content = state["content"]


def test_a_companion_that_refuses(tmp_path: Path) -> None:
    """Then nothing is loaded, and those before it have their own state again."""
    model, optimizer = build()
    shoal.save(tmp_path, model, optimizer, scheduler=[Stubborn(5), Stubborn(1)])
    train(model, optimizer, [0])
    before, objects = state(model, optimizer), [Stubborn(7), Stubborn(8)]
    with pytest.raises(CheckpointMismatchError, match=r"refuses its saved state: .*not that one"):
        shoal.load(tmp_path, model, optimizer, scheduler=objects)
    assert [each.content for each in objects] == [7, 8]
    assert_same(state(model, optimizer), before)
    with pytest.raises(CheckpointMismatchError, match="2 objects for scheduler=, and 1"):
        shoal.load(tmp_path, model, optimizer, scheduler=Stubborn(7))
    with pytest.raises(CheckpointMismatchError, match="0 objects for sampler="):
        shoal.load(tmp_path, model, optimizer, sampler=Stubborn(7))
    shoal.load(tmp_path, model, optimizer, sampler=Stubborn(7), strict=False)


# Random numbers ------------------------------------------------------------------------------


def draw() -> tuple[float, float, float]:
    return torch.rand(()).item(), float(np.random.rand()), random.random()


def draw_and_save(path: Path) -> Any:
    model, optimizer = wrap("ddp", *build())
    torch.manual_seed(shoal.world().rank)
    np.random.seed(shoal.world().rank)
    random.seed(shoal.world().rank)
    draw()
    shoal.save(path, model, optimizer)
    return draw()


def load_and_draw(path: Path, random_state: bool | None = None) -> Any:
    model, optimizer = wrap("zero2", *build())
    torch.manual_seed(99)
    shoal.load(path, model, optimizer, random_state=random_state)
    return draw()


def test_random_numbers_go_on(tmp_path: Path) -> None:
    saved = on_ranks(draw_and_save, 3, tmp_path)
    assert on_ranks(load_and_draw, 3, tmp_path) == saved
    assert on_ranks(load_and_draw, 2, tmp_path) == saved[:2]
    more = on_ranks(load_and_draw, 7, tmp_path)
    assert more[:3] == saved
    assert more == on_ranks(load_and_draw, 7, tmp_path)
    for kind in range(3):
        assert len({numbers[kind] for numbers in more}) == 7  # no two ranks draw the same
    untouched = on_ranks(load_and_draw, 3, tmp_path, False)
    assert len({numbers[0] for numbers in untouched}) == 1  # as seeded above


# Buffers and what modules have besides -------------------------------------------------------


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 13)
        self.norm = nn.BatchNorm1d(13)
        self.seen = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.norm(self.linear(x))

    def get_extra_state(self) -> Any:
        return {"seen": self.seen, "table": torch.arange(30)}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


def count(path: Path, strategy: str, do: str) -> Any:
    torch.manual_seed(1)
    model = Counting().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = wrap(strategy, model, optimizer)
    if do == "save":
        train(model, optimizer, range(3))
        shoal.save(path, model, optimizer)
    else:
        shoal.load(path, model, optimizer)
    return {k: v for k, v in model.state_dict().items() if isinstance(v, torch.Tensor)}, model.seen


def test_statistics_and_extra_state(tmp_path: Path) -> None:
    """Ranks have statistics of their own until the next forward; the first rank's count."""
    saved, seen = on_ranks(count, 3, tmp_path, "zero2", "save")[0]
    assert seen == 3
    for loaded, seen in on_ranks(count, 2, tmp_path, "fsdp", "load"):
        assert_same(loaded, saved)
        assert seen == 3


def test_ties_of_any_name(tmp_path: Path) -> None:
    """A weight that is tied in one model and not in the other, whichever name comes first."""
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    loose = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    shoal.save(tmp_path / "tied", tied)
    shoal.load(tmp_path / "tied", loose)
    assert torch.equal(loose[1].weight, tied[0].weight)
    shoal.save(tmp_path / "loose", loose)
    shoal.load(tmp_path / "loose", tied)
    other = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    other[0].weight = other[1].weight
    shoal.load(tmp_path / "tied", other)
    assert torch.equal(other[0].weight, tied[0].weight)


def test_a_plain_model_in_odd_memory(tmp_path: Path) -> None:
    model = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last).bfloat16()
    with torch.no_grad():
        expected = {name: value.clone() for name, value in model.state_dict().items()}
        shoal.save(tmp_path, model)
        for parameter in model.parameters():
            parameter.zero_()
    shoal.load(tmp_path, model)
    assert_same(dict(model.state_dict()), expected)
    assert model.weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("numel", [10, 200_000])
def test_conjugated_buffers_are_saved_as_what_they_stand_for(
    tmp_path: Path, numel: int, wait: bool
) -> None:
    """torch only takes note of a conjugation, and the bytes of such a tensor are of another."""
    value = torch.randn(numel, dtype=torch.complex64)
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    model.register_buffer("phase", value.conj())
    other.register_buffer("phase", torch.zeros_like(value))
    shoal.save(tmp_path, model, wait=wait).wait()
    shoal.load(tmp_path, other)
    assert torch.equal(other.phase, value.conj().resolve_conj())


def _loaded_in_inference_mode(strategy: str, path: Path, is_from_file: bool) -> Any:
    model, optimizer = wrap(strategy, *build())
    train(model, optimizer, [0])
    shoal.save(path, model, optimizer)
    content = optimizer.state_dict()
    with torch.inference_mode():
        if is_from_file:
            shoal.load(path, model, optimizer)
        else:
            optimizer.load_state_dict(content)
    train(model, optimizer, [1])
    return state(model, optimizer)


@pytest.mark.parametrize("is_from_file", [True, False])
@pytest.mark.parametrize("strategy", ["plain", "ddp", "zero2", "zero3"])
def test_state_loaded_in_inference_mode_is_trained_afterwards(
    tmp_path: Path, strategy: str, is_from_file: bool
) -> None:
    """Its tensors were of that mode, and no step outside could change them."""
    ranks = 1 if strategy == "plain" else 2
    for found in on_ranks(_loaded_in_inference_mode, ranks, strategy, tmp_path, is_from_file):
        expected_model, expected_optimizer = build()
        train(expected_model, expected_optimizer, [0, 1])
        assert_same(found, state(expected_model, expected_optimizer), 1e-10)
