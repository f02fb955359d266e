"""The example of the page on compressed gradients runs and gives what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "compression.md"


@pytest.fixture(scope="module", autouse=True)
def first_use():
    """The first step of an optimizer sets a variable that stays."""
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]).step()
    return


def test_the_first_example(capsys: pytest.CaptureFixture[str]) -> None:
    first, *_ = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (promised,) = re.findall(r"# (\[.*\])", first)
    exec(compile(first, str(PAGE), "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.strip() == promised
