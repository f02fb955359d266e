"""Mixed precision: computing with sixteen bits, with float32 for the optimizer.

The reference is "split": one process that replays the ranks' batches with a narrow copy of its
parameters and averages wide gradients in rank order. Against it every bit counts.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import leaks
import shoal
from shoal.launch.function.forkserver.forkserver import fork_server
from strategies.loops import RANKS, each, run, whole_state
from strategies.models import random_numbers

STEPS = 8
both = pytest.mark.parametrize("dtype", ["bf16", "fp16"])


class Tied(nn.Module):
    """A tied weight, a norm, BatchNorm, a frozen and an unused layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 5)
        self.batch_norm = nn.BatchNorm1d(5)
        self.norm = nn.LayerNorm(5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = self.norm(self.frozen(self.batch_norm(F.gelu(self.first(x)))))
        return {"out": F.linear(hidden, self.first.weight.T), "count": len(x)}


def build() -> Any:
    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    batches = [
        (numbers[:, :8], numbers[:, 8:])
        for numbers in (random_numbers(step, 4 * RANKS, 16).float() for step in range(STEPS))
    ]
    return model, optimizer, batches, loss


def loss(output: dict[str, Any], target: Tensor) -> Tensor:
    assert output["out"].dtype is torch.float32
    return F.mse_loss(output["out"], target)


@both
@each
def test_every_bit_is_that_of_one_process(strategy: str, dtype: str) -> None:
    options = {"mixed_precision": dtype, "min_group_bytes": 100}
    report = shoal.verify(
        build, strategy, RANKS, steps=STEPS, reference="split", tolerance=0.0, **options
    )
    assert report.equal, str(report)


class Positions(nn.Module):
    """A float32 buffer and a constant widen what goes into layers; one layer is computed twice."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.register_buffer("table", torch.linspace(-1, 1, 8))

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = self.norm(self.first(x) + self.table)
        again = checkpoint(self.second, hidden * torch.linspace(0, 1, 8), use_reentrant=False)
        return {"out": again}


def build_with_positions() -> Any:
    torch.manual_seed(0)
    model = Positions()
    _, _, batches, loss_fn = build()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3), batches, loss_fn


@each
def test_wide_buffers_and_recomputation(strategy: str) -> None:
    options = {"mixed_precision": "bf16", "min_group_bytes": 100}
    report = shoal.verify(
        build_with_positions, strategy, 2, steps=3, reference="split", tolerance=0.0, **options
    )
    assert report.equal, str(report)


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_over_shared_memory_too(strategy: str) -> None:
    fork_server()
    leaks.baseline()
    report = shoal.verify(
        build, strategy, 2, "shm", STEPS, "split", tolerance=0.0, mixed_precision="bf16"
    )
    assert report.equal, str(report)


def what_is_where(strategy: str) -> Any:
    model, optimizer, batches, loss_fn = build()
    model, optimizer = shoal.as_distributed(
        model, optimizer, strategy=strategy, mixed_precision="bf16"
    )
    seen: list[torch.dtype] = []
    model.module.norm.register_forward_hook(lambda m, args, out: seen.append(out.dtype))
    inputs, targets = batches[0]
    model.train_step(inputs, targets, loss_fn)
    optimizer.step()
    return {
        "computed with": seen[0],
        "stepped": {segment.parameter.dtype for segment in optimizer.division.segments},
        "state": {
            value.dtype
            for state in optimizer.state.values()
            for value in state.values()
            if value.dim()
        },
        "saved": {value.dtype for value in model.state_dict().values()},
        "batch norm": model.module.batch_norm.weight.dtype,
    }


@each
def test_what_is_computed_narrow_and_what_is_kept_wide(strategy: str) -> None:
    by_rank = run(what_is_where, strategy)
    assert set.union(*(found["state"] for found in by_rank)) == {torch.float32}
    for found in by_rank:
        assert found["computed with"] is torch.bfloat16
        assert found["stepped"] == {torch.float32}
        assert found["saved"] == {torch.float32, torch.int64}
        assert found["batch norm"] is torch.float32


def save_change_load(strategy: str) -> Any:
    model, optimizer, batches, loss_fn = build()
    before = whole_state(model)
    model, optimizer = shoal.as_distributed(
        model, optimizer, strategy=strategy, mixed_precision="bf16", min_group_bytes=100
    )
    untouched = model.state_dict()
    with model.full_parameters(), torch.no_grad():
        model.module.first.weight.mul_(1 + 2**-20)  # lost if it went through sixteen bits
        inside = model.state_dict()
    changed = model.state_dict()
    model.load_state_dict(before)
    loaded = model.state_dict()
    model.train_step(*batches[0], loss_fn)
    return before, untouched, inside, changed, loaded


@each
def test_masters_are_what_users_see_save_and_change(strategy: str) -> None:
    for before, untouched, inside, changed, loaded in run(save_change_load, strategy):
        assert all(torch.equal(untouched[name], before[name]) for name in before)
        expected = before["first.weight"] * (1 + 2**-20)
        assert torch.equal(inside["first.weight"], expected)
        assert torch.equal(changed["first.weight"], expected)
        assert all(torch.equal(loaded[name], before[name]) for name in before)


def accumulate(strategy: str, is_split: bool) -> Any:
    model, optimizer, batches, loss_fn = build()
    model, optimizer = shoal.as_distributed(
        model, optimizer, strategy=strategy, mixed_precision="bf16", min_group_bytes=100
    )
    with model.no_sync():
        model.train_step(*batches[0], loss_fn)
    if not is_split:
        with model.no_sync():
            model.train_step(*batches[1], loss_fn)
        model.synchronize_gradients()
    else:
        model.train_step(*batches[1], loss_fn)
    norm = model.clip_grad_norm_(0.1)
    optimizer.step()
    return norm, model.state_dict()


@each
def test_accumulation_and_clipping_are_wide(strategy: str) -> None:
    (norm, state), *_ = run(accumulate, strategy, True)
    (norm2, state2), *_ = run(accumulate, strategy, False)
    assert norm.dtype is torch.float32
    assert torch.equal(norm, norm2)
    assert all(torch.equal(state[name], state2[name]) for name in state)


@pytest.mark.parametrize("wrong", ["fp8", "float32", 16, torch.float32])
def test_other_precisions_are_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="mixed_precision must be 'bf16', 'fp16' or None"):
        shoal.run(lambda: shoal.as_distributed(nn.Linear(2, 2), mixed_precision=wrong), 1, "memory")


@each
def test_masters_of_parameters_that_stay_whole_keep_their_digits(strategy: str) -> None:
    """An optimizer that must see all of a parameter has the memory laid out anew."""

    def wrap() -> Any:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4, bias=False))
        before = whole_state(module)
        optimizer = torch.optim.Adafactor(module.parameters())
        model, _ = shoal.as_distributed(
            module, optimizer, strategy=strategy, mixed_precision="bf16", min_group_bytes=0
        )
        return before, model.state_dict()

    for before, after in run(wrap):
        assert all(torch.equal(after[name], value) for name, value in before.items())
