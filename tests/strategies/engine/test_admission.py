"""What can be wrapped with what, and what is refused."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.errors import MismatchError, ShoalError
from shoal.optim import ShardedOptimizer
from shoal.optim.data_parallel_optimizers import DDPOptimizer, ZeRO2Optimizer, ZeRO3Optimizer
from shoal.strategies import ShardedModel
from shoal.strategies.data_parallel import DDPModel, ZeRO2Model, ZeRO3Model
from strategies.loops import (
    RANKS,
    BuildModule,
    State,
    assert_same,
    data,
    distinct,
    local,
    momentum,
    one_process,
    one_step,
    run,
    seeded,
    whole_state,
    wrapped,
)
from strategies.models import OddMLP

# Wrapping -------------------------------------------------------------------------------------


def test_disabled_gives_back_what_was_given() -> None:
    model = seeded()
    optimizer = momentum(model)
    assert shoal.as_distributed(model, enabled=False) is model
    assert shoal.as_distributed(model, optimizer, enabled=False) == (model, optimizer)
    with pytest.raises(shoal.errors.ClosedError):
        shoal.world()


def test_communication_is_started_where_nobody_has() -> None:
    script = """
import shoal, torch
m = torch.nn.Linear(3, 3)
m, o = shoal.as_distributed(m, torch.optim.SGD(m.parameters(), lr=0.1), strategy="zero3")
m(torch.ones(2, 3)).sum().backward(); o.step()
print(shoal.world().size)
"""
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert (result.returncode, result.stdout.strip()) == (0, "1"), result.stderr


def test_auto_replicates_small_models() -> None:
    def wrap() -> str:
        return shoal.as_distributed(seeded()).strategy

    assert run(wrap) == ["ddp"] * RANKS


def test_wrapping_again_with_the_same_options_changes_nothing() -> None:
    def wrap() -> None:
        module = seeded()
        first = shoal.as_distributed(
            module, momentum(module), strategy="zero2", min_group_bytes=300
        )
        second = shoal.as_distributed(*first, strategy="zero2", min_group_bytes=300)
        third = shoal.as_distributed(*first, strategy="auto")
        for again in (second, third):
            assert again[0] is first[0]
            assert again[1] is first[1]

    run(wrap)


def test_wrapping_again_with_other_options_is_an_error() -> None:
    def wrap() -> None:
        module = seeded()
        model, optimizer = shoal.as_distributed(module, momentum(module), strategy="zero2")
        with pytest.raises(ValueError, match="wrapped already"):
            shoal.as_distributed(model, strategy="zero3")
        with pytest.raises(ValueError, match="wrapped already"):
            shoal.as_distributed(model, strategy="zero2", min_group_bytes=5)
        with pytest.raises((TypeError, ValueError), match="wrapped already"):
            DDPModel(model)
        with pytest.raises((TypeError, ValueError), match="wrapped already"):
            ZeRO2Optimizer(optimizer, model)
        other = shoal.as_distributed(seeded(), strategy="zero2")
        with pytest.raises(ValueError, match="wrapped already"):
            shoal.as_distributed(other, optimizer, strategy="zero2")

    run(wrap)


def test_a_module_that_is_inside_a_wrapped_model_cannot_be_wrapped_again() -> None:
    def wrap() -> None:
        module: Any = seeded()
        shoal.as_distributed(module, strategy="zero3")
        for again in (module, module.layers[0], nn.Sequential(module)):
            with pytest.raises((TypeError, ValueError), match="already"):
                shoal.as_distributed(again, strategy="zero3")

    run(wrap)


def test_an_optimizer_over_foreign_parameters_is_an_error() -> None:
    def wrap() -> None:
        module, other = seeded(), seeded()
        with pytest.raises(ValueError, match="not part of the model"):
            shoal.as_distributed(module, momentum(other), strategy="zero2")

    run(wrap)


@pytest.mark.parametrize("missing", [None, "adam", object(), []])
def test_something_that_is_no_optimizer(missing: Any) -> None:
    def wrap() -> None:
        model = ZeRO2Model(seeded())
        with pytest.raises(TypeError, match=r"need a torch\.optim\.Optimizer"):
            ZeRO2Optimizer(missing, model)

    run(wrap)


def test_an_optimizer_of_sparse_gradients_only_is_refused() -> None:
    def wrap() -> None:
        module = nn.Embedding(5, 3, sparse=True)
        optimizer = torch.optim.SparseAdam(module.parameters())
        with pytest.raises(TypeError, match="averaged over the ranks as dense ones"):
            shoal.as_distributed(module, optimizer, strategy="ddp")

    run(wrap)


PAIRS = list(shoal.optim.PAIRS.items())


@pytest.mark.parametrize(("name", "classes"), PAIRS, ids=[name for name, _ in PAIRS])
def test_only_partners_go_together(name: str, classes: Any) -> None:
    def pair() -> list[str]:
        model_class, optimizer_class = classes
        fitting = []
        for other, (other_model_class, _) in PAIRS:
            module = seeded()
            model = other_model_class(module)
            optimizer = momentum(module)
            try:
                optimizer_class(optimizer, model)
                fitting.append(other)
            except TypeError as error:
                text = str(error)
                assert optimizer_class.__name__ in text
                assert model_class.__name__ in text
        return fitting

    expected = {"zero3": ["zero3", "fsdp"], "zero1": ["zero1", "ddp"]}.get(name, [name])
    assert all(set(fitting) <= set(expected) and name in fitting for fitting in run(pair, ranks=2))


def test_classes_can_be_used_directly() -> None:
    def train() -> State:
        module = seeded()
        model = ZeRO3Model(module, shoal.world(), min_group_bytes=300)
        optimizer = ZeRO3Optimizer(momentum(module), model, kind="element-wise")
        for step in range(3):
            one_step(model, optimizer, local(step))
        return model.state_dict()

    for state in run(train):
        assert_same(state, one_process(range(3)))


def test_classes_take_a_backend_or_the_current_world() -> None:
    def wrap() -> None:
        backend = shoal.world().backend
        group = backend.split(backend.rank % 2)
        model = DDPModel(seeded(), group)
        optimizer = DDPOptimizer(momentum(model), model)
        x = torch.full((2, 7), float(backend.rank)).double()
        model(x).sum().backward()
        optimizer.step()
        mine = torch.cat([p.detach().view(-1) for p in model.parameters()])
        everybody = backend.all_gather_object(mine)
        assert torch.equal(everybody[0], everybody[2])
        assert not torch.equal(everybody[0], everybody[1])
        assert isinstance(DDPModel(seeded()), ShardedModel)

    run(wrap, ranks=4)


def test_unknown_names_are_refused() -> None:
    def wrap() -> None:
        with pytest.raises(ValueError, match="zero3"):
            shoal.as_distributed(seeded(), strategy="zero4")
        with pytest.raises(TypeError, match="no_such_option"):
            shoal.as_distributed(seeded(), strategy="zero3", no_such_option=1)

    run(wrap)


def test_moving_a_wrapped_model_is_refused() -> None:
    def move() -> None:
        model, _ = wrapped("zero3")
        for change in (lambda: model.half(), lambda: model.to("cpu", torch.float16)):
            with pytest.raises(ShoalError, match="before it is wrapped"):
                change()

    run(move)


def test_moving_a_wrapped_model_to_where_it_is_changes_nothing() -> None:
    """Scripts that call ``model.to(device)`` once more go on working."""

    def move() -> None:
        model, _ = wrapped("zero3")
        assert model.to("cpu") is model
        assert model.double().cpu() is model

    run(move)


def test_lazy_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match="run a batch through it before it is wrapped"):
        run(lambda: shoal.as_distributed(nn.LazyLinear(3), strategy="ddp"), ranks=2)


def test_a_wrapped_optimizer_says_that_it_cannot_be_copied() -> None:
    with pytest.raises(ShoalError, match="cannot be copied or pickled"):
        run(lambda: copy.deepcopy(wrapped("zero1")[1]), ranks=2)


# Ranks whose models differ --------------------------------------------------------------------


DIFFERENT: dict[str, BuildModule] = {
    "another shape": lambda: OddMLP((7, 12, 11, 3)),
    "another shape of the same size": lambda: OddMLP((7, 13, 11, 3)[::-1]),
    "one layer more": lambda: OddMLP((7, 13, 11, 3, 3)),
    "one layer less": lambda: OddMLP((7, 13, 11)),
    "another dtype": lambda: OddMLP().half(),
    "no parameters": nn.Sequential,
}


@distinct
@pytest.mark.parametrize("what", list(DIFFERENT))
def test_ranks_whose_models_differ_are_told(strategy: str, what: str) -> None:
    def wrap() -> None:
        is_odd = shoal.world().rank == 1
        module = DIFFERENT[what]() if is_odd else OddMLP()
        shoal.as_distributed(module, strategy=strategy)

    with pytest.raises((MismatchError, ValueError)):
        run(wrap)


def test_a_model_without_parameters() -> None:
    def train() -> None:
        model: Any = shoal.as_distributed(nn.Sequential(nn.ReLU()), strategy="zero3")
        assert model(torch.ones(2)).sum() == 2
        assert model.state_dict() == {}

    run(train)


def check_equal_to_one_process(make: Callable[[], nn.Module], strategy: str) -> None:
    """Three steps of a model, on all ranks and in one process."""

    def train(is_wrapped: bool) -> State:
        model: Any = seeded(make)
        optimizer: Any = momentum(model)
        if is_wrapped:
            model, optimizer = shoal.as_distributed(model, optimizer, strategy=strategy)
        for step in range(3):
            one_step(model, optimizer, local(step) if is_wrapped else data(step))
        return whole_state(model)

    expected = train(False)
    for state in run(train, True):
        assert_same(state, expected)


@distinct
def test_empty_and_scalar_parameters(strategy: str) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.empty = nn.Parameter(torch.zeros(0, 3))
            self.scalar = nn.Parameter(torch.ones(()))
            self.layer = nn.Linear(7, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * self.scalar + self.empty.sum()

    check_equal_to_one_process(Odd, strategy)


@distinct
def test_parameters_that_are_not_contiguous(strategy: str) -> None:
    def transposed() -> nn.Module:
        model = OddMLP()
        first = model.layers[0]
        first.weight = nn.Parameter(first.weight.detach().T.contiguous().T)
        return model

    check_equal_to_one_process(transposed, strategy)


def test_the_optimizer_is_an_optimizer() -> None:
    def look() -> None:
        model, optimizer = wrapped("zero1")
        assert isinstance(optimizer, ShardedOptimizer)
        one_step(model, optimizer, local(0))
        state = copy.deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(state)
        before = whole_state(model)
        one_step(model, optimizer, local(1))
        assert_same(whole_state(model), one_process([0, 1]))
        assert any(
            not torch.equal(before[name], value) for name, value in model.state_dict().items()
        )

    run(look)


def looking_up(ranks: int, **options: Any) -> Any:
    def wrap() -> None:
        shoal.as_distributed(nn.Sequential(nn.Embedding(5, 3, **options)), strategy="ddp")

    return run(wrap, ranks=ranks)


@pytest.mark.parametrize("option", ["max_norm", "scale_grad_by_freq"])
def test_an_embedding_that_goes_by_the_rows_of_a_batch_is_refused(option: str) -> None:
    """Each rank would shorten, or count, those of its own part."""
    looking_up(1, **{option: True})
    with pytest.raises(ShoalError, match=f"0 is an Embedding with {option}"):
        looking_up(2, **{option: True})


class Remembers(nn.Module):
    """Its buffer is the end of its weight's memory."""

    def __init__(self, is_clone: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        last = self.layer.weight.detach()[2:]
        self.register_buffer("last", last.clone() if is_clone else last)


def test_a_buffer_in_the_memory_of_a_parameter_is_refused() -> None:
    def wrap(is_clone: bool, is_frozen: bool) -> None:
        module = Remembers(is_clone)
        module.layer.requires_grad_(not is_frozen)
        shoal.as_distributed(module, strategy="ddp")

    run(wrap, True, False)
    run(wrap, False, True)
    with pytest.raises(ValueError, match="buffer last is in the memory of the parameter layer"):
        run(wrap, False, False)
