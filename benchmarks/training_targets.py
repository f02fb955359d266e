"""What training with shoal is expected to reach with two processes, and whether it did."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

from gpt import Shape
from roster import COUNTERPARTS, INDEPENDENT
from shoal_trainees import STRATEGIES
from timing import readable_time
from verdicts import Verdict

SHAPES = {
    shape.key: shape
    for shape in (Shape(6, 256, batch=8), Shape(8, 384, batch=2), Shape(40, 64, batch=2))
}
TOLERANCE = 1e-4

_LARGE_BATCH, _FEW_LAYERS, _MANY_LAYERS = SHAPES
_SHARDED = ("zero3", "fsdp")
_EVERYWHERE = tuple(SHAPES)

Row = dict[str, Any]


class Target(NamedTuple):
    """A bound on a contender's time: a factor of another's."""

    name: str
    contender: str
    other: str
    factor: float
    shapes: Collection[str] = _EVERYWHERE


def _times_faster(who: str, than: str, times: float, where: Collection[str]) -> Target:
    name = f"{who}: at least {times:g} times faster than {than}"
    return Target(name, who, than, 1 / times, where)


def _no_slower(who: str, than: str) -> Target:
    return Target(f"{who}: no slower than {than}", who, than, 1.0)


TARGETS = (
    *(
        Target(f"shm-{strategy}: at most 1.05 of {INDEPENDENT} processes", f"shm-{strategy}",
               INDEPENDENT, 1.05)
        for strategy in STRATEGIES
    ),
    *(
        Target(f"shm-{strategy}: faster than {INDEPENDENT} processes", f"shm-{strategy}",
               INDEPENDENT, 1.0, (_FEW_LAYERS, _MANY_LAYERS))
        for strategy in _SHARDED
    ),
    *(
        _times_faster(f"shm-{strategy}", f"fully-shard-{part}", times, where)
        for strategy in _SHARDED
        for part in ("block", "leaf")
        for times, where in ((2, (_LARGE_BATCH, _FEW_LAYERS)), (5, (_MANY_LAYERS,)))
    ),
    *(_times_faster(f"shm-{strategy}", "deepspeed-3", 1.5, _EVERYWHERE) for strategy in _SHARDED),
    *(
        _no_slower(f"{backend}-{strategy}", COUNTERPARTS[strategy])
        for backend, strategies in (("shm", ("ddp",)), ("gloo", ("ddp", "zero1", *_SHARDED)))
        for strategy in strategies
    ),
)  # fmt: skip


def judge(rows: Sequence[Row]) -> Iterator[tuple[str, list[Verdict]]]:
    """Each target with its verdicts; none where nothing that it speaks of was measured."""
    yield (
        "every contender: the loss fell",
        [
            Verdict(row["has_learned"], f"{row['shape']}: {row['contender']}'s did not")
            for row in rows
        ],
    )
    yield (
        f"contenders that communicate: parameters agree within {TOLERANCE:g}",
        [
            Verdict(
                row["difference"] <= TOLERANCE,
                f"{row['shape']}: {row['contender']} is off by {row['difference']:.1e}",
            )
            for row in rows
            if row["difference"] is not None
        ],
    )
    medians = {(row["shape"], row["contender"]): row["median_s"] for row in rows}
    for target in TARGETS:
        yield target.name, list(_verdicts(target, medians))


def _verdicts(target: Target, medians: dict[tuple[str, str], float]) -> Iterator[Verdict]:
    for shape in target.shapes:
        own, other = (medians.get((shape, who)) for who in (target.contender, target.other))
        if own is None or other is None:
            continue
        bound = other * target.factor
        text = (
            f"{shape}: {readable_time(own)}, allowed {readable_time(bound)} "
            f"({own / other:.2f} of {target.other}'s {readable_time(other)})"
        )
        yield Verdict(own <= bound, text)
