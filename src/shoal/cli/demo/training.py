"""`shoal demo`: a small GPT, in one process and then on four ranks under every strategy."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from shoal.api import run
from shoal.cli.demo.gpt import GPT, GPTShape
from shoal.cli.demo.lesson import Learned, learn_alone, learn_together
from shoal.launch.joining.join import choose_for_cpu
from shoal.optim import DATA_PARALLEL, INDEPENDENT, PAIRS

if TYPE_CHECKING:
    from rich.console import Console

_RANKS = 4
_TOLERANCE = 1e-5
_MIB = 1 << 20
_TIMEOUT_S = 120.0
_LOOK_EVERY_S = 0.1


def show_training(console: Console, num_steps: int, shape: GPTShape | None = None) -> bool:
    """Trains under every strategy; returns whether all were equal to one process."""
    shape = shape or GPTShape()
    backend = choose_for_cpu(is_one_host=True)
    num_parameters = sum(parameter.numel() for parameter in GPT(shape).parameters())
    console.rule(f"[bold]A GPT of {num_parameters / 1e6:.1f} million parameters", align="left")
    console.print(
        f"It learns the help texts of Python, {num_steps} steps of {shape.batch_size} x "
        f"{shape.context} bytes: in one process, then on {_RANKS} ranks over {backend}."
    )
    with _progress(console) as progress:
        alone = learn_alone(shape, num_steps, _Line(progress, "one process", num_steps))
        # The others are not to equal one process.
        strategies = [name for name in PAIRS if name not in INDEPENDENT]
        lines = {strategy: _Line(progress, strategy, num_steps) for strategy in strategies}
        lessons = _train(shape, num_steps, backend, lines)
    console.print(_table(alone, lessons))
    console.print(_legend(), style="dim")
    return all(_distance(alone, ranks) <= _TOLERANCE for ranks in lessons.values())


def _train(
    shape: GPTShape, num_steps: int, backend: str, lines: dict[str, _Line]
) -> dict[str, list[Learned]]:
    """Each rank's lesson by strategy; the processes start once for all."""
    with tempfile.TemporaryDirectory(prefix="shoal-demo-") as folder:
        news = Path(folder) / "news"
        news.touch()
        arguments = (list(lines), shape, num_steps, str(news))
        with _watching(news, lines):
            ranks = run(learn_together, _RANKS, backend, args=arguments, timeout=_TIMEOUT_S)
    return {strategy: [rank[strategy] for rank in ranks] for strategy in lines}


# Progress -------------------------------------------------------------------------------


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("[bold]{task.description:12}"),
        BarColumn(30),
        TextColumn("step {task.completed} of {task.total}"),
        TextColumn("loss {task.fields[loss]}"),
        console=console,
    )


class _Line:
    def __init__(self, progress: Progress, title: str, num_steps: int) -> None:
        self._progress = progress
        self._task = progress.add_task(title, total=num_steps, loss="...")

    def __call__(self, step: int, loss: float) -> None:
        self._progress.update(self._task, completed=step, loss=f"{loss:.3f}")


@contextmanager
def _watching(news: Path, lines: dict[str, _Line]) -> Iterator[None]:
    """Inside, what rank 0 writes is shown."""
    ended = threading.Event()

    def look() -> None:
        for entry in news.read_text(encoding="ascii").rpartition("\n")[0].splitlines():
            strategy, step, loss = entry.split()
            lines[strategy](int(step), float(loss))

    def watch() -> None:
        while not ended.wait(_LOOK_EVERY_S):
            look()

    thread = threading.Thread(target=watch, name="shoal-demo-watch", daemon=True)
    thread.start()
    try:
        yield
        look()
    finally:
        ended.set()
        thread.join()


# The table ------------------------------------------------------------------------------


def _table(alone: Learned, lessons: dict[str, list[Learned]]) -> Table:
    table = Table()
    table.add_column("", no_wrap=True)
    table.add_column("equal to\none process?")
    for title in (
        "loss",
        "ms a\nstep",
        "parameters + gradients + state\nMiB a rank",
        "by\nformula",
        "moved\nMiB a step",
    ):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_row("one process", "", *_figures([alone]), _formula(alone, "ddp"), "")
    for strategy, ranks in lessons.items():
        # Theory has no formula for ranks of which some only exchange activations.
        is_told = strategy in DATA_PARALLEL
        moved = f"{max(rank.moved for rank in ranks) / _MIB:.1f}" if is_told else ""
        verdict = _verdict(_distance(alone, ranks))
        table.add_row(strategy, verdict, *_figures(ranks), _formula(alone, strategy), moved)
    return table


def _verdict(distance: float) -> str:
    if distance <= _TOLERANCE:
        return f"[green]yes, to {distance:.0e}[/green]"
    return f"[red]no, off by {distance:.0e}[/red]"


def _figures(ranks: list[Learned]) -> list[str]:
    parts = ("parameters", "gradients", "state")
    held = [max(rank.held[part] for rank in ranks) / _MIB for part in parts]
    terms = " + ".join(f"{size:.2f}" for size in held)
    loss, seconds = ranks[0].losses[-1], ranks[0].seconds
    return [f"{loss:.3f}", f"{1e3 * seconds:.0f}", f"{terms} = {sum(held):5.2f}"]


def _formula(alone: Learned, strategy: str) -> str:
    """What ZeRO promises: parameters, gradients and state, each whole or a rank's part."""
    if strategy not in DATA_PARALLEL:
        return ""
    sharding = PAIRS[strategy][0].sharding
    cut = {
        "parameters": sharding.parameters,
        "gradients": sharding.gradients,
        "state": sharding.optimizer,
    }
    total = sum(alone.held[part] / (_RANKS if is_cut else 1) for part, is_cut in cut.items())
    return f"{total / _MIB:.2f}"


def _distance(alone: Learned, ranks: list[Learned]) -> float:
    trained = ranks[0].parameters
    return max(float((p - trained[name]).abs().max()) for name, p in alone.parameters.items())


def _legend() -> str:
    return (
        f"equal: after training no element of any parameter is off by more than {_TOLERANCE:g}. "
        "ms: median. MiB: measured, the largest of the ranks; an all-reduce counts as the "
        "reduce-scatter and the all-gather that it is. tensor, pipeline: two ranks share a "
        "model, and two such pairs see other data; hybrid: four ranks share one."
    )
