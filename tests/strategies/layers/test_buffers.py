"""Buffers that forward changes by what it sees: ranks agree on them, and say the same of them."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pools
import shoal
from shoal.verification.trainers.trainer import share


class Codebook(nn.Module):
    """A table that follows the mean of what it is given, beside BatchNorm and a constant mask."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(4))
        self.register_buffer("mask", torch.tensor([0.0, 0.1, float("-inf"), 0.3]))
        self.register_buffer("last_row", torch.zeros((), dtype=torch.int64))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.table.lerp_(x.mean(0).to(self.table.dtype), 0.1)
                self.last_row.copy_(x[-1, 0] * 100)
        return self.norm(x) + self.table.detach().clone()


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), Codebook(), nn.Linear(4, 4), nn.Linear(4, 2))


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(6, 3, generator=generator), torch.randn(6, 2, generator=generator)


LAYOUTS = [
    ("ddp", {}, 2), ("ddp", {}, 3), ("zero1", {}, 2), ("zero2", {}, 3), ("zero3", {}, 2),
    ("zero3", {"mixed_precision": "bf16"}, 2), ("fsdp", {"replica": 2}, 4),
    ("tensor", {"tensor": 2}, 4), ("pipeline", {"data": 2, "micro_batches": 2}, 4),
    ("hybrid", {"data": 2, "pipeline": 2, "zero": 1, "micro_batches": 2}, 4),
]  # fmt: skip


def train(strategy: str, options: dict, averages: bool) -> tuple:
    """State dicts after three steps: the model's, of its own buffers, and of one saved."""
    module = build()
    model, optimizer = shoal.as_distributed(
        module,
        torch.optim.SGD(module.parameters(), lr=0.1),
        strategy=strategy,
        average_buffers=averages,
        **options,
    )
    for step in range(3):
        optimizer.zero_grad()
        inputs, targets = batch(step, model.data_group.rank)
        model.train_step(inputs, targets, F.mse_loss)
        optimizer.step()
    own = {name: buffer.clone() for name, buffer in model.named_buffers()}
    state = model.state_dict()
    del model, optimizer
    gc.collect()
    return own, {name: state[name] for name in state if name.startswith("1.")}


def is_equal(left: dict, right: dict) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


@pytest.mark.parametrize("averages", [pytest.param(False, marks=pytest.mark.full), True])
@pytest.mark.parametrize(("strategy", "options", "ranks"), LAYOUTS)
def test_ranks_say_the_same(strategy, options, ranks, averages) -> None:
    everybody = pools.Team("memory", ranks).run(train, strategy, options, averages)
    own, states = zip(*everybody, strict=True)
    if averages or strategy != "ddp":
        assert all(is_equal(state, states[0]) for state in states)
    if averages:  # also what nobody asked the others for
        shown = [{k: v for k, v in one.items() if k in states[0]} for one in own]
        assert all(is_equal(one, {k: states[0][k] for k in one}) for one in shown)
    assert torch.equal(states[0]["1.mask"], build()[1].mask)  # no bit of a constant changes


@pytest.mark.parametrize("averages", [False, True])
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_between_processes(backend, averages) -> None:
    for strategy in ("ddp", "zero2", "zero3"):
        everybody = pools.Team(backend, 2).run(train, strategy, {}, averages)
        expected = pools.Team("memory", 2).run(train, strategy, {}, averages)[0][1]
        for _, state in everybody if averages or strategy != "ddp" else everybody[:1]:
            for name, value in expected.items():
                torch.testing.assert_close(state[name], value)


def test_the_average_is_what_one_process_has() -> None:
    """A table that is linear in the batch: the mean over ranks is that of the whole batch."""

    class Follower(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 2)
            self.register_buffer("table", torch.zeros(3, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.table.lerp_(x.mean(0), 0.1)
            return super().forward(x - self.table)

    def build_all() -> tuple:
        model = Follower().double()
        batches = [(torch.randn(6, 3).double(), torch.randn(6, 2).double()) for _ in range(4)]
        return model, torch.optim.SGD(model.parameters(), lr=0.1), batches, F.mse_loss

    def state(ranks: int, **options: bool) -> list[Tensor]:
        def follow() -> Tensor:
            torch.manual_seed(0)
            module, optimizer, batches, loss_fn = build_all()
            model, _ = shoal.as_distributed(module, optimizer, strategy="ddp", **options)
            for inputs, targets in batches:
                own = share((inputs, targets), shoal.world().rank, ranks)
                model.train_step(*own, loss_fn)
            return model.state_dict()["table"]

        return shoal.run(follow, ranks, "memory")

    (alone,) = state(1)
    for table in state(3, average_buffers=True):
        torch.testing.assert_close(table, alone, rtol=1e-12, atol=1e-12)
    first = state(3)
    assert not torch.allclose(first[0], alone)
    report = shoal.verify(build_all, "zero3", 3, reference="split", average_buffers=True)
    assert report.equal, report


@pytest.mark.parametrize("averages", [False, True])
def test_a_checkpoint_has_what_training_goes_on_with(tmp_path, averages) -> None:
    """Whoever holds which part of it: the next forward begins with the same."""

    def save(strategy: str, options: dict) -> tuple[dict, dict]:
        module = build()
        model = shoal.as_distributed(module, strategy=strategy, average_buffers=averages, **options)
        with torch.no_grad():  # no gradients are averaged, so nobody has agreed on anything yet
            model(batch(0, model.data_group.rank)[0])
        shoal.save(tmp_path / strategy, model)
        other = build()
        shoal.load(tmp_path / strategy, other)
        model.synchronize_buffers()
        return model.state_dict(), other.state_dict()

    for strategy, options in (("ddp", {}), ("zero3", {}), ("pipeline", {"data": 2})):
        ranks = 4 if options else 3
        for state, saved in shoal.run(save, ranks, "memory", args=(strategy, options)):
            assert is_equal(state, saved)


def test_rank_0_alone_asks_for_the_state() -> None:
    """The commonest way to save under ddp."""

    def ask(averages: bool) -> bool:
        module = build()
        model = shoal.as_distributed(module, strategy="ddp", average_buffers=averages)
        model.train_step(*batch(0, shoal.world().rank), F.mse_loss)
        return shoal.world().rank > 0 or len(model.state_dict()) > 0

    for averages in (False, True):
        assert all(pools.Team("memory", 2).run(ask, averages))
        assert all(pools.Team("gloo", 2).run(ask, averages))
