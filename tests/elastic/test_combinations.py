"""What else a training may have: a rank is lost and replaced, and nothing is different in the end."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import leaks
import shoal
from elastic import faults
from shoal.elastic import Elastic, ElasticOptimizer
from shoal.errors import CheckpointWarning, MembershipChanged, ShoalError
from shoal.launch.function.forkserver.forkserver import fork_server

EPOCHS, STEPS = 3, 6
STRATEGIES = ("ddp", "zero1", "zero2", "zero3")


class Block(nn.Module):
    """What activations are chosen for, with dropout."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(5, 7), nn.Linear(7, 5), norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = nn.functional.dropout(torch.tanh(self.first(self.norm(x))), 0.2, self.training)
        return x + self.second(inner)


class Net(nn.Module):
    """Tied and frozen parameters; buffers that are saved, and that are not."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.begin, self.end = nn.Linear(3, 5), nn.Linear(5, 5)
        self.blocks = nn.ModuleList([Block(norm(5)), Block(norm(5))])
        self.blocks[1].first.weight = self.blocks[0].first.weight
        self.end.bias.requires_grad_(False)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1
            self.mean += x.detach().mean(0)
        x = self.begin(x)
        for block in self.blocks:
            x = block(x)
        return self.end(x) + 1e-3 * self.mean.sum()


class Stream(IterableDataset[Any]):
    """Another order in each epoch."""

    def __iter__(self) -> Iterator[Any]:
        for number in torch.randperm(faults.NUM_SAMPLES).tolist():
            yield torch.sin(number * torch.tensor([1.0, 2.0, 3.0])), number


def samples() -> Dataset[Any]:
    numbers = torch.arange(faults.NUM_SAMPLES)
    inputs = torch.sin(numbers.view(-1, 1) * torch.tensor([1.0, 2.0, 3.0]))
    return TensorDataset(inputs, numbers)


def shuffled(**options: Any) -> Any:
    return DataLoader(samples(), faults.BATCH, shuffle=True, **options)


def own_generator() -> Any:
    return shuffled(generator=torch.Generator().manual_seed(3))


def workers() -> Any:
    return shuffled(num_workers=2, persistent_workers=True)


def streamed() -> Any:
    return DataLoader(Stream(), faults.BATCH)


@dataclass(frozen=True)
class Case:
    """What is combined with ranks that come and go."""

    options: dict[str, Any] = field(default_factory=dict)
    norm: type[nn.Module] = nn.LayerNorm
    make_loader: Any = shuffled
    make_optimizer: Any = torch.optim.Adam
    is_scaled: bool = False
    accumulated: int = 1
    clip: float = 0.0


def train(strategy: str, case: Case, victim: int, nth: int) -> dict[str, Any]:
    """Trains; ``victim`` is lost at its n-th operation after the second step."""
    first, membership = shoal.world().rank, shoal.world().membership
    is_doomed = first == victim and (membership is None or membership.generation == 1)
    torch.manual_seed(5)
    module = Net(case.norm)
    parameters = list(module.parameters())
    groups = [{"params": parameters[:3]}, {"params": parameters[3:], "lr": 0.02}]
    wrap: Any = shoal.as_distributed
    model, optimizer, loader = wrap(
        module, case.make_optimizer(groups, lr=0.01), case.make_loader(),
        strategy=strategy, elastic=True, min_group_bytes=64, **case.options,
    )  # fmt: skip
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    scaler = torch.amp.GradScaler("cpu", 1024.0, growth_interval=2, enabled=case.is_scaled)
    optimizer.also += [scheduler, scaler]
    changes: list[Any] = []
    optimizer._on_change = changes.append
    fuse = None
    for _ in loader.epochs(EPOCHS):
        for inputs, numbers in loader:
            with optimizer.attempt():
                is_last = optimizer.num_in_window == case.accumulated - 1
                with contextlib.nullcontext() if is_last else model.no_sync():
                    loss = faults.loss_of(model(inputs).float(), numbers)
                    scaler.scale(loss).backward()
                if is_last:
                    if case.clip:
                        scaler.unscale_(optimizer)
                        nn.utils.clip_grad_norm_(model.parameters(), case.clip)
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
                    scheduler.step()
            if is_doomed and fuse is None and optimizer.num_committed == 2:
                fuse = faults.light(nth)
    operations = 0 if fuse is None else fuse.count
    faults.light(-1)
    return {
        "operations": operations,
        "changes": len(changes),
        "state": [
            {name: value.clone() for name, value in model.state_dict().items()},
            model.module.mean.clone(),
            optimizer.state_dict(),
            optimizer.num_committed,
            scheduler.state_dict(),
            scaler.state_dict(),
        ],
    }


def lose(case: Case, strategy: str, num_places: int, backend: str = "memory") -> None:
    """A rank is lost at several places; then once more, and nobody takes its place."""

    def run(nth: int, elastic: Elastic | None) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of what is unusual in small models
            args = (strategy, case, 1, nth)
            return shoal.run(train, 3, backend, args=args, timeout=40, elastic=elastic)

    expected = run(-1, None)
    count = expected[1]["operations"]
    assert count > 6
    for place in range(num_places):
        found = run(1 + place * (count - 1) // num_places, Elastic(min_ranks=3, restarts=1))
        assert all(each["changes"] for each in found[:1])
        for mine, reference in zip(found, expected, strict=True):
            assert faults.same(mine["state"], reference["state"])
    fewer = run(count // 2, Elastic(min_ranks=2))
    assert len(fewer) == 2 and fewer[0]["state"][3] == expected[0]["state"][3]
    assert faults.same(fewer[0]["state"][0], fewer[1]["state"][0])


COMPRESSIONS = ("bf16", "int8", "topk:0.25", "powersgd:1")
CASES = {
    **{f"compression {codec}": Case({"compression": codec}) for codec in COMPRESSIONS},
    "warm compression": Case({"compression": "powersgd:1", "compression_warmup": 3}),
    "accumulated compression": Case({"compression": "topk:0.25"}, accumulated=2),
    "bfloat16": Case({"mixed_precision": "bf16"}),
    "float16 with a scaler": Case({"mixed_precision": "fp16"}, is_scaled=True, clip=0.5),
    "bfloat16, compressed": Case({"mixed_precision": "bf16", "compression": "powersgd:1"}),
    **{f"activations {policy}": Case({"activations": policy}) for policy in ("full", "offload")},
    "activations auto": Case({"activations": "auto", "memory": "1GB"}),
    "BatchNorm": Case(norm=nn.BatchNorm1d),
    "averaged BatchNorm": Case({"average_buffers": True}, norm=nn.BatchNorm1d),
    "synchronized BatchNorm": Case({"sync_batchnorm": True}, norm=nn.BatchNorm1d),
    "accumulation": Case(accumulated=2),
    "clipping": Case(clip=0.1),
    "a generator of its own": Case(make_loader=own_generator),
    "a stream": Case(make_loader=streamed),
    "LBFGS's likes": Case(make_optimizer=torch.optim.ASGD),
}
SOME = [(name, STRATEGIES[number % 4]) for number, name in enumerate(CASES)]
ALL = [(name, strategy) for name in CASES for strategy in STRATEGIES]


@pytest.fixture
def _burning(monkeypatch: pytest.MonkeyPatch) -> None:
    faults.install(monkeypatch)


@pytest.mark.usefixtures("_burning")
@pytest.mark.parametrize(("name", "strategy"), SOME)
def test_a_lost_rank_is_replaced(name: str, strategy: str) -> None:
    lose(CASES[name], strategy, 2)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("_burning")
@pytest.mark.parametrize(("name", "strategy"), ALL)
def test_a_lost_rank_is_replaced_everywhere(name: str, strategy: str) -> None:
    lose(CASES[name], strategy, 12)
