"""Training steps on GPUs over NCCL: shoal against torch's DDP and `fully_shard`.

One rank for each GPU, or several on one GPU where NCCL was told to allow that; see
docs/backends/nccl.md. Every contender has processes of its own, for large models do not fit beside
each other. They take turns, each round beginning with another one. The slowest rank counts.
Medians are over all steps of all rounds.

    python benchmarks/gpu.py [--ranks 2] [--models gpt-0.37b] [--contenders torch-ddp,zero3]
    python benchmarks/gpu.py --part alone      # one rank: shoal against plain PyTorch
    python benchmarks/gpu.py --part activations --trace 'step-{}.json.gz'  # dropped, or on the host
    python benchmarks/gpu.py --part optimizer  # AdamW on flat memory against plain
    python benchmarks/gpu.py --device cpu --models tiny  # does it run?
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import gpu_optimizer
import gpu_report
import gpu_trace
import report
import torch
from gpu_models import MODELS
from gpu_rank import CONTENDERS, SHOAL, WAYS, WITH_WAYS, Turn
from gpu_turn import take
from rich.console import Console

PARTS = ("contest", "alone", "activations", "optimizer")
_OF_ONE_RANK = {
    "alone": ["alone", *SHOAL],
    "activations": ["alone", "zero3", *(f"zero3+{way}" for way in WAYS)],
}
_SHARING_VARIABLE = "NCCL_MULTI_RANK_GPU_ENABLE"


def main() -> int:
    options = _options()
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    if options.part == "optimizer":
        return gpu_optimizer.hold(console, options.device, options.repetitions, options.json)
    return Contest(options, console).hold()


class Contest:
    """All contenders, with every model, in every round."""

    def __init__(self, options: argparse.Namespace, console: Console) -> None:
        self._options, self._console = options, console
        self._gpus = torch.cuda.device_count() if options.device == "cuda" else 0
        self._entries = {
            (model, contender): gpu_report.Entry(model, contender, options.ranks)
            for model in options.models
            for contender in options.contenders
        }
        self._about = report.environment() | {"ranks": options.ranks, "gpus": self._gpus}

    def hold(self) -> int:
        """Returns the exit status: whether some contender failed."""
        begin = time.monotonic()
        for round_number, model, contender in self._order():
            if time.monotonic() - begin > self._options.budget:
                self._console.print(
                    f"the budget is spent: no more from round {round_number + 1} on"
                )
                break
            self._take(round_number, model, contender)
        entries = list(self._entries.values())
        for model in self._options.models:
            gpu_report.print_table(self._console, [e for e in entries if e.model == model])
        gpu_report.print_errors(self._console, entries)
        return 1 if any(entry.errors for entry in entries) else 0

    def _order(self) -> Iterator[tuple[int, str, str]]:
        """Rounds, in each all models, with each all contenders; another one begins each round."""
        contenders = self._options.contenders
        for number in range(self._options.rounds):
            first = number % len(contenders)
            for model in self._options.models:
                for contender in contenders[first:] + contenders[:first]:
                    yield number, model, contender

    def _take(self, round_number: int, model: str, contender: str) -> None:
        options, entry = self._options, self._entries[model, contender]
        trace = self._trace_of(round_number, model, contender)
        turn = Turn(model, contender, options.device, options.steps, options.warm_up, trace)
        outcome = take(turn, options.ranks, self._gpus, options.timeout)
        entry.add(outcome)
        self._about |= outcome.results[0]["about"] if outcome.results else {}
        self._console.print(
            f"round {round_number + 1}, {model}, {contender}: {entry.news(outcome)}"
        )
        if trace is not None and not outcome.errors:
            print(gpu_trace.Step.of(gpu_trace.load(Path(trace))).describe())
        if options.json is not None:
            rows = [entry.row() for entry in self._entries.values() if entry.is_known]
            report.save_json(options.json, rows, self._about)

    def _trace_of(self, round_number: int, model: str, contender: str) -> str | None:
        """In the first round, so that a contest that is cut short has a trace."""
        path: str | None = self._options.trace
        if path is None or round_number or model != self._options.models[-1]:
            return None
        is_last = contender == self._options.contenders[-1]
        return path.format(contender.replace("+", "-")) if is_last or "{}" in path else None


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--part", choices=PARTS, default=PARTS[0], help="what to measure, default contest")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="default cuda")
    add("--models", type=_names(MODELS), default=["gpt-0.37b", "layers-1000", "gpt-1.58b"])
    known = (*CONTENDERS, *WITH_WAYS)
    add("--contenders", type=_names(known), help=f"default {','.join(CONTENDERS)}")
    add("--ranks", type=int, help="processes, default 2; 1 for --part alone and activations")
    add("--rounds", type=int, default=3, help="how often each contender has its turn, default 3")
    add("--steps", type=int, default=10, help="timed in one turn, default 10")
    add("--warm-up", type=int, default=4, help="steps before, default 4")
    add("--repetitions", type=int, default=20, help="of --part optimizer, default 20")
    add("--timeout", type=float, default=240, help="seconds for one turn, default 240")
    add("--budget", type=float, default=float("inf"), help="seconds after which no turn begins")
    add("--json", type=Path, help="where results go, after each turn")
    trace_help = "where rank 0 of the last contender writes a trace of one step; of each, with a {}"
    add("--trace", help=trace_help)
    options = parser.parse_args()
    options.contenders = options.contenders or _OF_ONE_RANK.get(options.part, list(CONTENDERS))
    options.ranks = options.ranks or (1 if options.part in _OF_ONE_RANK else 2)
    if problem := _problem(options):
        parser.error(problem)
    return options


def _problem(options: argparse.Namespace) -> str | None:
    """Why this machine cannot do what was asked."""
    gpus = torch.cuda.device_count()
    if options.device == "cpu":
        return None
    if not gpus:
        return "there is no GPU here; --device cpu tries whether it runs"
    if options.part != "optimizer" and options.ranks > gpus and not _may_share():
        return f"{options.ranks} ranks on {gpus} GPUs need {_SHARING_VARIABLE}=1 and NCCL 2.30"
    return None


def _may_share() -> bool:
    return os.environ.get(_SHARING_VARIABLE) == "1"


def _names(known: dict[str, object] | tuple[str, ...]) -> Callable[[str], list[str]]:
    """Some of the known names, with commas between."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        return names

    return parse


if __name__ == "__main__":
    sys.exit(main())
