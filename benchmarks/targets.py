"""What shared memory is expected to reach with two processes, and whether it did."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from timing import readable_size, readable_time
from verdicts import Verdict

KIB, MIB = 1 << 10, 1 << 20
OWN, PLAIN, IN_PLACE = "shm, own memory", "shm", "shm, in place"
_SLACK_S = 30e-6

Row = dict[str, Any]


class Target(NamedTuple):
    """A bound on the time of one contender, from the times of the others."""

    name: str
    contender: str
    applies_to: Callable[[int], bool]
    other: str
    """The contender to compare with, or "floor" (the fastest copy) or "torch floor"."""
    bound_s: Callable[[float], float]
    """The most that is allowed, from the other's time."""


def _at_least(factor: float) -> Callable[[float], float]:
    return lambda other_s: other_s / factor


TARGETS = (
    *(
        Target(f"{who}: 10 times faster than torch gloo up to 64 KiB", who,
               lambda size: size <= 64 * KIB, "torch gloo", _at_least(10))
        for who in (PLAIN, OWN)
    ),
    *(
        Target(f"{who}: 5 times faster than torch gloo at 4 MiB", who,
               lambda size: size == 4 * MIB, "torch gloo", _at_least(5))
        for who in (PLAIN, OWN)
    ),
    Target(f"{OWN}: 3 times faster than torch gloo at 64 MiB", OWN,
           lambda size: size == 64 * MIB, "torch gloo", _at_least(3)),
    *(
        Target(f"{who}: no slower than mpi from 256 KiB up", who,
               lambda size: size >= 256 * KIB, "mpi", _at_least(1))
        for who in (PLAIN, OWN)
    ),
    *(
        Target(f"{who}: below 256 KiB within twice the time of mpi, or 30 us more", who,
               lambda size: size < 256 * KIB, "mpi",
               lambda other_s: max(2 * other_s, other_s + _SLACK_S))
        for who in (PLAIN, OWN)
    ),
    *(
        Target(f"{who}: within 1.5 times of the {floor} at 64 MiB", who,
               lambda size: size == 64 * MIB, floor, lambda floor_s: 1.5 * floor_s)
        for who in (OWN, IN_PLACE)
        for floor in ("floor", "torch floor")
    ),
)  # fmt: skip


def judge(rows: Sequence[Row]) -> Iterator[tuple[str, list[Verdict]]]:
    """Each target with its verdicts; none where nothing that it speaks of was measured."""
    times = {
        (row["operation"], row["bytes"], row["contender"]): row for row in rows if row["ranks"] == 2
    }
    for target in TARGETS:
        yield target.name, list(_verdicts(target, times))


def _verdicts(target: Target, times: dict[tuple[str, int, str], Row]) -> Iterator[Verdict]:
    for (operation, num_bytes, contender), row in times.items():
        if contender != target.contender or not target.applies_to(num_bytes):
            continue
        other = times.get((operation, num_bytes, target.other))
        if target.other.endswith("floor"):
            other_s = row[f"{target.other.replace(' ', '_')}_s"]
        elif other is not None:
            other_s = other["median_s"]
        else:
            continue
        bound = target.bound_s(other_s)
        text = (
            f"{operation} of {readable_size(num_bytes)}: {readable_time(row['median_s'])}, "
            f"allowed {readable_time(bound)} ({target.other} {readable_time(other_s)})"
        )
        yield Verdict(row["median_s"] <= bound, text)
