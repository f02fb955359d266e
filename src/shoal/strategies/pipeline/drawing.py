"""Schedules as pictures: a row for each rank, time from left to right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from shoal.strategies.pipeline.schedules import Pass, Span, bubble, make_schedule, simulate

_COLORS = {Pass.FORWARD: "#7fb3ff", Pass.BACKWARD: "#ffb074", Pass.WEIGHTS: "#a8d8a0"}
_WORDS = {Pass.FORWARD: "forward", Pass.BACKWARD: "backward", Pass.WEIGHTS: "weights"}
_WIDTH, _ROW, _LEFT, _TOP = 960, 34, 64, 34
_LABEL_PIXELS = 16


@dataclass(frozen=True)
class ScheduleDrawing:
    """Which rank did which pass when, predicted or measured.

    Attributes:
        title: The schedule, the stages and the micro-batches.
        spans: All ranks' passes.

    Example:
        >>> print(draw("1f1b", stages=2, micro_batches=2))
        1f1b, 2 stages, 2 micro-batches: 33.3 % of the time is waited
          0 | F0 F1  .  . B0 B0  . B1 B1
          1 |  . F0 B0 B0 F1 B1 B1  .  .
    """

    title: str
    spans: Sequence[Span]

    @property
    def bubble(self) -> float:
        """The share of the ranks' time in which they wait."""
        return bubble(self.spans)

    @property
    def heading(self) -> str:
        """The title, and the share of the time in which ranks wait."""
        return f"{self.title}: {100 * self.bubble:.1f} % of the time is waited"

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int | None = None) -> str:
        """One line for each rank; ``width`` in cells, by default one for the shortest pass."""
        begin, end = self._limits()
        shortest = min((s.stop - s.start for s in self.spans if s.stop > s.start), default=1.0)
        if width is None:
            width = max(1, min(round((end - begin) / shortest), 160))
        size = 1 + max(len(str(span.tick.micro_batch)) for span in self.spans)
        rows = [[" " * (size - 1) + "."] * width for _ in range(self._num_ranks())]
        for span in self.spans:
            first = round((span.start - begin) / (end - begin) * width)
            last = max(round((span.stop - begin) / (end - begin) * width), first + 1)
            for cell in range(first, min(last, width)):
                rows[span.rank][cell] = str(span.tick).rjust(size)
        lines = [f"{rank:3} | {' '.join(row)}" for rank, row in enumerate(rows)]
        return "\n".join([self.heading, *lines])

    def svg(self) -> str:
        """As a picture that any browser shows."""
        height = _TOP + _ROW * self._num_ranks() + 28
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH + _LEFT + 8}" '
            f'height="{height}" font-family="sans-serif" font-size="12">',
            f'<text x="8" y="20" font-size="14">{escape(self.heading)}</text>',
            *(
                f'<text x="8" y="{_TOP + _ROW * rank + 21}">stage {rank}</text>'
                for rank in range(self._num_ranks())
            ),
            *map(self._box, self.spans),
            *self._legend(height - 10),
        ]
        return "\n".join([*parts, "</svg>"])

    def _box(self, span: Span) -> str:
        begin, end = self._limits()
        scale = _WIDTH / (end - begin)
        x, width = _LEFT + (span.start - begin) * scale, (span.stop - span.start) * scale
        y = _TOP + _ROW * span.rank + 4
        title = f"{_WORDS[span.tick.kind]} of {span.tick.micro_batch} in chunk {span.tick.chunk}"
        label = ""
        if width >= _LABEL_PIXELS:
            label = (
                f'<text x="{x + width / 2:.1f}" y="{y + 17}" text-anchor="middle">'
                f"{span.tick.micro_batch}</text>"
            )
        # Later chunks of a rank are paler.
        opacity = 1.0 / (1 + span.tick.chunk // self._num_ranks())
        return (
            f'<g><title>{title}</title><rect x="{x:.1f}" y="{y}" width="{width:.1f}" '
            f'height="{_ROW - 8}" fill="{_COLORS[span.tick.kind]}" fill-opacity="{opacity:.2f}" '
            f'stroke="white"/>{label}</g>'
        )

    def _legend(self, y: int) -> list[str]:
        used = [kind for kind in Pass if any(span.tick.kind is kind for span in self.spans)]
        return [
            f'<rect x="{_LEFT + 110 * index}" y="{y - 10}" width="12" height="12" '
            f'fill="{_COLORS[kind]}"/>'
            f'<text x="{_LEFT + 110 * index + 18}" y="{y}">{_WORDS[kind]}</text>'
            for index, kind in enumerate(used)
        ]

    def _limits(self) -> tuple[float, float]:
        return min(s.start for s in self.spans), max(s.stop for s in self.spans)

    def _num_ranks(self) -> int:
        return 1 + max(span.rank for span in self.spans)

    def save(self, path: str | Path) -> None:
        """Writes a ``.svg`` or a ``.txt`` file."""
        path = Path(path)
        if path.suffix == ".svg":
            path.write_text(self.svg())
        elif path.suffix == ".txt":
            path.write_text(str(self) + "\n")
        else:
            raise ValueError(f"a drawing is saved as .svg or .txt; got {path.name!r}")


def draw(
    schedule: str,
    stages: int,
    micro_batches: int,
    *,
    chunks: int | None = None,
    costs: Mapping[Pass, float] | None = None,
    trace: Sequence[Span] | None = None,
    path: str | Path | None = None,
) -> ScheduleDrawing:
    """Draws a schedule: as predicted, or as measured if there is a trace.

    Args:
        schedule: One of `SCHEDULES`.
        stages: How many ranks.
        micro_batches: How many parts of a batch.
        chunks: Parts of the model on each rank; by default what the schedule takes.
        costs: What the passes take; by default backward twice as long as forward.
        trace: What ``model.gather_trace()`` returned.
        path: Where to save it as well, as .svg or .txt.

    Returns:
        A drawing that prints as text; ``svg()`` and ``save(path)`` make pictures.
    """
    title = f"{schedule}, {stages} stages, {micro_batches} micro-batches"
    plan = make_schedule(schedule, stages, micro_batches, chunks)
    spans = simulate(plan, costs) if trace is None else trace
    drawing = ScheduleDrawing(title + (", measured" if trace is not None else ""), spans)
    if path is not None:
        drawing.save(path)
    return drawing
