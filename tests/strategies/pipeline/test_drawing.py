"""Drawings of schedules: text and SVG, predicted and measured."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from shoal.strategies.pipeline import SCHEDULES, Span, draw, make_schedule, simulate


def test_text() -> None:
    lines = str(draw("1f1b", 2, 2)).splitlines()
    assert lines[0] == "1f1b, 2 stages, 2 micro-batches: 33.3 % of the time is waited"
    assert lines[1] == "  0 | F0 F1  .  . B0 B0  . B1 B1"
    assert lines[2].split("|")[1].split()[:2] == [".", "F0"]


def test_every_pass_is_a_box() -> None:
    for name in SCHEDULES:
        drawing = draw(name, 3, 4)
        root = ElementTree.fromstring(drawing.svg())
        boxes = root.findall("{http://www.w3.org/2000/svg}g")
        assert len(boxes) == len(drawing.spans)


def test_measured() -> None:
    trace = [Span(s.rank, s.tick, 5 + 2 * s.start, 5 + 2 * s.stop)
             for s in simulate(make_schedule("gpipe", 2, 3))]  # fmt: skip
    drawing = draw("gpipe", 2, 3, trace=trace)
    assert "measured" in drawing.heading
    assert drawing.bubble == pytest.approx(draw("gpipe", 2, 3).bubble)


@pytest.mark.parametrize("suffix", ["svg", "txt"])
def test_saved(tmp_path, suffix) -> None:
    path = tmp_path / f"schedule.{suffix}"
    draw("interleaved", 2, 4, path=path)
    assert path.stat().st_size > 100


def test_other_formats_are_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"\.svg or \.txt"):
        draw("1f1b", 2, 2, path=tmp_path / "x.png")
