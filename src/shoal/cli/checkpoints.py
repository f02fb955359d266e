"""`shoal inspect`, `reshard` and `export`: checkpoints from the command line, without any ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from shoal.checkpoint.load.tensor_source import TensorSource

PathArgument = Annotated[
    Path,
    typer.Argument(help="A folder of checkpoints, one of them, or a model.safetensors."),
]
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def inspect_command(
    path: PathArgument,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every byte and compare all checksums.")
    ] = False,
    tensors: Annotated[bool, typer.Option("--tensors", help="A line for each tensor.")] = False,
) -> None:
    """Show what is in a checkpoint and who wrote it; --verify checks that nothing is damaged."""
    from rich.console import Console

    from shoal.checkpoint.tools import open_any, total_bytes
    from shoal.checkpoint.tools import verify as verify_all

    console = Console(highlight=False)
    source = open_any(path)
    _show(console, source)
    if tensors:
        _show_tensors(console, source)
    if verify:
        with _progress(console, "checking", total_bytes(source.tensors)) as progress:
            verify_all(source, progress)
        console.print(
            "every checksum is right"
            if source.is_checked
            else "complete; such a file has no checksums to compare with"
        )


def reshard_command(
    path: PathArgument,
    target: Annotated[Path, typer.Argument(help="A folder of checkpoints that gets the new one.")],
    files: Annotated[int, typer.Option("-n", "--files", help="How many files.")] = 1,
) -> None:
    """Write a checkpoint again into another number of files; loading never needs it."""
    from rich.console import Console

    from shoal.checkpoint.disk.checkpoint_folder import CheckpointFolder
    from shoal.checkpoint.tools import open_any, reshard, total_bytes

    if files < 1:
        raise typer.BadParameter("must be at least 1", param_hint="--files")
    console = Console(highlight=False)
    source = open_any(path)
    with _progress(console, "writing", total_bytes(source.tensors)) as progress:
        written = reshard(source, CheckpointFolder(target), files, progress)
    console.print(str(written), markup=False, soft_wrap=True)


def export_command(
    path: PathArgument,
    target: Annotated[Path, typer.Argument(help="The folder that gets the model.")],
    dtype: Annotated[
        str | None, typer.Option(help="Convert to float32, float16 or bfloat16.")
    ] = None,
    max_shard_size: Annotated[
        str | None, typer.Option(help="The most in one file, as in 5GB; one file by default.")
    ] = None,
) -> None:
    """Write the model as Hugging Face has it: model.safetensors."""
    from rich.console import Console

    from shoal.checkpoint.load.matching import PREFIX
    from shoal.checkpoint.tools import export, open_any

    wanted = _dtype(dtype)
    most_bytes = None if max_shard_size is None else _num_bytes(max_shard_size)
    console = Console(highlight=False)
    source = open_any(path)
    total = sum(r.num_bytes for key, r in source.tensors.items() if key.startswith(PREFIX))
    with _progress(console, "writing", total) as progress:
        written = export(source, target, wanted, most_bytes, progress)
    for each in written:
        console.print(str(each), markup=False, soft_wrap=True)


def _dtype(name: str | None) -> torch.dtype | None:
    import torch

    if name is None:
        return None
    known = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    if name not in known:
        raise typer.BadParameter(f"{name!r} is none of {', '.join(known)}", param_hint="--dtype")
    return known[name]


def _num_bytes(text: str) -> int:
    number, unit = text.upper().removesuffix("B"), ""
    if number[-1:] in _UNITS:
        number, unit = number[:-1], number[-1]
    if not number.isdigit() or not int(number):
        raise typer.BadParameter(f"{text!r} is no size such as 5GB", param_hint="--max-shard-size")
    return int(number) * _UNITS[unit]


@contextlib.contextmanager
def _progress(console: Console, what: str, total: int) -> Iterator[Callable[[int], None]]:
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    columns = ("{task.description}", BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)


def _show(console: Console, source: TensorSource) -> None:
    from rich.table import Table

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in _facts(source):
        table.add_row(name, str(value))
    console.print(table)


def _facts(source: TensorSource) -> Iterator[tuple[str, Any]]:
    yield "path", source.folder
    if source.values.get("step") is not None:
        yield "step", source.values["step"]
    for key in ("model", "strategy", "ranks", "time", "host", "shoal", "torch"):
        if key in source.written_by:
            yield f"written by: {key}" if key in ("shoal", "torch") else key, source.written_by[key]
    for kind, count, num_bytes in _kinds(source):
        yield kind, f"{count} tensors, {_size(num_bytes)}"
    for optimizer in source.values.get("optimizers", []):
        yield "optimizer", f"{optimizer['class']}, {len(optimizer['groups'])} parameter groups"
    extra = source.values.get("extra")
    if extra:
        yield "extra", ", ".join(extra)
    total = sum(record.num_bytes for record in source.files)
    yield "files", f"{len(source.files)}, {_size(total)}"


def _kinds(source: TensorSource) -> list[tuple[str, int, int]]:
    counts: dict[str, tuple[int, int]] = {}
    for key, record in source.tensors.items():
        kind = key.partition("/")[0]
        count, num_bytes = counts.get(kind, (0, 0))
        counts[kind] = (count + 1, num_bytes + record.num_bytes)
    return [(f"{kind} state", *both) for kind, both in counts.items()]


def _show_tensors(console: Console, source: TensorSource) -> None:
    from rich.table import Table

    table = Table("tensor", "dtype", "shape", "bytes", "slices")
    for key, record in source.tensors.items():
        dtype = str(record.dtype).removeprefix("torch.")
        shape = "x".join(map(str, record.shape)) or "scalar"
        table.add_row(key, dtype, shape, _size(record.num_bytes), str(len(record.slices)))
    console.print(table)


def _size(num_bytes: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} B"
