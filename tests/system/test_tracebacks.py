"""Tracebacks as text: hidden frames, and which ones say the same."""

from __future__ import annotations

import contextlib
import os
import re
import traceback

import pytest

import shoal
from shoal.system.deadline import wait_until
from shoal.system.rank_names import name_spans
from shoal.system.site import TORCH
from shoal.system.tracebacks import VARIABLE, hide_own_frames, message_of, says


def boom() -> bool:
    raise ValueError("two\nlines")


def failing() -> str:
    try:
        wait_until(boom, 1.0, 0.1)
    except ValueError:
        return traceback.format_exc()
    raise AssertionError


def test_own_frames_are_hidden_and_those_of_others_stay() -> None:
    text = hide_own_frames(failing())
    assert "deadline.py" not in text
    assert text.count("in shoal; SHOAL_TRACEBACK=full shows them") == 1
    assert "in failing" in text
    assert "in boom" in text
    assert text.endswith("ValueError: two\nlines")


def test_all_frames_are_shown_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "full")
    assert hide_own_frames(failing()) == failing()


def test_hidden_frames_at_the_end_of_an_exception_in_a_group() -> None:
    try:
        try:
            wait_until(boom, 1.0, 0.1)
        except ValueError as error:
            raise ExceptionGroup("several", [error]) from None
    except ExceptionGroup:
        text = hide_own_frames(traceback.format_exc())
    assert "deadline.py" not in text
    assert "    |   (1 frame in shoal" in text


def traceback_of(*files: str) -> str:
    frames = "".join(f'  File "{file}", line 3, in call\n    call()\n' for file in files)
    return f"Traceback (most recent call last):\n{frames}ValueError: boom"


USER, MODULE = "/home/user/train.py", f"{TORCH}nn/modules/module.py"
OWN = os.path.join(os.path.dirname(shoal.__file__), "strategies", "model.py")


@pytest.mark.parametrize(
    ("files", "shown", "whose"),
    [
        # On the way from the user's code to shoal's, and from there to the user's.
        ([USER, MODULE, OWN], [USER], ["2 frames in shoal and torch"]),
        ([USER, contextlib.__file__, OWN], [USER], ["2 frames in shoal"]),
        ([USER, MODULE, OWN, MODULE, USER], [USER, USER], ["3 frames in shoal and torch"]),
        ([USER, OWN, contextlib.__file__, OWN], [USER], ["3 frames in shoal"]),
        # Where it happened, and what has nothing to do with shoal.
        ([USER, MODULE, OWN, MODULE], [USER, MODULE], ["2 frames in shoal and torch"]),
        ([USER, MODULE], [USER, MODULE], []),
        ([USER, OWN, USER, MODULE], [USER, USER, MODULE], ["1 frame in shoal"]),
        # Nothing else is left.
        ([MODULE, OWN], [MODULE, OWN], []),
    ],
)
def test_frames_that_lead_to_shoal(files: list[str], shown: list[str], whose: list[str]) -> None:
    text = hide_own_frames(traceback_of(*files))
    assert re.findall(r'File "(.*)", line', text) == shown
    assert re.findall(r"\((.*); SHOAL_TRACEBACK=full shows them\)", text) == whose
    assert text.endswith("ValueError: boom")


def test_a_message_is_what_follows_the_frames() -> None:
    assert message_of(failing()) == "ValueError: two\nlines"
    assert message_of("KeyboardInterrupt\n") == "KeyboardInterrupt"


def test_times_and_addresses_do_not_count() -> None:
    one, other = "in x, for 0.1 s (pid 12)\n <o at 0x7f12>", "in x (pid 345)\n <o at 0x7fff>\n"
    assert says(one) == says(other)
    assert says("rank 1 failed") != says("rank 2 failed")


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([3], "rank 3"), ([0, 1], "ranks 0, 1"), ([0, 1, 2, 5, 7, 8, 9], "ranks 0-2, 5, 7-9")],
)
def test_spans(ranks: list[int], text: str) -> None:
    assert name_spans(ranks) == text
