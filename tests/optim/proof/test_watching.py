"""Real steps are held to the kind that was decided, options included."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import shoal
from shoal.errors import ShoalError
from shoal.optim import PAIRS, Kind
from shoal.optim.stepping import supervision as supervision_module

STRATEGIES = ["ddp", "zero1", "zero2", "zero3"]


class Late(Optimizer):
    """Descends element by element, until `late` comes."""

    def __init__(self, params: Any, lr: float = 0.1, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.late: Callable[[nn.Parameter], Any] | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if self.late is not None:
                    self.late(p)
                state = self.state[p]
                if not state:
                    state["step"], state["m"] = torch.zeros(()), torch.zeros_like(p)
                state["step"] += 1
                state["m"].lerp_(p.grad, 1 / state["step"].item())
                update = state["m"]
                if group["weight_decay"]:  # as LARS
                    update = update * (p.norm() / p.grad.norm().clamp(min=1e-3))
                p.sub_(update, alpha=group["lr"])


def train(optimizer: Any, model: Any, steps: int = 1) -> None:
    for step in range(steps):
        model(torch.full((2, 5), 1.0 + step)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def wrapped(strategy: str, make: Any = Late, **options: Any) -> Any:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    model_class, optimizer_class = PAIRS[strategy]
    model = model_class(module)
    return model, optimizer_class(make(module.parameters()), model, **options)


def on_ranks(function: Callable[..., Any], *args: Any, ranks: int = 2) -> Any:
    return shoal.run(function, ranks, "memory", args=args)


LATE: dict[str, Callable[[nn.Parameter], Any]] = {
    "sum": lambda p: p.grad.sum(),
    "item": lambda p: p.grad[:1].item(),
    "shape": lambda p: p.shape,
    "len": lambda p: len(p),
    "numpy": lambda p: p.detach().numpy(),
    "tolist": lambda p: p.tolist(),
    "flip": lambda p: p.sub_(p.flip(0)),
    "randn_like": lambda p: torch.randn_like(p),
    "rand": lambda p: torch.rand(1),
    "sub_": lambda p: p.sub_(torch.arange(float(p.untyped_storage().nbytes()))[:1].expand_as(p)),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", LATE)
def test_what_the_kind_rules_out_is_an_error_before_it_happens(strategy: str, name: str) -> None:
    def misbehave() -> str:
        model, optimizer = wrapped(strategy)
        assert optimizer.kind is Kind.ELEMENT_WISE
        train(optimizer, model, steps=2)
        optimizer.optimizer.late = LATE[name]
        with pytest.raises(ShoalError) as caught:
            train(optimizer, model)
        with pytest.raises(ShoalError, match="mixture"):
            model(torch.ones(2, 5))
        with pytest.raises(ShoalError, match="mixture"):
            model.state_dict()
        return str(caught.value)

    for message in on_ranks(misbehave):
        assert "Late steps as element-wise" in message
        assert "test_watching.py:" in message
        assert 'kind="' in message


class ForgetsLate(Late):
    """Leaves no gradients, once it is late."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for p in self.param_groups[0]["params"] if self.late is not None else ():
            p.grad = None


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_that_a_step_forgets_are_no_secret(strategy: str) -> None:
    def forget() -> None:
        model, optimizer = wrapped(strategy, ForgetsLate)
        assert optimizer.kind is Kind.ELEMENT_WISE
        train(optimizer, model, steps=2)
        optimizer.late = lambda p: None
        with pytest.raises(ShoalError, match="now a step leaves parameters without their grad"):
            train(optimizer, model)

    on_ranks(forget)


def test_nothing_of_a_broken_step_is_saved_and_loading_mends(tmp_path: Path) -> None:
    def mend() -> None:
        model, optimizer = wrapped("zero2")
        train(optimizer, model)
        good = model.state_dict()
        shoal.save(tmp_path / "good", model, optimizer)
        optimizer.optimizer.late = LATE["sum"]
        with pytest.raises(ShoalError, match="`sum` combines elements"):
            train(optimizer, model)
        with pytest.raises(ShoalError, match="mixture"):
            shoal.save(tmp_path / "bad", model, optimizer)
        optimizer.optimizer.late = None
        shoal.load(tmp_path / "good", model, optimizer)
        assert all(torch.equal(value, good[name]) for name, value in model.state_dict().items())
        optimizer.zero_grad()
        train(optimizer, model, steps=2)

    on_ranks(mend)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_loaded_state_counts_as_data_and_counters_do_not(strategy: str, tmp_path: Path) -> None:
    """Segments may share the memory of what was loaded."""

    def reload() -> None:
        model, optimizer = wrapped(strategy)
        train(optimizer, model, steps=2)
        shoal.save(tmp_path / "here", model, optimizer)
        state = optimizer.state_dict()
        shoal.load(tmp_path / "here", model, optimizer)
        train(optimizer, model)
        optimizer.load_state_dict(state)
        train(optimizer, model)
        optimizer.optimizer.late = lambda p: optimizer.state[p]["m"].sum()
        with pytest.raises(ShoalError, match="`sum` combines elements"):
            train(optimizer, model)

    on_ranks(reload)


def test_a_changed_option_that_makes_it_coarser_is_refused_before_the_step() -> None:
    def change() -> tuple[str, Any]:
        model, optimizer = wrapped("zero2")
        train(optimizer, model, steps=2)
        before = model.state_dict()
        optimizer.param_groups[0]["weight_decay"] = 0.1
        messages = []
        for _ in range(2):
            with pytest.raises(ShoalError, match="Nothing has been stepped") as caught:
                train(optimizer, model)
            optimizer.zero_grad()
            messages.append(str(caught.value))
        same = all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        optimizer.param_groups[0]["weight_decay"] = 0.0
        train(optimizer, model)
        return messages[1], same

    for message, same in on_ranks(change):
        assert same
        assert "was element-wise when it was wrapped and is per-parameter" in message
        assert "`linalg_vector_norm`" in message


def test_a_learning_rate_needs_no_new_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    def change() -> None:
        model, optimizer = wrapped("ddp")
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        for _ in range(3):
            train(optimizer, model)
            scheduler.step()

    monkeypatch.setattr(supervision_module, "judge", None)
    shoal.run(change, 1, "memory")


def test_what_is_declared_or_known_is_not_watched() -> None:
    def step() -> tuple[str, str]:
        model, optimizer = wrapped("zero2", kind="element-wise")
        optimizer.optimizer.late = LATE["sum"]
        train(optimizer, model)
        known_model, known = wrapped("zero2", AdamW)
        train(known, known_model)
        assert not known.supervision.judgement.is_watched
        return model.describe(), known_model.describe()

    for declared, known in on_ranks(step):
        assert declared.endswith("Late is element-wise: declared by you")
        assert known.startswith("zero2 over 2 ranks: 66 parameters in 1 group of memory")
        assert known.endswith("AdamW is element-wise: torch's own AdamW")


def test_describe_says_why() -> None:
    class Coupled(Late):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            every = [p for group in self.param_groups for p in group["params"]]
            total: Tensor = sum(p.grad.sum() for p in every)  # type: ignore[assignment]
            for p in every:
                p.sub_(total)

    def describe() -> tuple[str, str]:
        return wrapped("ddp")[0].describe(), wrapped("ddp", Coupled)[0].describe()

    ((fine, coarse),) = shoal.run(describe, 1, "memory")
    assert fine.endswith(
        "Late is element-wise: nothing in its steps looks beyond an element; every step is watched"
    )
    assert "Coupled is global: `add` combines data of several parameters, at test_w" in coarse


def test_several_groups_and_unused_parameters_are_watched() -> None:
    def step() -> Any:
        torch.manual_seed(0)
        used, unused = nn.Linear(5, 7), nn.Linear(5, 7)
        module = nn.Sequential(used)
        module.register_module("unused", None)
        module.other = unused
        module.forward = lambda x: used(x)  # type: ignore[method-assign]
        groups = [{"params": [used.weight, unused.bias]}, {"params": [used.bias, unused.weight]}]
        model, optimizer = shoal.as_distributed(module, Late(groups), strategy="zero3")
        train(optimizer, model, steps=3)
        return model.state_dict()["0.weight"]

    first, second = on_ranks(step)
    assert torch.equal(first, second)
