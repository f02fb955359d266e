"""`shoal verify`: one line for each strategy, and an exit code for scripts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shoal.cli import main

SOURCE = """
import torch
from torch import nn

not_a_function = 3

def right():
    model = nn.Sequential(nn.Linear(6, 17), nn.Tanh(), nn.Linear(17, 3))
    batches = [(torch.randn(8, 6), torch.randn(8, 3)) for _ in range(3)]
    return model, torch.optim.SGD(model.parameters(), lr=0.1), batches, nn.functional.mse_loss

def wrong():
    model, optimizer, batches, _ = right()
    return model, optimizer, batches, lambda y, t: (y - t).square().sum()
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that can be imported from the current folder, as with ``python -m``."""
    (tmp_path / "users_model.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "users_model", raising=False)
    return "users_model"


def verify(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["verify", *arguments])
    return int(caught.value.code or 0)


def test_every_strategy(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(f"{module}:right", "--strategy", "all", "-n", "3", "--steps", "2") == 0
    text = capsys.readouterr().out
    for strategy in ("ddp", "zero1", "zero2", "zero3", "fsdp"):
        (line,) = [line for line in text.splitlines() if f" {strategy} " in line]
        assert " yes " in line
    assert "3 ranks over memory, reference 'batch', 2 steps" in text


def test_a_difference_is_an_exit_code(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(f"{module}.py:wrong", "-s", "ddp,zero2", "--steps", "1") == 1
    text = capsys.readouterr().out
    assert text.count(" no ") == 2
    assert text.count("likely cause: ") == 1
    assert "the loss is a sum" in text


def test_a_strategy_that_does_not_fit_is_refused(
    module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three layers make no pipeline of four stages; that is no reason to test nothing."""
    arguments = [f"{module}:right", "-n", "4", "--steps", "1"]
    assert verify(*arguments, "-s", "all") == 0
    text = capsys.readouterr().out
    assert " refused " in text
    assert "pipeline is refused: the model can be cut into 3 parts" in text
    assert verify(*arguments, "-s", "ddp,pipeline") == 1


def test_against_the_parts(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A sum over the rows is the same thing to ranks and to one process on their parts."""
    assert verify(f"{module}:wrong", "-s", "zero3", "--reference", "split") == 0
    assert "reference 'split'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["users_model"], "module:function"),
        (["users_model:nothing"], "nothing"),
        (["no_such_module:build"], "no_such_module"),
        (["no_such_file.py:build"], "no_such_file.py"),
        (["users_model:not_a_function"], "not a function"),
        (["users_model:right", "-s", "zero7"], "zero7"),
        (["users_model:right", "--reference", "none"], "none"),
        (["users_model:right", "--backend", "pigeon"], "pigeon"),
    ],
)
def test_what_cannot_be_verified(
    module: str, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert verify(*arguments) == 2
    assert words in capsys.readouterr().err


def test_help_does_not_wait_for_torch() -> None:
    code = (
        "import sys; from shoal.cli import main\n"
        "try: main(['verify', '--help'])\n"
        "finally: print('torch' in sys.modules)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert answer.stdout.splitlines()[-1] == "False"
