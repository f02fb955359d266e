"""What else a training may have: a rank is lost and replaced, and the end is the same."""

from __future__ import annotations

import contextlib
import os
import signal
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import leaks
import shoal
from elastic import faults
from elastic.chain import Chain
from shoal.elastic import Elastic
from shoal.errors import CheckpointWarning, ShoalError
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
    strategies: tuple[str, ...] = STRATEGIES


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
        found = run(
            1 + (place * 2 + 1) * (count - 1) // (2 * num_places), Elastic(min_ranks=3, restarts=1)
        )
        assert all(each["changes"] for each in found[:1])
        for mine, reference in zip(found, expected, strict=True):
            assert faults.same(mine["state"], reference["state"])
    fewer = run(count // 2, Elastic(min_ranks=2))
    assert len(fewer) == 2
    assert fewer[0]["state"][3] == expected[0]["state"][3]
    names = [name for name, _ in Net(case.norm).named_parameters()]  # buffers are a rank's own
    one, other = (each["state"][0] for each in fewer)
    assert all(torch.equal(one[name], other[name]) for name in names)


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
    "another optimizer": Case(make_optimizer=torch.optim.ASGD),
    "gathers": Case({"gather_compression": "int8"}, strategies=STRATEGIES[1:]),
    "gathers, bfloat16, compressed": Case(
        {"gather_compression": "int8", "mixed_precision": "bf16", "compression": "int8"},
        strategies=STRATEGIES[1:],
    ),
}
SOME = [
    (name, case.strategies[number % len(case.strategies)])
    for number, (name, case) in enumerate(CASES.items())
]
ALL = [(name, strategy) for name, case in CASES.items() for strategy in case.strategies]


@pytest.fixture
def _burning(monkeypatch: pytest.MonkeyPatch) -> None:
    faults.install(monkeypatch)


@pytest.mark.usefixtures("_burning")
@pytest.mark.parametrize(("name", "strategy"), SOME)
def test_a_lost_rank_is_replaced(name: str, strategy: str) -> None:
    lose(CASES[name], strategy, 1)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("_burning")
@pytest.mark.parametrize(("name", "strategy"), ALL)
def test_a_lost_rank_is_replaced_everywhere(name: str, strategy: str) -> None:
    lose(CASES[name], strategy, 12)


# Loaders with workers, and processes -------------------------------------------------------


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize(
    ("name", "strategy"),
    [("compression topk:0.25", "zero3"), ("float16 with a scaler", "zero2")],
)
def test_a_killed_rank_is_replaced(name: str, strategy: str, backend: str) -> None:
    """The process of the rank ends in the middle of an operation, as far as others can see."""
    fork_server()
    leaks.baseline()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        expected = shoal.run(train_or_die, 3, backend, args=(strategy, name, -1), elastic=Elastic())
        elastic = Elastic(min_ranks=3, restarts=1)
        found = shoal.run(train_or_die, 3, backend, args=(strategy, name, 3), elastic=elastic)
    for mine, reference in zip(found, expected, strict=True):
        assert faults.same(mine, reference)


def train_or_die(strategy: str, name: str, victim_step: int) -> Any:
    """As `train`; the second rank kills itself inside of a forward."""
    membership = shoal.world().membership
    assert membership is not None
    is_doomed = membership.generation == 1 and shoal.world().rank == 1

    class Doomed(nn.LayerNorm):
        num_calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Doomed.num_calls += 1
            if is_doomed and Doomed.num_calls == 2 * victim_step:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().forward(x)

    return train(strategy, replace(CASES[name], norm=Doomed), -1, -1)["state"]


def test_a_loader_with_workers() -> None:
    """In processes, as threads cannot fork while others hold queues."""
    fork_server()
    leaks.baseline()
    elastic = Elastic(min_ranks=2, restarts=1)
    expected = shoal.run(load_or_die, 2, "shm", args=(-1,), elastic=Elastic())
    found = shoal.run(load_or_die, 2, "shm", args=(3,), elastic=elastic)
    assert [faults.same(*pair) for pair in zip(found, expected, strict=True)] == [True, True]


def load_or_die(victim_step: int) -> Any:
    """Workers that stay from epoch to epoch."""
    name = "stays"
    CASES[name] = Case(make_loader=workers)
    return train_or_die("zero1", name, victim_step)


# What is not possible ----------------------------------------------------------------------


def test_a_second_optimizer_is_refused() -> None:
    def attempt() -> None:
        module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        first, second = (torch.optim.SGD(each.parameters(), lr=0.1) for each in module)
        model, elastic = shoal.as_distributed(module, first, strategy="zero1", elastic=True)
        shoal.as_distributed(model, second)
        with elastic.attempt():
            pass

    with pytest.raises(ShoalError, match="make one, with a parameter group for each part"):
        shoal.run(attempt, 2, "memory")


@pytest.mark.parametrize("strategy", ["tensor", "pipeline"])
def test_strategies_that_divide_otherwise_are_refused(strategy: str) -> None:
    def wrap() -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped: Any = shoal.as_distributed
        wrapped(model, optimizer, strategy=strategy, elastic=True)

    with pytest.raises(ShoalError, match="choose one of ddp, zero1, zero2, zero3, fsdp"):
        shoal.run(wrap, 2, "memory")


# A rank and its buddy ----------------------------------------------------------------------


def train_and_save(
    folder: str, strategy: str, victims: tuple[int, ...], nth: int, options: dict[str, Any]
) -> Any:
    """Saves after the second step; the victims are lost together after the fourth."""
    first, membership = shoal.world().rank, shoal.world().membership
    is_doomed = first in victims and membership is not None and membership.generation == 1
    model, optimizer, loader, scheduler = faults.make_training(strategy, **options)
    fuse = None
    for _ in loader.epochs(EPOCHS):
        for inputs, numbers in loader:
            with optimizer.attempt():
                model.train_step(inputs, numbers, faults.loss_of)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
            if optimizer.has_committed and optimizer.num_committed == 2:
                with optimizer.attempt():
                    shoal.save(
                        folder, model, optimizer, scheduler=scheduler, sampler=loader, wait=True
                    )
            if is_doomed and fuse is None and optimizer.num_committed == 4:
                fuse = faults.light(nth)
    faults.light(-1)
    return [model.state_dict(), optimizer.state_dict(), optimizer.num_committed, loader.epoch]


@pytest.mark.usefixtures("_burning")
@pytest.mark.filterwarnings("always::shoal.errors.CheckpointWarning")
@pytest.mark.parametrize(
    ("strategy", "options", "victims"),
    [
        ("ddp", {}, (1, 2)),
        ("zero1", {}, (1, 2)),
        ("zero3", {}, (1, 2)),
        # The buddy is in the other replica, so what is left is one.
        ("hybrid", {"make_module": Chain, "dropout": 0.0, "tensor": 2, "zero": 1}, (1, 3)),
    ],
)
@pytest.mark.parametrize("restarts", [0, 2])
def test_the_way_back_to_a_checkpoint(
    strategy: str, options: dict[str, Any], victims: tuple[int, ...], restarts: int, tmp_path: Path
) -> None:
    """Four ranks, of which one and its buddy are lost at the same operation."""
    args = str(tmp_path / "first"), strategy, (), -1, options
    expected = shoal.run(train_and_save, 4, "memory", args=args, elastic=Elastic())
    args = str(tmp_path / "second"), strategy, victims, 3, options
    elastic = Elastic(restarts=restarts)
    with pytest.warns(CheckpointWarning, match="training goes back to .*, to step 2"):
        found = shoal.run(train_and_save, 4, "memory", args=args, elastic=elastic)
    assert len(found) == 2 + restarts
    assert [each[2:] for each in found] == [expected[0][2:]] * len(found)
    if restarts:
        assert all(faults.same(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.usefixtures("_burning")
def test_without_a_checkpoint_it_is_told_what_was_lost(tmp_path: Path) -> None:
    """And what to do against it."""

    def run() -> Any:
        model, optimizer, loader, _ = faults.make_training("zero3")
        for inputs, numbers in loader:
            with optimizer.attempt():
                model.train_step(inputs, numbers, faults.loss_of)
                if shoal.world().rank in (0, 1) and optimizer.num_committed == 1:
                    faults.light(2)
                optimizer.step()

    told = r"ranks 0, 1 after step \d.*lost together.*\. Save one now and then with shoal.save"
    with pytest.raises(ShoalError, match=told):
        shoal.run(run, 4, "memory", elastic=Elastic())
