"""Evaluation: what is gathered, how often, and that it is up to date."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import shoal
from strategies.loops import (
    RANKS,
    BuildModule,
    State,
    assert_same,
    data,
    each,
    gathered,
    local,
    momentum,
    num_gathers,
    num_present,
    one_step,
    run,
    seeded,
    whole_state,
    wrapped,
)
from strategies.models import GPT, OddMLP, ResNet, random_numbers


@each
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("make", [OddMLP, ResNet, GPT])
def test_evaluation_between_steps(strategy: str, mode: Any, make: BuildModule) -> None:
    def inputs() -> Tensor:
        if make is GPT:
            return torch.arange(12).view(2, 6)
        return random_numbers(0, 2, 3, 6, 6) if make is ResNet else data(0)[0][:2]

    def train(is_wrapped: bool) -> tuple[list[Tensor], State]:
        model: Any = seeded(make)
        optimizer: Any = momentum(model)
        if is_wrapped:
            model, optimizer = shoal.as_distributed(
                model, optimizer, strategy=strategy, min_group_bytes=300
            )
        answers = []
        for _ in range(3):
            model.eval()
            assert not model.training
            with mode():
                answers.append(model(inputs()).clone())
            model.train()
            assert model.training
            optimizer.zero_grad()
            model(inputs()).square().mean().backward()
            optimizer.step()
        return answers, whole_state(model)

    expected, expected_state = train(False)
    for answers, state in run(train, True):
        assert_same(state, expected_state)
        for answer, reference in zip(answers, expected, strict=True):
            assert torch.allclose(answer, reference, rtol=0, atol=1e-10)


@gathered
def test_repeated_predictions_gather_once(strategy: str) -> None:
    def predict() -> list[int]:
        model, _ = wrapped(strategy)
        x, _ = local(0)
        counts = []
        with model.predicting():
            for _ in range(3):
                before = num_gathers()
                assert not model(x).requires_grad
                counts.append(num_gathers() - before)
        before = num_gathers()
        model(x)
        counts.append(num_gathers() - before)
        assert num_present(model) == 0
        return counts

    for first, second, third, outside in run(predict):
        assert first > 0
        assert second == third == 0
        assert outside > 0


@each
def test_predictions_see_what_training_has_changed(strategy: str) -> None:
    def train() -> list[Tensor]:
        model, optimizer = wrapped(strategy)
        x, _ = data(5)
        answers = []
        with model.predicting():
            answers.append(model(x))
        one_step(model, optimizer, local(0))
        with model.predicting():
            answers.append(model(x))
            with torch.enable_grad():
                one_step(model, optimizer, local(1))  # training inside the block
            answers.append(model(x))
        return answers

    model = seeded()
    optimizer = momentum(model)
    expected = [model(data(5)[0]).detach()]
    for step in (0, 1):
        one_step(model, optimizer, data(step))
        expected.append(model(data(5)[0]).detach())
    for answers in run(train):
        for answer, reference in zip(answers, expected, strict=True):
            assert torch.allclose(answer, reference, rtol=0, atol=1e-10)


def test_memory_is_bounded_without_a_predicting_block() -> None:
    def predict() -> list[int]:
        model, _ = wrapped("zero3")
        found = []
        for _ in range(3):
            with torch.no_grad():
                model(local(0)[0])
            found.append(num_present(model))
        return found

    assert run(predict) == [[0, 0, 0]] * RANKS
