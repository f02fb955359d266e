"""Times that can be compared: contenders take turns, the slowest rank counts, medians are told."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass

import torch

from shoal.comm import Backend


@dataclass(frozen=True)
class Times:
    """What many repetitions took, in seconds."""

    median: float
    low: float
    """The first quartile."""
    high: float
    """The third quartile."""
    count: int

    @staticmethod
    def of(samples: torch.Tensor) -> Times:
        """Sums up one contender's samples."""
        low, median, high = samples.quantile(torch.tensor([0.25, 0.5, 0.75]).double()).tolist()
        return Times(median, low, high, samples.numel())

    def divided_by(self, number: int) -> Times:
        """For one of so many that were timed together."""
        return Times(self.median / number, self.low / number, self.high / number, self.count)

    def as_dict(self) -> dict[str, float]:
        """For JSON."""
        return asdict(self)


def alternate(
    calls: Mapping[str, Callable[[], object]],
    meeting: Backend,
    repetitions: int,
    by_the_wall: Collection[str] = (),
    in_a_row: int = 1,
) -> dict[str, Times]:
    """Times the calls in turn, again and again; every rank of `meeting` gets the same answer.

    All ranks meet before each call. The time of a repetition is that of its slowest rank. Each
    round begins with another contender, so that none always follows the same one.

    Args:
        calls: The contenders by name.
        meeting: Where the ranks meet, and agree on the times in the end.
        repetitions: How many of each.
        by_the_wall: Calls that do not wait for other ranks. With more ranks than cores they run
            one after the other, so what counts is from the first begin to the last end.
        in_a_row: How many calls a turn has, as a training loop makes them; the time is for one.
    """
    begins, ends = torch.zeros(2, len(calls), repetitions, dtype=torch.float64)
    numbered = list(enumerate(calls.values()))
    for repetition in range(repetitions):
        first = repetition % len(numbered)
        for number, call in numbered[first:] + numbered[:first]:
            place = (number, repetition)
            begins[place], ends[place] = _time(call, meeting, in_a_row)
    slowest = meeting.all_reduce(ends - begins, "max")
    # One clock for all processes of a host.
    wall = meeting.all_reduce(ends, "max") - meeting.all_reduce(begins, "min")
    return {
        name: Times.of((wall if name in by_the_wall else slowest)[number]).divided_by(in_a_row)
        for number, name in enumerate(calls)
    }


def _time(call: Callable[[], object], meeting: Backend, in_a_row: int) -> tuple[float, float]:
    # Whoever waits long in a barrier goes to sleep. The second finds everybody awake, so that
    # all ranks begin within microseconds of each other.
    meeting.barrier()
    meeting.barrier()
    begin = time.perf_counter()
    for _ in range(in_a_row):
        call()
    return begin, time.perf_counter()


def readable_time(seconds: float) -> str:
    """With three digits and a unit: ``17.3 us``."""
    for factor, unit in ((1e6, "us"), (1e3, "ms")):
        if seconds * factor < 1000:
            value = seconds * factor
            return f"{value:.{_digits(value)}f} {unit}"
    return f"{seconds:.2f} s"


def _digits(value: float) -> int:
    return 2 if value < 10 else 1 if value < 100 else 0


def readable_size(num_bytes: int) -> str:
    """In powers of 1024: ``64 KiB``."""
    for factor, unit in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if num_bytes >= factor and num_bytes % factor == 0:
            return f"{num_bytes // factor} {unit}"
    return f"{num_bytes} B"


def parse_size(text: str) -> int:
    """The inverse, also of short forms: ``64K``, ``4M``, ``4 MiB``, ``512``."""
    plain = text.strip().upper().removesuffix("B").removesuffix("I").strip()
    factor = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(plain[-1:], 1)
    digits = plain.rstrip("KMG").strip()
    if not digits.isdecimal() or int(digits) < 1:
        raise ValueError(f"a size must look like 4096, 64K or 4M; got {text!r}")
    return int(digits) * factor
