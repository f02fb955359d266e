"""A traceback at the end of a rank's output: how long it is kept from the screen."""

from __future__ import annotations

import asyncio
import math

import pytest

from shoal.launch.script import held
from shoal.launch.script.held import HeldTraceback

MOMENT = 0.02


@pytest.fixture(autouse=True)
def moments_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "MOMENT_SECONDS", MOMENT)


@pytest.mark.parametrize(
    "first", [b"Traceback (most recent call last):\n", b"Exception ignored in atexit callback: f\n"]
)
def test_a_traceback_is_shown_after_a_moment_unless_patience_is_longer(first: bytes) -> None:
    async def shown(patience: float) -> list[bytes]:
        lines: list[bytes] = []
        kept = HeldTraceback(lines.append, lambda: patience)
        assert kept.take(first)
        assert kept.take(b"KeyboardInterrupt\n")
        await asyncio.sleep(20 * MOMENT)
        kept.drop()
        return lines

    assert asyncio.run(shown(MOMENT)) == [first, b"KeyboardInterrupt\n"]
    assert asyncio.run(shown(math.inf)) == []


def test_other_lines_are_not_kept() -> None:
    kept = HeldTraceback(lambda line: None, lambda: math.inf)
    assert not kept.take(b"loss 1.0\n")
