"""`shoal demo` trains under every strategy, and says so truly."""

from __future__ import annotations

import io
import re

import pytest
import torch
from rich.console import Console

import leaks
from shoal.cli import main
from shoal.cli.demo.gpt import GPT, GPTShape, batch, text
from shoal.cli.demo.lesson import learn_alone
from shoal.cli.demo.training import show_training
from shoal.launch.function.forkserver.forkserver import fork_server
from shoal.optim import DATA_PARALLEL, INDEPENDENT, PAIRS

SMALL = GPTShape(width=32, num_layers=2, num_heads=2, context=16, batch_size=8)


@pytest.fixture
def processes() -> None:
    fork_server()
    leaks.baseline()


@pytest.mark.slow
def test_training_under_every_strategy(processes: None) -> None:
    console = Console(file=io.StringIO(), width=110)
    assert show_training(console, 4, SMALL)
    lines = console.file.getvalue().splitlines()
    rows = {line.split()[1]: line for line in lines if line.startswith("│")}
    assert not INDEPENDENT.keys() & rows.keys()  # which are not to equal one process
    for strategy in PAIRS.keys() - INDEPENDENT.keys():
        assert "yes, to" in rows[strategy]
    for strategy in DATA_PARALLEL:
        *_, held, by_formula, moved = re.findall(r"\d+\.\d+", rows[strategy])
        assert float(held) == pytest.approx(float(by_formula), rel=0.05, abs=0.02)
        assert float(moved) > 0
    assert lines[-1].endswith("share one.")


def test_a_difference_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit code is for scripts, the table for people."""
    off = learn_alone(SMALL, 3, lambda step, loss: None)
    next(iter(off.parameters.values())).view(-1)[5] += 1e-3
    monkeypatch.setattr(
        "shoal.cli.demo.training.run",
        lambda fn, ranks, backend, args, timeout: [dict.fromkeys(args[0], off)] * ranks,
    )
    console = Console(file=io.StringIO(), width=110)
    assert not show_training(console, 3, SMALL)
    assert "no, off by 1e-03" in console.file.getvalue()


@pytest.mark.parametrize("is_equal", [True, False])
def test_the_command(monkeypatch: pytest.MonkeyPatch, is_equal: bool) -> None:
    steps = []
    monkeypatch.setattr(
        "shoal.cli.demo.training.show_training",
        lambda console, num_steps: (steps.append(num_steps), is_equal)[1],
    )
    with pytest.raises(SystemExit) as caught:
        main(["demo", "--steps", "7"])
    assert caught.value.code == (0 if is_equal else 1)
    assert steps == [7]


def test_the_other_tour(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = []
    monkeypatch.setattr("shoal.cli.demo.communication.show_communication", shown.append)
    with pytest.raises(SystemExit) as caught:
        main(["demo", "--tour", "comm"])
    assert caught.value.code == 0
    assert len(shown) == 1


def test_the_text_is_real() -> None:
    assert text().numel() > 100_000
    assert text().max() < 128
    tokens, targets = batch(SMALL, 0)
    assert tokens.shape == targets.shape == (8, 16)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])


def test_the_model_learns() -> None:
    learned = learn_alone(SMALL, 12, lambda step, loss: None)
    assert learned.losses[-1] < learned.losses[0] - 0.2
    assert "head.weight" not in learned.parameters  # it is the embedding's
    assert len(list(GPT(SMALL).parameters())) == len(learned.parameters)
