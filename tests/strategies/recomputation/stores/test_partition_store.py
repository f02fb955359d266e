"""Inputs of blocks in parts on the ranks of a tensor group."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import shoal
from pools import Team
from shoal.activations import Policy
from shoal.errors import MismatchError
from shoal.strategies.recomputation.stores.partition_store import PartitionStore
from shoal.strategies.recomputation.stores.store import Moved
from strategies.recomputation.recomputed import FOUR, assert_equal_states, compare, seed_all

pytestmark = pytest.mark.timeout(120)
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("gpt", {"tensor": 2, "sequence_parallel": True}),
        ("drop", {"tensor": 3, "data": 1}),
    ],
)
def test_tensor(kind: str, options: dict[str, Any]) -> None:
    """Where positions are shared out, inputs differ between the ranks and stay where they are."""
    ranks = options.get("data", 2) * options["tensor"]
    compare(Team("memory", ranks), kind, "tensor", Policy("selective", "partition"), **options)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero-bubble"])
def test_hybrid(schedule: str) -> None:
    options = {"tensor": 2, "pipeline": 2, "schedule": schedule}
    compare(FOUR, "drop", "hybrid", "partition", **options)


@pytest.mark.parametrize("backend", ["shm", "gloo", pytest.param("mpi", marks=pytest.mark.full)])
def test_processes(backend: str) -> None:
    compare(Team(backend, 3), "drop", "tensor", "partition")


# The store --------------------------------------------------------------------------------------


def store_and_return(shape: list[int], dtype: torch.dtype, order: list[int]) -> list[Any]:
    store = PartitionStore(shoal.world().backend)
    generator = torch.Generator().manual_seed(7)
    tensor = torch.randint(0, 2, shape, generator=generator).to(dtype).permute(order)
    kept = store.put(tensor, "x")
    back = store.get(kept)
    again = store.get(kept)  # as in a backward of two halves
    same = torch.equal(back, tensor) and torch.equal(again, tensor)
    held = store.held(kept)
    assert held is not None
    return [same, back.stride() == tensor.stride(), back.dtype is dtype, held.nbytes]


@settings(max_examples=20)
@given(
    shape=st.lists(st.integers(0, 5), min_size=0, max_size=3),
    dtype=st.sampled_from(DTYPES),
    ranks=st.integers(1, 4),
    data=st.data(),
)
def test_all_sizes_and_layouts(shape: list[int], dtype: torch.dtype, ranks: int, data: Any) -> None:
    order = data.draw(st.permutations(range(len(shape))))
    found = shoal.run(store_and_return, ranks, "memory", args=(shape, dtype, order))
    assert all(all(each[:3]) for each in found)
    total = torch.Size(shape).numel() * dtype.itemsize
    held = [each[3] - (8 if total else 0) for each in found]
    assert max(held) - min(held) <= 1
    assert sum(held) == total


def different_inputs() -> list[Any]:
    world = shoal.world()
    store = PartitionStore(world.backend)
    own = torch.full((6,), float(world.rank))
    view = torch.arange(12.0)[:6]
    kept = [store.put(own, "own"), store.put(view, "view"), store.put(torch.ones(6), "equal")]
    same = [store.get(each) is tensor for each, tensor in zip(kept, (own, view), strict=False)]
    later = store.put(torch.full((6,), float(world.rank)), "equal")
    with pytest.raises(MismatchError, match="have different inputs of a block"):
        store.get(later)
    return [*same, isinstance(kept[2], Moved)]


def test_what_differs_between_ranks_stays_or_is_an_error() -> None:
    assert shoal.run(different_inputs, 3, "memory") == [[True] * 3] * 3


def one_memory() -> int:
    """A tensor that several blocks take is kept once; one that was written to is another."""
    store = PartitionStore(shoal.world().backend)
    tensor = torch.ones(8)
    first, second = store.put(tensor, "a"), store.put(tensor.view(2, 4), "b")
    tensor.add_(1)
    third = store.put(tensor, "a")
    assert store.get(second).tolist() == torch.ones(2, 4).tolist()
    assert store.get(third).tolist() == [2.0] * 8
    return len({id(each.memory) for each in (first, second, third)})


def test_memory_is_kept_once() -> None:
    assert shoal.run(one_memory, 2, "memory") == [2, 2]


# In training ------------------------------------------------------------------------------------


class Structured(nn.Module):
    """Takes and gives structures with tensors of several kinds; rows are uneven."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, state: dict[str, Any], *, extra: tuple[Tensor, str]) -> dict[str, Any]:
        mask, name = extra
        assert name == "mask"
        x, count = state["pair"]
        state["seen"] = True  # the caller's dict: the second call must not see it
        y = x + self.down(torch.tanh(self.up(x))) * mask
        return {"pair": (y, count + 1)}


class Structures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Structured() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        state: dict[str, Any] = {"pair": (x * 1.0, torch.tensor(0))}
        for block in self.blocks:
            state = block(state, extra=(torch.ones(6) > 0, "mask"))
        return state["pair"][0]


def structured(activations: Any) -> tuple[dict[str, Tensor], int]:
    seed_all(0)
    plan = {"blocks.*.up": "column", "blocks.*.down": "row"}
    model = shoal.as_distributed(
        Structures(), strategy="tensor", plan=plan, activations=activations
    )
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1)).requires_grad_()
    output = model(x)
    held = shoal.world().stats().memory["activations"].current if activations else 0
    output.square().mean().backward()
    return dict(model.full_gradients()) | {"x": x.grad}, held


def test_structures_and_memory() -> None:
    plain = shoal.run(structured, 3, "memory", args=(None,))
    parts = shoal.run(structured, 3, "memory", args=("partition",))
    assert_equal_states(parts, plain)
    for _, held in parts:  # a third of x, a sum of its bits, the mask and the counter
        assert held == 3 * (5 * 6 * 4 // 3 + 8 + 6 + 8)


class Unsteady(nn.Module):
    """What it gives differs between the ranks from the second call on."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Structured() for _ in range(2))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = x * (random.random() if self.calls > 1 else 1.0)
        for block in self.blocks:
            x = block({"pair": (x, 0)}, extra=(torch.ones(6), "mask"))["pair"][0]
        return x


def train_unsteadily() -> str:
    plan = {"blocks.*.up": "column", "blocks.*.down": "row"}
    model = shoal.as_distributed(Unsteady(), strategy="tensor", plan=plan, activations="partition")
    random.seed(shoal.world().rank)
    x = torch.ones(5, 6, requires_grad=True)
    model(x).sum().backward()
    try:
        model(x).sum().backward()
    except MismatchError as error:
        return str(error)
    return "no error"


def test_ranks_that_differ_later() -> None:
    for text in shoal.run(train_unsteadily, 2, "memory"):
        assert "the ranks of a tensor group have different inputs of a block" in text
