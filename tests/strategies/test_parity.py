"""Ranks train to the parameters of one process: every strategy, optimizer, model and world size.

The whole matrix is for `make test-full`. `make test` runs a part in which every pair of values
of two factors occurs (each model with each optimizer, each strategy with each world size, ...).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pools
import shoal
from strategies.models import (
    HUGGING_FACE,
    TASKS,
    has_transformers,
    random_numbers,
    random_tokens,
)
from strategies.training import (
    MODES,
    OPTIMIZERS,
    STRATEGIES,
    Case,
    compare,
    train_rank,
    train_rank_of_pool,
)

WORLD_SIZES = (1, 2, 3, 4, 5)
FACTORS: tuple[Sequence[object], ...] = (
    tuple(TASKS),
    tuple(OPTIMIZERS),
    STRATEGIES,
    WORLD_SIZES,
    MODES,
)
Choice = tuple[object, ...]


def pairs_of(choice: Choice) -> set[tuple[int, object, int, object]]:
    """The pairs of values that a choice of one value of each factor covers."""
    places = itertools.combinations(enumerate(choice), 2)
    return {(i, left, j, right) for (i, left), (j, right) in places}


def covering(factors: Sequence[Sequence[object]]) -> Iterator[Choice]:
    """Few choices that cover all pairs: for each pair of the first two factors the best rest."""
    missing = {
        (i, left, j, right)
        for (i, lefts), (j, rights) in itertools.combinations(enumerate(factors), 2)
        for left, right in itertools.product(lefts, rights)
    }
    for first, second in itertools.product(*factors[:2]):
        candidates = [(first, second, *rest) for rest in itertools.product(*factors[2:])]
        # Among equals the cheapest: few ranks.
        best = max(candidates, key=lambda choice: (len(pairs_of(choice) & missing), -choice[3]))
        missing -= pairs_of(best)
        yield best
    assert not missing


FAST = set(covering(FACTORS))


def cases() -> Iterator[object]:
    needs_package = pytest.mark.skipif(not has_transformers(), reason="needs transformers")
    for choice in itertools.product(*FACTORS):
        task, optimizer, strategy, ranks, mode = choice
        case = Case(task, optimizer, mode, ranks, strategy)
        marks = [] if choice in FAST else [pytest.mark.full]
        if task in HUGGING_FACE:
            marks.append(needs_package)
        yield pytest.param(case, id=str(case), marks=marks)


def test_every_pair_is_tried_by_default() -> None:
    pairs = set().union(*map(pairs_of, FAST))
    assert len(FAST) < 130
    for (i, lefts), (j, rights) in itertools.combinations(enumerate(FACTORS), 2):
        assert {(i, a, j, b) for a, b in itertools.product(lefts, rights)} <= pairs


@pytest.mark.parametrize("case", list(cases()))
def test_equals_one_process(case: Case) -> None:
    states = shoal.run(train_rank, case.ranks, "memory", args=(case,), timeout=60)
    compare(case, states)


# Processes ----------------------------------------------------------------------------------


def over_processes() -> Iterator[object]:
    fast = [
        ("shm", 2, "gpt", "adamw", "accumulate"),
        ("shm", 2, "experts", "sgd", "plain"),
        ("shm", 2, "mlp", "muon", "clip"),
        ("shm", 4, "unused", "adamw", "plain"),
        ("gloo", 3, "gpt", "sgd", "clip"),
        ("mpi", 2, "mlp", "adamw", "plain"),
    ]
    full = [
        ("shm", 4, "encoder_decoder", "lbfgs", "plain"),
        ("shm", 2, "resnet", "sgd", "accumulate"),
        ("shm", 2, "llama", "adamw", "clip"),
        ("gloo", 3, "experts", "adamw", "accumulate"),
        ("gloo", 2, "adapter", "rmsprop", "plain"),
        ("mpi", 2, "gpt", "adamw", "accumulate"),
        ("mpi", 3, "experts", "sgd", "clip"),
    ]
    for (backend, ranks, task, optimizer, mode), strategy in itertools.product(
        fast + full, STRATEGIES
    ):
        # With the more costly ones each strategy runs somewhere, not everywhere.
        is_fast = (backend, ranks, task, optimizer, mode) in fast and (
            (backend == "shm" and strategy in ("ddp", "zero3")) or strategy == "zero2"
        )
        marks = [] if is_fast else [pytest.mark.full]
        if backend == "mpi":
            marks.append(pytest.mark.mpi)
        if task in HUGGING_FACE and not has_transformers():
            marks.append(pytest.mark.skip(reason="needs transformers"))
        case = Case(task, optimizer, mode, ranks, strategy)
        yield pytest.param(backend, case, id=f"{backend}-{case}", marks=marks)


@pytest.mark.parametrize(("backend", "case"), list(over_processes()))
def test_equals_one_process_over_processes(backend: str, case: Case) -> None:
    states = pools.Team(backend, case.ranks).run(train_rank_of_pool, case)
    compare(case, states, is_exact=backend == "shm")


# S6, as it is written: 4 ranks and 10 epochs give the parameters of one -------------------------

NUM_SAMPLES, EPOCHS, BATCH = 64, 10, 16


def train_epochs(strategy: str | None) -> dict[str, Tensor]:
    """Ten epochs in float32 over one small set of samples; None: one process, no shoal."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(11, 23), nn.ReLU(), nn.Linear(23, 5))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rank, size = 0, 1
    if strategy is not None:
        rank, size = shoal.world().rank, shoal.world().size
        model, optimizer = shoal.as_distributed(model, optimizer, strategy=strategy)
    inputs = random_numbers(1, NUM_SAMPLES, 11, dtype=torch.float32)
    labels = random_tokens(1, 5, NUM_SAMPLES)
    for epoch in range(EPOCHS):
        order = torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(epoch))
        for chosen in order.split(BATCH):
            own = chosen.chunk(size)[rank]
            optimizer.zero_grad()
            F.cross_entropy(model(inputs[own]), labels[own]).backward()
            optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_four_ranks_and_ten_epochs_give_the_parameters_of_one(strategy: str) -> None:
    expected = train_epochs(None)
    states = shoal.run(train_epochs, 4, "memory", args=(strategy,), timeout=60)
    for state in states:
        for name, value in state.items():
            assert torch.equal(value, states[0][name])
            assert (value - expected[name]).abs().max() < 1e-5, name
