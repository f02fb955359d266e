"""Models on the meta device begin with one process's values, however many ranks there are."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import pools
import shoal
from shoal.errors import ShoalError
from shoal.strategies.data_parallel import DDPModel
from shoal.strategies.layers.materialization import materialize
from strategies import models
from strategies.loops import (
    State,
    assert_same,
    data,
    distinct,
    each,
    local,
    momentum,
    one_step,
    run,
    whole_state,
)
from strategies.models import OddMLP, has_transformers

CPU = torch.device("cpu")
SEED = 11
ITEMS = 6


def on_meta(build: Callable[[], nn.Module]) -> Any:
    with torch.device("meta"):
        return build()


class Tied(nn.Module):
    """Two heads with one weight; a parameter and a buffer of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = OddMLP((7, 5, 4))
        self.scale = nn.Parameter(torch.empty(3))
        self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 3)
        self.second.weight = self.first.weight
        self.register_buffer("shift", torch.empty(3), persistent=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.scale)
        nn.init.uniform_(self.shift)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        return (self.first(hidden) + self.second(hidden).tanh()) * self.scale + self.shift


def reset(part: nn.Module) -> None:
    if hasattr(part, "reset_parameters"):
        part.reset_parameters()


def from_one_process(seed: int = SEED) -> Any:
    model = on_meta(Tied).double()
    model.to_empty(device="cpu")
    model.second.weight = model.first.weight  # torch tears them apart
    torch.manual_seed(seed)
    return model.apply(reset)


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": momentum,
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, eps=1e-3),
    # It makes its state when it is built: on the meta device, where there are no values.
    "adagrad": lambda m: torch.optim.Adagrad(
        m.parameters(), lr=0.1, initial_accumulator_value=0.25
    ),
}


def train(strategy: str | None, optimizer_name: str = "sgd") -> tuple[State, State]:
    """The state at the beginning, and after some steps; None: one process."""
    if strategy is None:
        model: Any = from_one_process()
        optimizer: Any = OPTIMIZERS[optimizer_name](model)
    else:
        torch.manual_seed(shoal.world().rank)  # nobody's own numbers count
        model = on_meta(Tied).double()
        optimizer = OPTIMIZERS[optimizer_name](model)
        model, optimizer = shoal.as_distributed(
            model, optimizer, strategy=strategy, min_group_bytes=300, seed=SEED
        )
    begin = {**whole_state(model), "shift": model.shift.clone()}
    for step in range(3):
        one_step(model, optimizer, (local if strategy else data)(step, items=ITEMS))
    return begin, whole_state(model)


@each
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_any_strategy_and_world_begins_like_one_process(strategy: str, ranks: int) -> None:
    begin, end = train(None)
    for found_begin, found_end in run(train, strategy, ranks=ranks):
        assert_same(found_begin, begin, 0)
        assert_same(found_end, end)


@distinct
@pytest.mark.parametrize("name", ["adamw", "adagrad"])
def test_an_optimizer_from_before_keeps_working(strategy: str, name: str) -> None:
    _, end = train(None, name)
    for _, found in run(train, strategy, name):
        assert_same(found, end)


def train_over_processes() -> tuple[State, State]:
    states = train("zero3")
    gc.collect()  # it holds groups, and they connections
    return states


def test_over_shared_memory() -> None:
    begin, end = train(None)
    for found_begin, found_end in pools.Team("shm", 2).run(train_over_processes):
        assert_same(found_begin, begin, 0)
        assert_same(found_end, end)


def test_another_seed_gives_other_values() -> None:
    def begin(**options: int) -> Tensor:
        return DDPModel(on_meta(OddMLP), **options).state_dict()["layers.0.weight"]

    first = run(lambda: begin())[0]
    assert torch.equal(first, run(lambda: begin(seed=0))[0])
    assert not torch.equal(first, run(lambda: begin(seed=1))[0])


# What one module gets --------------------------------------------------------------------------


TORCH_LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(3, 4),
    "embedding": lambda: nn.Embedding(5, 3, padding_idx=1),
    "convolution": lambda: nn.Conv2d(2, 3, 2),
    "norms": lambda: nn.Sequential(nn.LayerNorm(3), nn.GroupNorm(2, 4), nn.RMSNorm(3)),
    "batch norm": lambda: nn.BatchNorm1d(3),
    "lstm": lambda: nn.LSTM(3, 4, 2, bidirectional=True),
    "attention": lambda: nn.MultiheadAttention(4, 2),
    "transformer": lambda: nn.Transformer(4, 2, 1, 1, 5, batch_first=True),
    "bilinear": lambda: nn.Bilinear(2, 3, 4),
    "several": lambda: nn.Sequential(nn.Linear(3, 4), nn.PReLU(), nn.Linear(4, 4, bias=False)),
}


@pytest.mark.parametrize("name", list(TORCH_LAYERS))
def test_layers_of_torch_begin_as_if_built_here(name: str) -> None:
    build = TORCH_LAYERS[name]
    found = on_meta(build)
    materialize(found, CPU, SEED)
    torch.manual_seed(SEED)
    assert_same(found.state_dict(), build().state_dict(), 0)


def test_a_recurrent_layer_works_afterwards() -> None:
    layer = on_meta(lambda: nn.LSTM(3, 4))
    materialize(layer, CPU, SEED)
    layer(torch.ones(2, 1, 3))[0].sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())


def test_parameters_stay_the_objects_they_are() -> None:
    model = on_meta(Tied)
    model.scale.requires_grad_(False)
    model.scale.note = "kept"
    before = [id(tensor) for tensor in (*model.parameters(), *model.buffers())]
    materialize(model, CPU, SEED)
    assert [id(tensor) for tensor in (*model.parameters(), *model.buffers())] == before
    assert model.second.weight is model.first.weight
    assert not model.scale.requires_grad
    assert model.scale.note == "kept"
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


def test_the_users_random_numbers_are_untouched() -> None:
    def draw() -> tuple[Any, ...]:
        return torch.rand(3).tolist(), np.random.rand(), random.random()

    class Dicey(nn.Linear):
        def reset_parameters(self) -> None:
            nn.init.constant_(self.weight, np.random.rand() + random.random())
            nn.init.normal_(self.bias)

    def seed() -> None:
        torch.manual_seed(1)
        np.random.seed(1)
        random.seed(1)

    seed()
    expected = draw()
    weights = []
    for _ in range(2):
        model = on_meta(lambda: Dicey(2, 2))
        seed()
        materialize(model, CPU, SEED)
        assert draw() == expected
        weights.append(model.weight)
        np.random.rand()
    assert torch.equal(*weights)


def test_what_has_values_keeps_them() -> None:
    class Parent(nn.Module):
        """Sets its children as well."""

        def __init__(self) -> None:
            super().__init__()
            self.loaded, self.new = nn.Linear(2, 2), on_meta(lambda: nn.Linear(2, 2))
            self.mixed = nn.Linear(2, 2)
            self.mixed.bias = on_meta(lambda: nn.Parameter(torch.empty(2)))

        def reset_parameters(self) -> None:
            for parameter in self.parameters():
                nn.init.constant_(parameter, 7.0)

    model = Parent()
    loaded = [t.detach().clone() for t in (*model.loaded.parameters(), model.mixed.weight)]
    materialize(model, CPU, SEED)
    for found, expected in zip(
        (*model.loaded.parameters(), model.mixed.weight), loaded, strict=True
    ):
        assert torch.equal(found, expected)
    for parameter in (*model.new.parameters(), model.mixed.bias):
        assert (parameter == 7.0).all()


def test_a_model_with_values_is_left_alone() -> None:
    model = OddMLP()
    before = whole_state(model)
    materialize(model, CPU, SEED)
    assert_same(model.state_dict(), before, 0)


# What is refused -------------------------------------------------------------------------------


class NoReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


class BufferOnly(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(3, dtype=dtype), persistent=False)


class ForgetsBuffer(nn.Linear):
    """Its reset is that of a linear layer."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(2, 2)
        self.register_buffer("mask", torch.zeros(3).to(dtype))


class ForgetsRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(3, 2))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.table[1:])


class Attribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.constant = torch.ones(3)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "no reset": (NoReset, r"nothing sets scale of 1 \(NoReset\)"),
    "a buffer and no reset": (BufferOnly, r"nothing sets mask of 1 \(BufferOnly\)"),
    "an int buffer": (
        lambda: BufferOnly(torch.int64),
        r"nothing sets mask of 1 \(BufferOnly\)",
    ),
    "a forgotten buffer": (
        lambda: ForgetsBuffer(torch.float64),
        r"reset_parameters\(\) does not set mask of 1 \(ForgetsBuffer\)",
    ),
    "a forgotten bool buffer": (
        lambda: ForgetsBuffer(torch.bool),
        r"reset_parameters\(\) does not set mask of 1 \(ForgetsBuffer\)",
    ),
    "a forgotten row": (ForgetsRows, r"does not set table of 1 \(ForgetsRows\)"),
    "not registered": (Attribute, r"does not set constant of 1 \(Attribute\)"),
}


@pytest.mark.parametrize("what", list(REFUSED))
def test_what_nobody_sets_is_named(what: str) -> None:
    build, message = REFUSED[what]

    def wrap() -> None:
        model = on_meta(lambda: nn.Sequential(nn.Linear(2, 2), build()))
        with pytest.raises(ValueError, match=message):
            shoal.as_distributed(model, strategy="zero3")

    run(wrap)


@pytest.mark.parametrize(
    ("dtype", "value"), [(torch.bool, True), (torch.int8, 127), (torch.complex64, 1j)]
)
def test_any_value_may_be_set(dtype: torch.dtype, value: Any) -> None:
    class Filled(BufferOnly):
        def reset_parameters(self) -> None:
            self.mask.fill_(value)

    model = on_meta(lambda: Filled(dtype))
    materialize(model, CPU, SEED)
    assert (model.mask == value).all()


def test_a_tensor_that_another_module_sets() -> None:
    class Borrows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.weight = self.layer.weight

    model = on_meta(Borrows)
    materialize(model, CPU, SEED)
    assert model.weight is model.layer.weight
    assert not model.weight.isnan().any()


def test_hooks_would_be_lost() -> None:
    model = on_meta(lambda: nn.Linear(2, 2))
    model.weight.register_hook(lambda gradient: gradient)
    with pytest.raises(ShoalError, match="has hooks"):
        materialize(model, CPU, SEED)


def test_a_parameter_that_something_else_watches_is_refused() -> None:
    model = on_meta(lambda: nn.Linear(2, 2))
    watch = weakref.ref(model.weight)
    with pytest.raises(ShoalError, match="holds on to it"):
        materialize(model, CPU, SEED)
    assert watch() is model.weight


def test_state_without_values_is_refused() -> None:
    def wrap() -> None:
        model = on_meta(OddMLP)
        optimizer = torch.optim.Adam(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(ShoalError, match="Adam has state"):
            shoal.as_distributed(model, optimizer, strategy="zero2")

    run(wrap)


# Hugging Face ----------------------------------------------------------------------------------


BUILDS = ("gpt2", "llama", "t5", "bert", "vit")


@pytest.mark.skipif(not has_transformers(), reason="needs transformers")
@pytest.mark.parametrize("name", BUILDS)
def test_hugging_face_models_begin_as_transformers_begins_them(name: str) -> None:
    build: Callable[[], Any] = getattr(models, f"build_{name}")
    model, expected = on_meta(build), build()
    materialize(model, CPU, SEED)
    buffers = dict(expected.named_buffers())
    for part in expected.modules():
        part._is_hf_initialized = False
    torch.manual_seed(SEED)
    expected.initialize_weights()
    assert_same(model.state_dict(), expected.state_dict(), 0)
    for buffer_name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[buffer_name]), buffer_name


@pytest.mark.skipif(not has_transformers(), reason="needs transformers")
def test_a_hugging_face_model_inside_another_model() -> None:
    def wrap() -> None:
        model: Any = on_meta(lambda: nn.Sequential(models.build_gpt2(), nn.Linear(3, 3)))
        module = shoal.as_distributed(model, strategy="zero2")[0]
        assert module.lm_head.weight is module.transformer.wte.weight
        assert (module.transformer.ln_f.weight == 1).all()
        assert 0.005 < module.transformer.wte.weight.std() < 0.05

    run(wrap)
