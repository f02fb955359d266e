"""`TensorParallelModel` and its optimizer: state in and out, options, every kind of optimizer."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shoal
from shoal.errors import PeerError, ShoalError
from shoal.optim import PAIRS, GradScaler, TensorParallelOptimizer
from shoal.strategies import TensorParallelModel
from shoal.strategies.data_parallel import DDPModel
from strategies.models import random_tokens
from strategies.tensor.tasks import GPT, TASKS, VOCABULARY, text_loss

RANKS = 3


def run(fn: Any, *args: Any, ranks: int = RANKS) -> list[Any]:
    return shoal.run(fn, ranks, "memory", args=args, timeout=40)


def seeded() -> nn.Module:
    torch.manual_seed(0)
    return GPT().double()


def wrapped(make: Any = None, module: nn.Module | None = None, **options: Any) -> tuple[Any, Any]:
    module = seeded() if module is None else module
    optimizer = (make or momentum)(module.parameters())
    options = {"min_group_bytes": 1500, **options}
    return shoal.as_distributed(module, optimizer, strategy="tensor", **options)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-3)


def batch(step: int, model: Any = None) -> dict[str, Tensor]:
    tokens = random_tokens(step, VOCABULARY, 4, 7)
    if model is not None:
        tokens = tokens.chunk(model.data_group.size)[model.data_group.rank]
    return {"tokens": tokens}


def train(model: Any, optimizer: Any, steps: Any) -> None:
    for step in steps:
        optimizer.zero_grad()
        data = batch(step, model if isinstance(model, TensorParallelModel) else None)
        text_loss(model, data).backward()
        optimizer.step()


def one_process(make: Any, steps: Any, module: nn.Module | None = None) -> tuple[Any, Any]:
    module = seeded() if module is None else module
    optimizer = make(module.parameters())
    train(module, optimizer, steps)
    return module, optimizer


def assert_same(found: Any, expected: Any, tolerance: float = 1e-10) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=tolerance, msg=name)


def assert_same_state(found: Any, expected: Any) -> None:
    assert found["param_groups"] == expected["param_groups"]
    assert list(found["state"]) == list(expected["state"])
    for number, state in expected["state"].items():
        assert_same(found["state"][number], state, 1e-9)


# State -------------------------------------------------------------------------------------------


full = functools.partial(pytest.param, marks=pytest.mark.full)


@pytest.mark.parametrize("options", [{}, {"tensor": 2, "zero": 1}, full({"tensor": 2, "zero": 3})])
def test_state_goes_out_and_in(options: dict[str, Any]) -> None:
    def check() -> None:
        model, optimizer = wrapped(adam, **options)
        train(model, optimizer, range(2))
        plain, plain_optimizer = one_process(adam, range(2))
        assert_same(model.state_dict(), plain.state_dict())
        assert_same_state(optimizer.state_dict(), plain_optimizer.state_dict())
        seeded().load_state_dict(model.state_dict())  # fits a plain module
        # And into another one, that goes on from there.
        torch.manual_seed(7)
        other, other_optimizer = wrapped(adam, GPT().double(), **options)
        other.load_state_dict(plain.state_dict())
        other_optimizer.load_state_dict(copy.deepcopy(plain_optimizer.state_dict()))
        train(other, other_optimizer, range(2, 4))
        train(plain, plain_optimizer, range(2, 4))
        assert_same(other.state_dict(), plain.state_dict())

    run(check, ranks=4 if options else 3)


def test_whole_parameters_can_be_changed() -> None:
    def check() -> None:
        model, _ = wrapped()
        with model.full_parameters():
            assert model.blocks[0].mlp.up_proj.weight.shape == (35, 24)
            with torch.no_grad():
                model.blocks[0].mlp.up_proj.weight.fill_(3.0)
                model.tokens.weight[5] = 1.0
            with pytest.raises(ShoalError, match="cannot be called inside of full_parameters"):
                model(batch(0)["tokens"])
        state = model.state_dict()
        assert (state["blocks.0.mlp.up_proj.weight"] == 3.0).all()
        assert (state["lm_head.weight"][5] == 1.0).all()  # which is tied
        model.apply(lambda part: part.bias.data.fill_(2.0) if type(part) is nn.LayerNorm else None)
        assert (model.state_dict()["norm.bias"] == 2.0).all()

    run(check)


def test_every_rank_holds_its_part() -> None:
    def check() -> tuple[int, ...]:
        return tuple(wrapped()[0].blocks[0].mlp.up_proj.weight.shape)

    assert run(check) == [(12, 24), (12, 24), (11, 24)]


def test_a_model_on_the_meta_device() -> None:
    def values(strategy: str) -> dict[str, Tensor]:
        with torch.device("meta"):
            module = nn.TransformerEncoderLayer(12, 6, 7)
        return shoal.as_distributed(module, strategy=strategy, seed=3).state_dict()

    whole, split = run(values, "ddp"), run(values, "tensor")
    for state in split:
        assert_same(state, whole[0], 0)


def test_ranks_begin_with_the_first_ones_values() -> None:
    def values() -> dict[str, Tensor]:
        torch.manual_seed(shoal.world().rank)
        return shoal.as_distributed(GPT(), strategy="tensor").state_dict()

    torch.manual_seed(0)
    expected = GPT().state_dict()
    for state in run(values):
        assert_same(state, expected, 0)


def adafactor(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, lr=0.01)


@pytest.mark.parametrize("make", [adam, full(torch.optim.Adagrad), full(adafactor)])
def test_an_optimizer_with_a_past(make: Any) -> None:
    def check() -> None:
        module, optimizer = one_process(make, range(2))
        model, optimizer = shoal.as_distributed(module, optimizer, strategy="tensor")
        train(model, optimizer, range(2, 4))
        expected = one_process(make, range(4))[0].state_dict()
        tolerance = 1e-10 if make is adam else 1e-4
        assert_same(*map(without_noise, (model.state_dict(), expected)), tolerance)

    run(check)


# Gradients ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, full({"tensor": 2, "zero": 0}), {"tensor": 2, "zero": 2}])
def test_gradients_are_those_of_one_process_and_the_same_everywhere(options: Any) -> None:
    def gradients() -> dict[str, Tensor]:
        model, _ = wrapped(**options)
        text_loss(model, batch(0, model)).backward()
        return dict(model.full_gradients())

    plain = seeded()
    text_loss(plain, batch(0)).backward()
    results = run(gradients, ranks=4 if options else 3)
    for found in results:
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, rtol=0, atol=1e-12, msg=name)
            assert torch.equal(found[name], results[0][name]), name


@pytest.mark.parametrize("norm_type", [2.0, full(1.0), float("inf")])
def test_norms_count_everything_once(norm_type: float) -> None:
    def norm() -> float:
        model, _ = wrapped()
        text_loss(model, batch(0)).backward()
        by_torch = float(nn.utils.clip_grad_norm_(model.parameters(), 1e9, norm_type))
        by_model = float(model.clip_grad_norm_(0.01, norm_type))
        assert by_torch == pytest.approx(by_model, rel=1e-12)
        return by_model

    plain = seeded()
    text_loss(plain, batch(0)).backward()
    expected = float(nn.utils.clip_grad_norm_(plain.parameters(), 0.01, norm_type))
    found = run(norm)
    assert len(set(found)) == 1
    assert found[0] == pytest.approx(expected, rel=1e-12)


def test_a_frozen_part_stays_as_it_is() -> None:
    def check() -> None:
        def frozen() -> nn.Module:
            module = seeded()
            module.blocks[0].requires_grad_(False)
            return module

        module = frozen()
        model, optimizer = wrapped(module=module)
        train(model, optimizer, range(3))
        expected, _ = one_process(momentum, range(3), frozen())
        assert_same(model.state_dict(), expected.state_dict())

    run(check)


def test_what_is_trained_later_is_right_too() -> None:
    """Also parameters between split layers, whose gradients are summed."""

    def train_in_two_parts(model: Any, optimizer: Any) -> Any:
        model.blocks[0].requires_grad_(False)
        train(model, optimizer, range(2))
        model.blocks[0].requires_grad_(True)
        train(model, optimizer, range(2, 4))
        return model.state_dict()

    def check() -> None:
        module = seeded()
        module.blocks[0].requires_grad_(False)
        found = train_in_two_parts(*wrapped(module=module))
        plain = seeded()
        assert_same(found, train_in_two_parts(plain, momentum(plain.parameters())))

    run(check)


def test_recomputed_blocks() -> None:
    def check() -> None:
        module = seeded()
        for block in module.blocks:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        model, optimizer = wrapped(module=module)
        train(model, optimizer, range(2))
        assert_same(model.state_dict(), one_process(momentum, range(2))[0].state_dict())

    run(check)


def test_a_weight_that_is_computed_stays_whole() -> None:
    def layers() -> int:
        first = nn.utils.parametrizations.weight_norm(nn.Linear(4, 6))
        module = nn.Sequential(first, nn.ReLU(), nn.Linear(6, 4))
        return len(shoal.as_distributed(module, strategy="tensor").plan.layers)

    assert run(layers) == [0] * RANKS


def test_predicting_and_evaluation() -> None:
    def check() -> None:
        model, _ = wrapped(tensor=2, zero=3)
        expected = seeded().eval()(batch(0)["tokens"])
        model.eval()
        with model.predicting():
            for _ in range(2):
                found = model(batch(0)["tokens"])
                torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)

    run(check, ranks=4)


def test_by_hand_and_with_train_step() -> None:
    def check() -> None:
        plain, _ = one_process(momentum, range(2))
        model, optimizer = wrapped(tensor=2, auto_sync=False)
        for step in range(2):
            optimizer.zero_grad()
            data = batch(step, model)
            loss = model.train_step(data["tokens"][:, :-1], data["tokens"][:, 1:], _loss)
            model.synchronize_gradients()
            optimizer.step()
            assert len(set(shoal.world().all_gather_object(float(loss)))) == 1
        assert_same(model.state_dict(), plain.state_dict())

    run(check, ranks=4)


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def test_mixed_precision() -> None:
    def check() -> None:
        torch.manual_seed(0)
        module = GPT()
        model, optimizer = wrapped(adam, module, mixed_precision="bf16")
        train(model, optimizer, range(3))
        torch.manual_seed(0)
        expected, _ = one_process(adam, range(3), GPT())
        state = model.state_dict()
        assert all(value.dtype is torch.float32 for value in state.values())
        assert_same(state, expected.state_dict(), 3e-2)

    run(check)


def test_scaled_gradients_are_skipped_together() -> None:
    def check() -> float:
        model, optimizer = wrapped(momentum)
        scaler = GradScaler("cpu", init_scale=8.0)
        scaler.scale(text_loss(model, batch(0))).backward()
        if shoal.world().rank == 1:  # in a part that only this rank has
            model.gradient_shard("blocks.0.mlp.up_proj.weight")[0] = torch.inf
        before = model.state_dict()
        scaler.step(optimizer)
        scaler.update()
        assert_same(model.state_dict(), before, 0)
        return scaler.get_scale()

    assert run(check) == [4.0] * RANKS


# Optimizers --------------------------------------------------------------------------------------


def _muon(parameters: Any) -> list[torch.optim.Optimizer]:
    everything = list(parameters)
    return [
        torch.optim.Muon([p for p in everything if p.dim() == 2], lr=0.01),
        torch.optim.AdamW([p for p in everything if p.dim() != 2], lr=0.01, eps=1e-3),
    ]


def without_noise(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without keys' biases: their gradients are zero but for rounding, and Adafactor amplifies."""
    noisy = ("k_proj.bias", "c_attn.bias")
    return {name: value for name, value in state.items() if not name.endswith(noisy)}


@pytest.mark.parametrize("options", [{}, full({"tensor": 2, "zero": 0})])
def test_optimizers_that_look_at_whole_parameters(options: Any) -> None:
    def check() -> None:
        model, optimizer = wrapped(adafactor, **options)
        train(model, optimizer, range(3))
        plain, plain_optimizer = one_process(adafactor, range(3))
        assert_same(*map(without_noise, (model.state_dict(), plain.state_dict())), 1e-4)
        state, expected = optimizer.state_dict()["state"], plain_optimizer.state_dict()["state"]
        shapes = [
            {k: getattr(v, "shape", None) for k, v in each.items()} for each in state.values()
        ]
        wanted = [
            {k: getattr(v, "shape", None) for k, v in each.items()} for each in expected.values()
        ]
        assert shapes == wanted
        optimizer.load_state_dict(plain_optimizer.state_dict())
        train(model, optimizer, [3])
        train(plain, plain_optimizer, [3])
        assert_same(*map(without_noise, (model.state_dict(), plain.state_dict())), 1e-4)

    run(check, ranks=4 if options else 2)


def test_muon_beside_adam() -> None:
    def check() -> None:
        module = seeded()
        model, optimizers = shoal.as_distributed(
            module, _muon(module.parameters()), strategy="tensor"
        )
        plain = seeded()
        others = _muon(plain.parameters())
        for step in range(3):
            for each in (*optimizers, *others):
                each.zero_grad()
            text_loss(model, batch(step)).backward()
            text_loss(plain, batch(step)).backward()
            for each in (*optimizers, *others):
                each.step()
        assert_same(model.state_dict(), plain.state_dict(), 1e-4)

    run(check, ranks=2)


def test_optimizers_that_couple_everything_are_refused() -> None:
    def check() -> None:
        with pytest.raises(ShoalError, match=r"LBFGS may couple any .* are split over the tensor"):
            wrapped(torch.optim.LBFGS)
        # Where nothing is split there is nothing to refuse.
        wrapped(torch.optim.LBFGS, nn.Linear(2, 2))

    run(check)


def test_uneven_parts_under_zero_are_refused_for_them() -> None:
    def check() -> None:
        with pytest.raises(ShoalError, match=r"Adafactor looks at whole .* is split unevenly"):
            wrapped(lambda p: torch.optim.Adafactor(p, lr=0.01), tensor=2, zero=1)

    run(check, ranks=4)


def test_schedulers_and_groups_go_on() -> None:
    def check() -> None:
        model, optimizer = wrapped()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        assert isinstance(optimizer, TensorParallelOptimizer)
        text_loss(model, batch(0)).backward()
        optimizer.step()
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == 0.05

    run(check)


# Options -----------------------------------------------------------------------------------------


def test_axes() -> None:
    def check(options: dict[str, int]) -> tuple[int, int]:
        model, _ = wrapped(**options)
        return model.tensor_group.size, model.data_group.size

    assert run(check, {}, ranks=4) == [(4, 1)] * 4
    assert run(check, {"data": 2}, ranks=4) == [(2, 2)] * 4
    assert run(check, {"tensor": 1}, ranks=2) == [(1, 2)] * 2
    with pytest.raises(ValueError, match="must multiply to the 4 ranks"):
        run(check, {"tensor": 3}, ranks=4)
    with pytest.raises(ValueError, match="zero must be one of 0, 1, 2, 3; got 4"):
        run(check, {"zero": 4}, ranks=2)


def test_pairs() -> None:
    def check() -> None:
        assert PAIRS["tensor"] == (TensorParallelModel, TensorParallelOptimizer)
        module = seeded()
        model, optimizer = wrapped(module=module)
        assert shoal.as_distributed(model, optimizer, strategy="tensor") == (model, optimizer)
        with pytest.raises(ValueError, match="wrapped already"):
            shoal.as_distributed(model, strategy="tensor", tensor=1)
        with pytest.raises(TypeError, match="wrapped already"):
            TensorParallelModel(model)
        other = DDPModel(nn.Linear(2, 2))
        with pytest.raises(TypeError, match="goes with TensorParallelModel; got a DDPModel"):
            TensorParallelOptimizer(momentum(other.parameters()), other)

    run(check)


@pytest.mark.parametrize("options", [full({}), {"data": 2}, {"data": 2, "reference": "split"}])
def test_verify(options: dict[str, Any]) -> None:
    def build() -> Any:
        module = GPT().double()
        batches = [random_tokens(step, VOCABULARY, 4, 7) for step in range(3)]
        pairs = [(tokens[:, :-1], tokens[:, 1:]) for tokens in batches]
        return module, adam(module.parameters()), pairs, _loss

    report = shoal.verify(build, "tensor", 4 if options else 3, steps=3, **options)
    assert report.equal, report


def test_a_rank_that_fails_in_a_split_layer_reaches_all() -> None:
    def check() -> None:
        model, _ = wrapped()
        if shoal.world().rank == 1:
            model.blocks[1].mlp.fc2.register_forward_pre_hook(_fail)
            text_loss(model, batch(0)).backward()
        with pytest.raises(PeerError, match="rank 1 failed: OSError: the disk is full"):
            text_loss(model, batch(0)).backward()

    with pytest.raises(OSError, match="the disk is full"):
        run(check)


def _fail(*_: object) -> None:
    raise OSError("the disk is full")


def test_tasks_are_all_tried() -> None:
    assert {"gpt", "encoder", "translator", "llama", "gpt2", "t5", "bert", "gemma2", "vit"} <= {
        *TASKS
    }
