"""What autograd saves in blocks goes to a store and comes back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.activations import Policy
from shoal.strategies.recomputation.stores.host_store import HostStore
from shoal.strategies.recomputation.stores.store import Moved, MovedMemory, Moving, MovingStore
from strategies.recomputation.recomputed import (
    FOUR,
    DropBlock,
    assert_equal_states,
    compare,
    seed_all,
)

pytestmark = pytest.mark.timeout(120)


class CopyingStore(MovingStore):
    """Moves memory to other memory, as a GPU's to the host's."""

    takes_products = True

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def move(self, memory: MovedMemory, data: Tensor, place: str) -> bool:
        memory.place = data.clone()
        self.num_bytes += data.nbytes
        return True

    def fetch(self, memory: MovedMemory) -> Tensor:
        return memory.place.clone()


@pytest.fixture
def copying(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every store is one that moves everything."""
    monkeypatch.setattr("shoal.strategies.model.make_store", lambda *_: CopyingStore())


@pytest.mark.usefixtures("copying")
@pytest.mark.parametrize(
    ("kind", "strategy", "options"),
    [
        ("drop", "ddp", {}),
        ("gpt", "zero3", {}),
        ("gpt", "tensor", {"tensor": 2, "zero": 3}),
        ("drop", "pipeline", {"schedule": "1f1b"}),
        ("drop", "pipeline", {"schedule": "interleaved", "pipeline": 2}),
        ("drop", "pipeline", {"schedule": "zero-bubble"}),
        ("drop", "hybrid", {"tensor": 2, "pipeline": 2}),
    ],
)
@pytest.mark.parametrize("recompute", ["none", pytest.param("selective", marks=pytest.mark.full)])
def test_everything_moves(
    kind: str, strategy: str, options: dict[str, Any], recompute: str
) -> None:
    compare(FOUR, kind, strategy, Policy(recompute, "host"), **options)


def test_views_share_memory_and_writes_are_noticed() -> None:
    store = CopyingStore()
    whole = torch.arange(12.0)
    first, second = store.put(whole.view(3, 4).t(), "a"), store.put(whole[2:6], "a")
    assert isinstance(first, Moved)
    assert store.num_bytes == 48
    back, part = store.get(first), store.get(second)
    assert torch.equal(back, whole.view(3, 4).t())
    assert back.stride() == (1, 4)
    assert part.tolist() == [2.0, 3.0, 4.0, 5.0]
    assert back.untyped_storage().data_ptr() == part.untyped_storage().data_ptr()


def test_memory_that_is_used_again_is_not_taken_for_the_old() -> None:
    store = CopyingStore()
    kept = []
    for number in range(50):  # freed and allocated anew, most likely at the same address
        kept.append(store.put(torch.full((64,), float(number)), "a"))
    assert [int(store.get(each)[0]) for each in kept] == list(range(50))


def test_a_parameter_that_was_written_to_is_an_error() -> None:
    layer = nn.Linear(4, 4)
    x = torch.ones(2, 4, requires_grad=True)
    own = {each.untyped_storage()._cdata for each in layer.parameters()}
    with Moving(CopyingStore(), own, "a"):
        output = layer(x)
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


# Host memory ------------------------------------------------------------------------------------


def offloaded(activations: Any) -> tuple[dict[str, Tensor], str]:
    seed_all(0)
    module = nn.Sequential(*(DropBlock(64) for _ in range(3)))
    model = shoal.as_distributed(module, strategy="ddp", activations=activations)
    seed_all(1)
    model(torch.randn(8, 64)).square().mean().backward()
    return {name: each.grad.clone() for name, each in model.named_parameters()}, model.describe()


def test_on_a_cpu_nothing_moves_and_that_is_said() -> None:
    plain = shoal.run(offloaded, 2, "memory", args=(None,))
    host = shoal.run(offloaded, 2, "memory", args=("offload",))
    assert_equal_states(host, plain)
    assert "everything is kept; the model is in host memory already" in host[0][1]


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_on_a_gpu_memory_moves_and_gradients_are_the_same(recompute: str) -> None:
    def gradients(activations: Any) -> tuple[list[Tensor], int]:
        seed_all(0)
        module = nn.Sequential(*(DropBlock(512) for _ in range(4))).cuda()
        model = shoal.as_distributed(module, strategy="ddp", activations=activations)
        x = torch.randn(1024, 512, device="cuda")
        for _ in range(2):  # once to warm up
            model.zero_grad()
            seed_all(1)
            before = torch.cuda.memory_allocated()
            output = model(x)
            torch.cuda.synchronize()
            held = torch.cuda.memory_allocated() - before
            output.square().mean().backward()
        return [each.grad.clone() for each in model.parameters()], held

    def both() -> tuple[bool, int, int]:
        plain, most = gradients(None if recompute == "none" else recompute)
        host, least = gradients(Policy(recompute, "host"))
        return all(map(torch.equal, plain, host)), most, least

    ((same, most, least),) = shoal.run(both, 1, "nccl")
    assert same
    # The last copies are let go of when the next begins.
    assert least < most


@pytest.mark.gpu
def test_a_write_while_a_copy_is_under_way_is_an_error() -> None:
    store = HostStore(torch.device("cuda"))
    tensor = torch.ones(1 << 24, device="cuda")
    kept = store.put(tensor, "a")
    tensor.add_(1)
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        store.get(kept)


@pytest.mark.gpu
def test_a_host_that_is_ahead_of_its_gpu_saves_memory_all_the_same() -> None:
    size, store = 1 << 24, HostStore(torch.device("cuda"))
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        before, kept = torch.cuda.memory_allocated(), []
        for number in range(24):  # nothing here waits for the GPU
            store.begin_call()
            made = torch.full((size,), number, dtype=torch.uint8, device="cuda")
            kept.append(store.put(made, "a"))
            del made
        assert torch.cuda.max_memory_allocated() - before <= 4 * size
        for number in reversed(range(24)):
            assert bool((store.get(kept.pop()) == number).all())
        assert torch.cuda.max_memory_allocated() - before <= 5 * size
