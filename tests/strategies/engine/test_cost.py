"""What a step costs: bytes and calls of each collective, and memory, against theory.

With P bytes of parameters on N ranks a ring moves (N-1)/N P per rank for a gather or a
reduce-scatter and twice that for an all-reduce. ZeRO keeps P for parameters, P for gradients and
K P for an optimizer's state, each of them divided by N where it is sharded.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from strategies.loops import each, gathered, run
from strategies.training import STRATEGIES

GATHERING = ("zero3", "fsdp")
SHARDED_GRADIENTS = ("zero2", "zero3", "fsdp")
WIDTHS = tuple(64 + 4 * index for index in range(17))
MIN_GROUP_BYTES = 20_000


@dataclass(frozen=True)
class Cost:
    """What one rank saw; bytes are relative to the model's parameters.

    Attributes:
        num_groups: How many groups the parameters are in.
        largest: Bytes of the largest group.
        calls: Calls of each collective, for each step.
        bytes: Bytes of each collective, for each step.
        held: Parameters, gradients and state between backward and step, for each step.
        peak: The most parameters and the most gradients seen during backward, for each step.
        spare: Bytes of buffers kept for later, after the last step.
    """

    num_groups: int
    largest: float
    calls: list[dict[str, int]]
    bytes: list[dict[str, float]]
    held: list[tuple[float, float, float]]
    peak: list[tuple[float, float]]
    spare: float


def chain(widths: Sequence[int]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(*pair) for pair in itertools.pairwise(widths)))


def measure(strategy: str, steps: int = 3, widths: Sequence[int] = WIDTHS, **options: Any) -> Cost:
    """Trains a chain of layers and looks."""
    module = chain(widths)
    total = sum(parameter.nbytes for parameter in module.parameters())
    optimizer: Any = torch.optim.AdamW(module.parameters())
    options = {"min_group_bytes": MIN_GROUP_BYTES, "check_every": 0, **options}
    model, optimizer = shoal.as_distributed(module, optimizer, strategy=strategy, **options)
    engine, world = model.engine, shoal.world()
    now = [0.0, 0.0]

    def look(_: object) -> None:
        now[0] = max(now[0], sum(group.num_bytes_held for group in engine.groups) / total)
        now[1] = max(now[1], sum(each.num_bytes_held for each in engine.gradients) / total)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(look)
    cost = Cost(
        len(engine.groups),
        max(group.layout.num_elements * 4 for group in engine.groups) / total,
        *([] for _ in range(4)),
        spare=0.0,
    )
    for _ in range(steps):
        world.backend.reset_stats()
        now[:] = [0.0, 0.0]
        optimizer.zero_grad()
        model(torch.ones(2, widths[0])).sum().backward()
        optimizer.step()
        counters = world.stats()
        cost.calls.append({name: counter.calls for name, counter in counters.items()})
        cost.bytes.append({name: c.num_bytes / total for name, c in counters.items()})
        cost.held.append((*held_bytes(engine, total), state_bytes(optimizer) / total))
        cost.peak.append((now[0], now[1]))
    return Cost(**{**vars(cost), "spare": spare_bytes(engine) / total})


@functools.cache
def costs(strategy: str, ranks: int) -> list[Cost]:
    """What each rank saw in a few steps; many tests look at the same."""
    return run(measure, strategy, ranks=ranks)


def held_bytes(engine: Any, total: int) -> tuple[float, float]:
    parameters = sum(group.num_bytes_held for group in engine.groups)
    return parameters / total, sum(each.num_bytes_held for each in engine.gradients) / total


def state_bytes(optimizer: Any) -> int:
    values = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))


def spare_bytes(engine: Any) -> int:
    """Buffers that wait in pools to be used again."""
    pools = {id(gradients.memory.pool): gradients.memory.pool for gradients in engine.gradients}
    free = [buffers for pool in pools.values() for buffers in pool._free.values()]
    return sum(buffer.nbytes for buffers in free for buffer in buffers)


def wire_bytes(moved: dict[str, float], ranks: int) -> float:
    """What one rank sends over a ring, relative to the model's parameters."""
    share = (ranks - 1) / ranks
    one_way = moved.get("all_gather", 0.0) + moved.get("reduce_scatter", 0.0)
    return share * (one_way + 2 * moved.get("all_reduce", 0.0))


# Bytes and calls ------------------------------------------------------------------------------

EXPECTED_WIRE = {"ddp": 2.0, "zero1": 3.0, "zero2": 2.0, "zero3": 3.0, "fsdp": 3.0}


@each
@pytest.mark.parametrize("ranks", [2, 5, 8])
def test_bytes_moved_are_those_of_theory(strategy: str, ranks: int) -> None:
    for cost in costs(strategy, ranks):
        for moved in cost.bytes:
            found = wire_bytes(moved, ranks) / ((ranks - 1) / ranks)
            assert found == pytest.approx(EXPECTED_WIRE[strategy], rel=0.02)


def test_zero3_moves_one_and_a_half_times_the_bytes_of_ddp() -> None:
    ddp, zero3 = (costs(name, 4)[0].bytes[-1] for name in ("ddp", "zero3"))
    assert wire_bytes(zero3, 4) / wire_bytes(ddp, 4) == pytest.approx(1.5, rel=0.02)


@each
def test_collectives_are_those_of_the_strategy(strategy: str) -> None:
    for cost in costs(strategy, 4):
        for calls in cost.calls[1:]:  # the first step also learns
            moving = {name for name in calls if name != "barrier"}
            expected = {
                "ddp": {"all_reduce"},
                "zero1": {"all_reduce", "all_gather"},
            }.get(strategy, {"reduce_scatter", "all_gather"})
            assert moving == expected


@each
def test_each_group_is_reduced_once_and_gathered_once_a_pass(strategy: str) -> None:
    for cost in costs(strategy, 4):
        groups = cost.num_groups
        assert groups > 5
        for calls in cost.calls:
            assert calls.get("all_reduce", 0) + calls.get("reduce_scatter", 0) == groups
            assert calls.get("all_gather", 0) <= groups * (2 if strategy in GATHERING else 1)
            # Ranks vote on rounds and agree on the end of a pass: headers, and few of them.
            assert calls.get("barrier", 0) <= 6


def test_one_rank_moves_nothing() -> None:
    for strategy in STRATEGIES:
        (cost,) = costs(strategy, 1)
        assert wire_bytes(cost.bytes[-1], 1) == 0


@gathered
def test_a_thousand_tiny_layers_take_fifty_gathers_a_pass(strategy: str) -> None:
    """256 x 256 as in the promise would take minutes here; grouping is by share of the total."""

    def count() -> tuple[int, int]:
        cost = measure(strategy, 2, [8] * 1001, min_group_bytes=0)
        return cost.num_groups, cost.calls[-1]["all_gather"]

    for groups, gathers in run(count, ranks=2):
        assert 40 <= groups <= 50
        assert gathers <= 2 * 50


def test_evaluation_gathers_each_group_once() -> None:
    def count() -> tuple[int, int]:
        module = chain(WIDTHS)
        model: Any = shoal.as_distributed(module, strategy="zero3", min_group_bytes=MIN_GROUP_BYTES)
        with torch.no_grad():
            model(torch.ones(2, WIDTHS[0]))
            shoal.world().backend.reset_stats()
            model(torch.ones(2, WIDTHS[0]))
        return shoal.world().stats()["all_gather"].calls, len(model.engine.groups)

    assert all(calls == groups for calls, groups in run(count, ranks=2))


def test_accumulation_moves_gradients_once() -> None:
    def count(strategy: str) -> dict[str, int]:
        module = chain(WIDTHS)
        model: Any = shoal.as_distributed(
            module, strategy=strategy, min_group_bytes=MIN_GROUP_BYTES
        )
        shoal.world().backend.reset_stats()
        with model.no_sync():
            for _ in range(3):
                model(torch.ones(2, WIDTHS[0])).sum().backward()
        model(torch.ones(2, WIDTHS[0])).sum().backward()
        counters = shoal.world().stats()
        return {name: counter.calls for name, counter in counters.items()}

    groups = costs("zero2", 2)[0].num_groups
    for strategy in STRATEGIES:
        calls = run(count, strategy, ranks=2)[0]
        assert calls.get("all_reduce", 0) + calls.get("reduce_scatter", 0) == groups


# Memory ---------------------------------------------------------------------------------------


def formula(strategy: str, ranks: int) -> tuple[float, float, float]:
    """Parameters, gradients and AdamW's two moments, relative to the parameters."""
    share = 1 / ranks
    return (
        share if strategy in GATHERING else 1.0,
        share if strategy in SHARDED_GRADIENTS else 1.0,
        2 * (1.0 if strategy == "ddp" else share),
    )


@each
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_memory_held_between_steps_is_that_of_the_formula(strategy: str, ranks: int) -> None:
    """Padding is nobody's state: the last rank may have a little less than its share."""
    expected = formula(strategy, ranks)
    measured = costs(strategy, ranks)
    for cost in measured:
        for found in cost.held:
            assert sum(found) <= 1.05 * sum(expected)
    for step in range(len(measured[0].held)):
        means = [
            sum(parts) / ranks for parts in zip(*(c.held[step] for c in measured), strict=True)
        ]
        assert means == pytest.approx(expected, rel=0.05)


@each
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_memory_during_backward_is_the_formula_and_the_groups_in_flight(
    strategy: str, ranks: int
) -> None:
    parameters, gradients, _ = formula(strategy, ranks)
    for cost in costs(strategy, ranks):
        # One in use, one on its way, one on its way out.
        in_flight = 3 * cost.largest if ranks > 1 else cost.largest
        for peak in cost.peak:
            assert peak[0] <= 1.05 * parameters + in_flight
            assert peak[1] <= 1.05 * gradients + in_flight


@each
@pytest.mark.parametrize("ranks", [2, 8])
def test_memory_kept_in_spare_buffers_is_that_of_the_groups_in_flight(
    strategy: str, ranks: int
) -> None:
    for cost in costs(strategy, ranks):
        assert cost.spare <= 3 * cost.largest


@each
def test_memory_is_the_same_in_each_of_fifty_steps(strategy: str) -> None:
    for cost in run(measure, strategy, 50, WIDTHS[:7], ranks=2):
        assert len(set(cost.held)) == 1
        assert len(set(cost.peak[1:])) == 1


@gathered
def test_an_eighth_of_everything_on_eight_ranks(strategy: str) -> None:
    for cost in costs(strategy, 8):
        assert sum(cost.held[-1]) <= 1.05 * 4 / 8


def test_state_of_other_optimizers_is_divided_too() -> None:
    def hold(name: str) -> float:
        module = chain(WIDTHS)
        total = sum(parameter.nbytes for parameter in module.parameters())
        plain: Any = getattr(torch.optim, name)(module.parameters(), lr=0.01)
        model, optimizer = shoal.as_distributed(module, plain, strategy="zero1")
        model(torch.ones(2, WIDTHS[0])).sum().backward()
        optimizer.step()
        return state_bytes(optimizer) / total

    for name, factor in {"Adagrad": 1, "RMSprop": 1, "Adamax": 2}.items():
        for found in run(hold, name, ranks=4):
            assert found == pytest.approx(factor / 4, rel=0.05)


def test_whole_parameters_are_spread_evenly() -> None:
    """An optimizer that looks at whole parameters: no rank has much more than its share."""

    def hold() -> float:
        module = chain([64] * 33)
        matrices = [p for p in module.parameters() if p.dim() == 2]
        others = [p for p in module.parameters() if p.dim() == 1]
        both: Any = [torch.optim.Muon(matrices), torch.optim.AdamW(others)]
        model, both = shoal.as_distributed(module, both, strategy="zero1", min_group_bytes=70_000)
        model(torch.ones(2, 64)).sum().backward()
        for optimizer in both:
            optimizer.step()
        total = sum(parameter.nbytes for parameter in module.parameters())
        return sum(state_bytes(optimizer) for optimizer in both) / total

    found = run(hold, ranks=4)
    assert max(found) <= 1.1 * sum(found) / 4
