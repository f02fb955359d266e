"""Parameters, state and attributes of a wrapped model, read and changed from outside."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.strategies import ShardedModel
from strategies.loops import (
    State,
    assert_same,
    data,
    distinct,
    each,
    gathered,
    local,
    momentum,
    num_present,
    one_process,
    one_step,
    run,
    seeded,
    whole_state,
    wrapped,
)
from strategies.models import GPT, ResNet


@each
def test_names_shapes_and_attributes_are_the_module_s_own(strategy: str) -> None:
    def look() -> None:
        module: Any = seeded(GPT)
        names = [name for name, _ in module.named_parameters()]
        shapes = [p.shape for p in module.parameters()]
        count = sum(p.numel() for p in module.parameters())
        module.note = "mine"
        model: Any = shoal.as_distributed(module, strategy=strategy, min_group_bytes=300)
        assert isinstance(model, nn.Module)
        assert isinstance(model, ShardedModel)
        assert [name for name, _ in model.named_parameters()] == names
        assert [p.shape for p in model.parameters()] == shapes
        assert sum(p.numel() for p in model.parameters()) == count
        assert all(isinstance(p, nn.Parameter) for p in model.parameters())
        assert [name for name, _ in model.named_modules()] == [
            name for name, _ in module.named_modules()
        ]
        assert model.note == "mine"
        assert model.head.weight is model.embedding.weight
        assert model.get_parameter("norm.weight") is module.norm.weight
        assert model.module is module
        assert len(model.blocks) == 2
        with pytest.raises(AttributeError):
            _ = model.nobody
        assert "GPT" in repr(model)

    run(look)


@each
def test_the_original_module_stays_callable(strategy: str) -> None:
    def call() -> None:
        model, _ = wrapped(strategy)
        x, _ = data(0)
        expected = seeded()(x)
        for way in (model, model.module, model.forward):
            assert torch.allclose(way(x), expected, rtol=0, atol=1e-12)
        first = model.layers[0](x)  # a part of it, by itself
        assert torch.allclose(first, seeded().layers[0](x), rtol=0, atol=1e-12)

    run(call)


@each
def test_ranks_start_from_rank_0_s_weights(strategy: str) -> None:
    def look() -> State:
        torch.manual_seed(shoal.world().rank)
        module = ResNet().double()
        for buffer in module.buffers():
            buffer.fill_(shoal.world().rank + 1)
        return shoal.as_distributed(module, strategy=strategy).state_dict()

    torch.manual_seed(0)
    expected = ResNet().double()
    for buffer in expected.buffers():
        buffer.fill_(1)
    for state in run(look):
        assert_same(state, whole_state(expected), 0.0)


@each
def test_full_parameters_are_whole_and_changes_are_kept(strategy: str) -> None:
    def change() -> State:
        model, optimizer = wrapped(strategy)
        one_step(model, optimizer, local(0))
        with model.full_parameters():
            found = {name: p.detach().clone() for name, p in model.named_parameters()}
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.5)
        assert_same(found, one_process([0]))
        one_step(model, optimizer, local(1))
        return model.state_dict()

    model = seeded()
    optimizer = momentum(model)
    one_step(model, optimizer, data(0))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    one_step(model, optimizer, data(1))
    for state in run(change):
        assert_same(state, whole_state(model))


@gathered
def test_full_parameters_may_be_nested_and_left_by_an_error(strategy: str) -> None:
    def nest() -> State:
        model, _ = wrapped(strategy)
        with model.full_parameters(), torch.no_grad():
            with model.full_parameters():
                model.layers[0].bias.fill_(3.0)
            assert model.layers[0].bias.eq(3.0).all()
            model(data(0)[0])
            model.layers[1].bias.fill_(4.0)
        with contextlib.suppress(KeyError), model.full_parameters():
            raise KeyError
        assert num_present(model) == 0
        return model.state_dict()

    for state in run(nest):
        assert state["layers.0.bias"].eq(3.0).all()
        assert state["layers.1.bias"].eq(4.0).all()


@each
def test_state_goes_out_and_in_under_plain_names(strategy: str) -> None:
    def exchange() -> None:
        model, optimizer = wrapped(strategy, GPT)
        tokens = torch.arange(12).view(2, 6)
        plain = seeded(GPT)
        state = model.state_dict()
        assert list(state) == list(plain.state_dict())
        assert_same(state, whole_state(plain), 0.0)
        assert model.full_state_dict().keys() == state.keys()
        # What was handed out is the user's: training does not change it.
        optimizer.zero_grad()
        model(tokens).square().mean().backward()
        optimizer.step()
        assert_same(state, whole_state(plain), 0.0)
        # A plain model's state is loaded, and a plain model loads ours.
        other = seeded(GPT)
        other.load_state_dict({name: value + 0.25 for name, value in state.items()})
        result = model.load_state_dict(other.state_dict())
        assert not result.missing_keys
        assert not result.unexpected_keys
        assert torch.allclose(model(tokens), other(tokens), rtol=0, atol=1e-12)
        plain.load_state_dict(model.state_dict())
        assert torch.equal(plain(tokens), other(tokens))

    run(exchange)


@distinct
def test_a_state_that_does_not_fit(strategy: str) -> None:
    def load() -> None:
        model, _ = wrapped(strategy)
        state = model.state_dict()
        short = {name: value for name, value in state.items() if name != "layers.0.bias"}
        with pytest.raises(RuntimeError, match=r"layers\.0\.bias"):
            model.load_state_dict(short)
        assert model.load_state_dict(short, strict=False).missing_keys == ["layers.0.bias"]
        with pytest.raises(RuntimeError, match="size mismatch"):
            model.load_state_dict({**state, "layers.0.bias": torch.zeros(99)})
        assert_same(model.state_dict(), state, 0.0)

    run(load)


def test_state_of_buffers() -> None:
    def look() -> None:
        module = seeded(ResNet)
        module.register_buffer("scratch", torch.ones(3), persistent=False)
        model: Any = shoal.as_distributed(module, strategy="zero3")
        assert "scratch" not in model.state_dict()
        assert "stem.1.running_mean" in model.state_dict()
        assert "scratch" in dict(model.named_buffers())

    run(look)


READS: dict[str, Callable[[nn.Parameter], Any]] = {
    "norm": lambda p: p.norm(),
    "repr": repr,
    "str": str,
    "format": lambda p: f"{p.sum():.3f}",
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "data": lambda p: p.data.clone(),
    "detach": lambda p: p.detach().clone(),
    "numpy": lambda p: p.detach().numpy().copy(),
    "tolist": lambda p: p.tolist(),
    "index": lambda p: p[0].clone(),
    "iterate": lambda p: [row.sum().item() for row in p],
    "add": lambda p: p + 1,
    "add_to": lambda p: 1 + p,
    "matmul": lambda p: p.T @ p if p.dim() == 2 else p @ p,
    "stack": lambda p: torch.stack([p, p]),
    "keyword": lambda p: torch.add(input=p, other=p),
    "compare": lambda p: (p == p).all(),
    "isnan": lambda p: p.isnan().any(),
    "type": lambda p: p.float(),
    "data_ptr": lambda p: p.data_ptr(),
    "vector": lambda p: nn.utils.parameters_to_vector([p]),
    "save": lambda p: torch.save(p, io.BytesIO()),
    "hash": hash,
    "equal": lambda p: torch.equal(p, p.clone()),
    "allclose": lambda p: torch.allclose(p, p.data),
    "init": lambda p: nn.init.zeros_(p.data.clone()),
    "backward": lambda p: p.sum().backward(),
}


@gathered
@pytest.mark.parametrize("name", list(READS))
def test_any_parameter_can_be_read_outside_forward(strategy: str, name: str) -> None:
    def read() -> None:
        model, optimizer = wrapped(strategy)
        one_step(model, optimizer, local(0))
        for parameter in model.parameters():
            READS[name](parameter)
        one_step(model, optimizer, local(1))  # and training goes on

    run(read)


@gathered
def test_what_is_read_outside_forward_is_right(strategy: str) -> None:
    def read() -> State:
        model, optimizer = wrapped(strategy)
        one_step(model, optimizer, local(0))
        return {name: p + 0 for name, p in model.named_parameters()}

    expected = one_process([0])
    for found in run(read):
        assert_same({name: value.detach() for name, value in found.items()}, expected)


ALIASES = """
import copy, torch, shoal
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.scale = nn.Parameter(torch.ones(64))
    def forward(self, x):
        return self.second(self.first(x)) * self.scale, self.scale, self.first.weight.T

HOLDING = {
    "data": lambda model, x: [p.data for p in model.parameters()],
    "detach": lambda model, x: [p.detach() for p in model.parameters()],
    "row": lambda model, x: [p[0] for p in model.parameters()],
    "view": lambda model, x: [p.view(-1) for p in model.parameters()],
    "outputs": lambda model, x: list(model(x)),
    "module's state": lambda model, x: list(model.module.state_dict().values()),
    "numpy": lambda model, x: [torch.from_numpy(p.detach().numpy()) for p in model.parameters()],
}

def main(name):
    model = shoal.as_distributed(Model(), strategy="zero3", min_group_bytes=100)
    x = torch.ones(3, 64)
    held = HOLDING[name](model, x)
    for _ in range(3):
        model(x)[0].sum().backward()
    for tensor in held:
        try:
            float(tensor.sum()) + float(tensor[0].sum())
            repr(tensor)
        except (RuntimeError, IndexError, shoal.errors.ShoalError):
            pass  # an error is fine: the process lives

for name in HOLDING:
    print(name, end=": ", flush=True)
    shoal.run(main, 2, "memory", args=(name,), timeout=20)
    print("alive", flush=True)
"""


def test_nothing_handed_out_crashes_the_process_later() -> None:
    """What aliases a parameter that is freed is right, or an error; never a crash."""
    command = [sys.executable, "-c", ALIASES]
    result = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert result.returncode == 0, f"{result.stdout}(signal?) {result.stderr[-2000:]}"
    assert len(result.stdout.splitlines()) == 7


def test_a_forward_that_fails_can_be_repaired() -> None:
    def train() -> State:
        model, optimizer = wrapped("zero3")
        for step in range(3):
            with pytest.raises(RuntimeError, match="shape"):
                model(torch.ones(2, 99).double())
            one_step(model, optimizer, local(step))
        return model.state_dict()

    for state in run(train):
        assert_same(state, one_process(range(3)))


def test_a_failure_in_one_rank_s_forward_reaches_the_others() -> None:
    def train() -> None:
        model, optimizer = wrapped("zero3")
        one_step(model, optimizer, local(0))
        x, y = local(1)
        if shoal.world().rank == 1:
            x = x[:, :2]
        one_step(model, optimizer, (x, y))

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        run(train)


def test_a_dropped_model_is_freed() -> None:
    def drop() -> bool:
        model, optimizer = wrapped("zero3")
        one_step(model, optimizer, local(0))
        engine = weakref.ref(model.engine)
        del model, optimizer
        gc.collect()
        return engine() is None

    assert all(run(drop))
