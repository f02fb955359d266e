"""The ranks' side of `collectives.py`: all contenders in the same processes, in one run."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from contenders import (
    Contender,
    RawMPI,
    Shoal,
    ShoalInPlace,
    ShoalOnItsOwnMemory,
    TorchGloo,
    copy_calls,
    floor_s,
)
from timing import alternate
from worlds import connect, join_torch

import shoal
from shoal.comm import Backend
from shoal.system.libc import num_cores

_SMALL, _LARGE = 64 << 10, 64 << 20
# Calls of one turn at small sizes: a loop finds its own code in the caches, as training does.
_IN_A_ROW = 16


@dataclass(frozen=True)
class Plan:
    """What to measure."""

    operations: tuple[str, ...]
    sizes: tuple[int, ...]
    repetitions: int
    """At sizes up to 64 KiB; larger ones get fewer, down to a sixteenth at 64 MiB."""
    with_raw_mpi: bool = False

    def repetitions_at(self, num_bytes: int) -> int:
        """The larger the size, the fewer are needed, and the longer each takes."""
        factor = min(max(num_bytes / _SMALL, 1), _LARGE / _SMALL) ** 0.4
        return max(5, round(self.repetitions / factor))


def hold(plan: Plan) -> list[dict[str, Any]]:
    """Measures everything; called on every rank of a world of kind "mpi" or "shm"."""
    rows = []
    with contextlib.ExitStack() as stack:
        meeting, contenders = _contenders(plan, stack)
        for operation in plan.operations:
            for num_bytes in plan.sizes:
                rows += _measure(operation, num_bytes, plan, meeting, contenders)
        meeting.barrier()
    return rows


def _contenders(plan: Plan, stack: contextlib.ExitStack) -> tuple[Backend, dict[str, Contender]]:
    world = shoal.world().backend
    is_mpi = world.name == "mpi"
    shm = stack.enter_context(connect("shm", world)) if is_mpi else world
    gloo = stack.enter_context(connect("gloo", world))
    join_torch(stack)
    contenders: dict[str, Contender] = {
        "shm": Shoal(shm),
        "shm, own memory": ShoalOnItsOwnMemory(shm),
        "shm, in place": ShoalInPlace(shm),
        "torch gloo": TorchGloo(world.rank, world.size),
        "gloo": Shoal(gloo),
    }
    if is_mpi:
        contenders["mpi"] = Shoal(world)
    if is_mpi and plan.with_raw_mpi:
        from mpi4py import MPI

        contenders["mpi4py"] = RawMPI(MPI.COMM_WORLD.Dup())
    return shm, contenders


def _measure(
    operation: str,
    num_bytes: int,
    plan: Plan,
    meeting: Backend,
    contenders: dict[str, Contender],
) -> list[dict[str, Any]]:
    copies = copy_calls(num_bytes)
    calls = dict(copies)
    for name, contender in contenders.items():
        if operation not in contender.operations:
            continue
        calls[name] = contender.prepare(operation, num_bytes)
    alternate(calls, meeting, 2)  # the first calls pay for what is made on demand
    by_the_wall = tuple(copies) if meeting.size > num_cores() else ()
    in_a_row = _IN_A_ROW if num_bytes <= _SMALL else 1
    repetitions = plan.repetitions_at(num_bytes)
    times = alternate(calls, meeting, repetitions, by_the_wall, in_a_row)
    copied = {name: times.pop(name).median for name in copies}
    floor = floor_s(operation, meeting.size, min(copied.values()))
    torch_floor = floor_s(operation, meeting.size, copied["copy by torch"])
    return [
        {
            "operation": operation,
            "ranks": meeting.size,
            "bytes": num_bytes,
            "contender": name,
            "floor_s": floor,
            "torch_floor_s": torch_floor,
            **{f"{key}_s" if key != "count" else key: value for key, value in t.as_dict().items()},
        }
        for name, t in times.items()
    ]
