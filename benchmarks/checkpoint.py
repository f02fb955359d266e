"""Saving and loading against torch.save, DCP and plain safetensors, of the same bytes.

A process, and then two, train a model with AdamW under ZeRO-3; each has its part of the state.
Measured is how long all together take until the state is safe on disk (everybody syncs), and until
it is back in the model and the optimizer: from what the system still has in memory, and from the
disk.
Contenders write and read the same tensors: a shard each, to a new file each time. Saves are
measured twice: as they are, and with the removal of what was saved before. And how long training
stands still for a save in the background, against one copy of the same memory.
Contenders have another order in each round: memory that the system has not used for a while takes
it longer to fill, and each contender leaves other memory behind.

    python benchmarks/checkpoint.py [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from report import environment
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from timing import readable_time
from torch import Tensor, nn

import shoal
from shoal.checkpoint.disk.checkpoint_folder import CheckpointFolder
from shoal.checkpoint.disk.filesystem import wait_until_freed
from shoal.comm import Backend

RESULTS = Path(__file__).parent / "results" / "checkpoint.json"
CONTENDERS = ("shoal", "safetensors", "torch", "dcp")
SAVERS = (*CONTENDERS, "safetensors_unsynced")
REPLACERS = ("shoal", "safetensors")
LEAST_SHARE = 0.8
WORLDS = (1, 2)
COLUMNS = {
    "save": "save, synced",
    "replace": "save and remove the last",
    "load": "load, from memory",
    "cold load": "load, from the disk",
}


def build(megabytes: int) -> Any:
    """A model of so many megabytes; its state under AdamW is three times that."""
    width = 1024
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(megabytes // 4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer = shoal.as_distributed(model, optimizer, strategy="zero3")
    model(torch.randn(4, width)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def own_tensors(model: Any, optimizer: Any) -> dict[str, Tensor]:
    """This rank's shard as contenders get it: the same bytes, in a tensor for each parameter."""
    parts: dict[str, list[Tensor]] = {held.name: [held.memory] for held in model.held()}
    for held in optimizer.held_state():
        for key, memory in held.tensors.items():
            parts.setdefault(f"{held.name}.{key}", []).append(memory)
    return {name: torch.cat(own) for name, own in parts.items()}


def synced(path: Path) -> None:
    """Whoever says that it has saved must survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def forgotten(folder: Path) -> None:
    """What is read next comes from the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


class Contest:
    """One rank's side of it."""

    def __init__(self, folder: Path, megabytes: int) -> None:
        self.backend: Backend = shoal.world().backend
        self.folder, self.rank = folder, shoal.world().rank
        self.model, self.optimizer = build(megabytes)
        self.tensors = own_tensors(self.model, self.optimizer)
        self.num_bytes = sum(tensor.nbytes for tensor in self.tensors.values())
        self.keep: int | None = None
        self.paths: dict[str, Path] = {}
        self.old: list[Path] = []

    def time(self, action: Callable[[], object]) -> float:
        """Until the slowest rank is done."""
        wait_until_freed()  # what is removed in the background is nobody else's concern
        self.backend.barrier()
        begin = time.perf_counter()
        action()
        self.backend.barrier()
        return time.perf_counter() - begin

    # Saving -----------------------------------------------------------------------------

    def save_shoal(self) -> None:
        """With checksums, crash safe."""
        shoal.save(self.folder / "shoal", self.model, self.optimizer, keep=self.keep)

    def save_safetensors(self) -> None:
        """A file of this rank's own, synced."""
        with self.replacing("safetensors") as path:
            save_file(self.tensors, path)
            synced(path)

    def save_safetensors_unsynced(self) -> None:
        """What a loss of power may take back."""
        with self.replacing("safetensors_unsynced") as path:
            save_file(self.tensors, path)

    def save_torch(self) -> None:
        """A pickle of this rank's own, synced."""
        with self.replacing("torch") as path:
            torch.save(self.tensors, path)
            synced(path)

    def save_dcp(self) -> None:
        """A folder of this rank's own, synced."""
        import torch.distributed.checkpoint as dcp

        with self.replacing("dcp") as path:
            writer = dcp.FileSystemWriter(path, sync_files=True)
            dcp.save({"state": self.tensors}, storage_writer=writer, no_dist=True)

    @contextmanager
    def replacing(self, kind: str) -> Iterator[Path]:
        """A name that is not taken; what was saved before goes when the new one is there."""
        old = self.paths.get(kind)
        number = 0 if old is None else int(old.suffix[1:]) + 1
        path = self.folder / kind / f"{self.rank}.{number}"
        path.parent.mkdir(exist_ok=True)
        yield path
        self.paths[kind] = path
        if old is not None:
            self.old.append(old)
        if self.keep == 1:
            self._remove_old_files()

    def remove_old(self) -> None:
        """All that was saved before what is there now."""
        self._remove_old_files()
        if self.rank == 0:
            CheckpointFolder(self.folder / "shoal").prune(keep=1)

    def _remove_old_files(self) -> None:
        for path in self.old:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        self.old.clear()

    def save_all(self, turn: int) -> dict[str, float]:
        """Seconds of every contender; nobody keeps more than one in the end."""
        measured = {}
        for name in random.Random(turn).sample(SAVERS, len(SAVERS)):
            self.keep = None
            measured[f"save {name}"] = self.time(getattr(self, f"save_{name}"))
            self.remove_old()
        for name in random.Random(turn).sample(REPLACERS, len(REPLACERS)):
            self.keep = 1
            measured[f"replace {name}"] = self.time(getattr(self, f"save_{name}"))
        return measured

    # Loading ----------------------------------------------------------------------------

    def load_shoal(self) -> None:
        """Every byte compared with its checksum."""
        shoal.load(self.folder / "shoal", self.model, self.optimizer)

    def load_safetensors(self) -> None:
        """No checksums."""
        self._take(load_file(self.paths["safetensors"]))

    def load_torch(self) -> None:
        """No checksums of tensors."""
        self._take(torch.load(self.paths["torch"], weights_only=True))

    def load_dcp(self) -> None:
        """No checksums."""
        import torch.distributed.checkpoint as dcp

        target = {name: torch.empty_like(tensor) for name, tensor in self.tensors.items()}
        reader = dcp.FileSystemReader(self.paths["dcp"])
        dcp.load({"state": target}, storage_reader=reader, no_dist=True)
        self._take(target, is_own=True)

    def _take(self, found: dict[str, Tensor], *, is_own: bool = False) -> None:
        """Parameters go to their place; what an optimizer needs becomes its own."""
        for name, tensor in found.items():
            if "." in name.removesuffix(".weight"):
                found[name] = tensor if is_own else tensor.clone()
            else:
                self.tensors[name].copy_(tensor)

    # A save in the background -----------------------------------------------------------

    def stall(self) -> float:
        """Seconds that training stands still; the writing is waited for afterwards."""
        pending: list[Any] = []
        seconds = self.time(
            lambda: pending.append(
                shoal.save(self.folder / "shoal", self.model, self.optimizer, keep=1, wait=False)
            )
        )
        pending[0].wait()
        return seconds

    def copy(self) -> float:
        """Seconds for one of what this rank holds, into memory that is kept meanwhile."""
        copies: list[Tensor] = []
        return self.time(lambda: copies.extend(each.clone() for each in self.tensors.values()))


def measure(folder: str, megabytes: int, repetitions: int) -> dict[str, Any]:
    """Called on every rank."""
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    contest = Contest(Path(folder), megabytes)
    times: dict[str, list[float]] = {}
    for turn in range(repetitions + 1):
        measured = contest.save_all(turn)
        names = random.Random(turn).sample(CONTENDERS, len(CONTENDERS))
        for name in names:
            measured[f"load {name}"] = contest.time(getattr(contest, f"load_{name}"))
        for name in names:
            if contest.rank == 0:
                forgotten(contest.folder / name)
            measured[f"cold load {name}"] = contest.time(getattr(contest, f"load_{name}"))
        for name in random.Random(turn).sample(("stall", "copy"), 2):
            measured[name] = getattr(contest, name)()
        if turn:  # the first is for warming up
            for name, seconds in measured.items():
                times.setdefault(name, []).append(seconds)
    ranks = shoal.world().size
    return {"ranks": ranks, "bytes": contest.num_bytes * ranks, "times_s": times}


def table(result: dict[str, Any]) -> Table:
    """A line for each contender."""
    processes = "1 process" if result["ranks"] == 1 else f"{result['ranks']} processes"
    title = f"{result['bytes'] / 1e9:.2f} GB of state, {processes}; GB/s"
    shown = Table(title=title, title_justify="left")
    for name in ("", *COLUMNS.values()):
        shown.add_column(name, justify="right")
    for name in CONTENDERS:
        shown.add_row(name, *(_cell(result, f"{kind} {name}") for kind in COLUMNS))
    shown.add_row("safetensors, not synced", _cell(result, "save safetensors_unsynced"))
    return shown


def _cell(result: dict[str, Any], name: str) -> str:
    """The rate, and those of the quartiles."""
    if name not in result["times_s"]:
        return ""
    rates = [result["bytes"] / each / 1e9 for each in result["times_s"][name]]
    if len(rates) == 1:
        return f"{rates[0]:.2f}"
    low, middle, high = quantiles(rates, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def _rate(result: dict[str, Any], name: str) -> float:
    return float(result["bytes"] / median(result["times_s"][name]) / 1e9)


def verdicts(result: dict[str, Any]) -> list[tuple[str, bool]]:
    """What was aimed at, and whether it was reached."""
    lines = []
    for kind in COLUMNS:
        share = _rate(result, f"{kind} shoal") / _rate(result, f"{kind} safetensors")
        text = f"{kind}: {share:.2f} of plain safetensors (aim: {LEAST_SHARE})"
        lines.append((text, share >= LEAST_SHARE))
    stall, copy = (median(result["times_s"][name]) for name in ("stall", "copy"))
    text = f"stall of a save in the background: {readable_time(stall)}; "
    text += f"one copy takes {readable_time(copy)}"
    lines.append((text, stall <= copy))
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small model: does it run?")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where results go")
    options = parser.parse_args()
    megabytes, repetitions = (8, 1) if options.quick else (256, 12)
    about = environment()
    console = Console(width=None if sys.stdout.isatty() else 120)
    results, is_all_reached = [], True
    for ranks in WORLDS:
        with tempfile.TemporaryDirectory() as folder:
            arguments = (folder, megabytes, repetitions)
            results.append(shoal.run(measure, ranks, "shm", args=arguments)[0])
        console.print(table(results[-1]))
        for text, is_reached in verdicts(results[-1]):
            console.print(f"{'yes' if is_reached else 'no ':3}  {text}", highlight=False)
            is_all_reached = is_all_reached and is_reached
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"environment": about, "results": results}, indent=1) + "\n")
    return 0 if is_all_reached else 1


if __name__ == "__main__":
    sys.exit(main())
