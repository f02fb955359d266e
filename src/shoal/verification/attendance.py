"""What one rank does in a trial; rank 0 also trains the reference, beside its own part.

Both walk in step and are compared as they go, so nothing but the two models is kept.
"""

from __future__ import annotations

import math
from functools import partial

from torch import Tensor

from shoal.comm.world import World, current
from shoal.strategies.layers.precision import parse_precision
from shoal.verification.comparison import Difference, Judge, default_tolerance
from shoal.verification.experiment import Findings, Trial
from shoal.verification.trainers.distributed import Member
from shoal.verification.trainers.one_process import SplitBatch, WholeBatch

_MIXED_PRECISION_TOLERANCE = 1e-2


def attend(trial: Trial) -> Findings:
    """Trains until the end or the first difference; rank 0's findings are the ones that count."""
    world = current()
    wrap = partial(trial.wrap, strategy=trial.strategy, **trial.options)
    member = Member(trial.build, trial.steps, world, wrap, trial.weight)
    num_shares = member.data_group.size
    reference = _reference(trial, num_shares) if world.rank == 0 else None
    judge, first_move, ranks_differ = Judge(_tolerance(trial, member)), 0.0, ""
    for step in range(trial.steps):
        before = _copies(reference) if step == 0 else []
        is_same = _walk(step, reference, member, judge)
        if step == 0:
            first_move = _largest_change(before, _copies(reference))
        odd, is_same = _compare_ranks(world, member, is_same)
        if odd is not None:
            ranks_differ = f"{_who(odd[1])} differ in {odd[0]}"
            difference = Difference(step + 1, "ranks", odd[0], *member.spread(odd[0]))
            judge.first = judge.first or difference
        if odd is not None or not is_same:
            break
    return Findings(
        judge.tolerance,
        judge.first,
        judge.largest,
        ranks_differ,
        first_move,
        num_shares,
        member.num_micro_batches,
    )


def _reference(trial: Trial, num_shares: int) -> WholeBatch:
    narrow = parse_precision(trial.options.get("mixed_precision"))
    if trial.reference == "split":
        averages = bool(trial.options.get("average_buffers"))
        return SplitBatch(
            trial.build,
            trial.steps,
            num_shares,
            weight=trial.weight,
            compute_dtype=narrow,
            averages_buffers=averages,
        )
    return WholeBatch(trial.build, trial.steps, compute_dtype=narrow)


def _tolerance(trial: Trial, member: Member) -> float:
    if trial.tolerance is not None:
        return trial.tolerance
    usual = default_tolerance(member.parts.model)
    is_rounded = trial.options.get("mixed_precision") and trial.reference == "batch"
    return max(usual, _MIXED_PRECISION_TOLERANCE) if is_rounded else usual


def _walk(step: int, reference: WholeBatch | None, member: Member, judge: Judge) -> bool:
    """One step; on rank 0 with the reference at its side."""
    if reference is not None:
        return judge.compare(step, reference.walk(step), member.walk(step))
    for _ in member.walk(step):
        pass
    return True


def _compare_ranks(
    world: World, member: Member, is_same: bool
) -> tuple[tuple[str, list[list[int]]] | None, bool]:
    """What the ranks have different bits of, and who has which; and whether all go on."""
    answers = world.all_gather_object((is_same, member.fingerprints))
    verdicts, everybody = zip(*answers, strict=True)
    odd = None
    for kind, name in member.fingerprints:
        holders: dict[str, list[int]] = {}
        for rank, prints in enumerate(everybody):
            holders.setdefault(prints.get((kind, name), ""), []).append(rank)
        # Parameters tell most: how far apart they are can be looked up.
        if len(holders) > 1 and (odd is None or kind == "parameter"):
            odd = (name or "the loss", list(holders.values()))
            if kind == "parameter":
                break
    return odd, all(verdicts)


def _who(sides: list[list[int]]) -> str:
    names = [f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" for ranks in sides]
    return " and ".join(names)


def _copies(reference: WholeBatch | None) -> list[Tensor]:
    if reference is None:
        return []
    return [seen.value.clone() for seen in reference.parameters() if seen.value is not None]


def _largest_change(before: list[Tensor], after: list[Tensor]) -> float:
    changes = [
        float((new - old).abs().max())
        for old, new in zip(before, after, strict=True)
        if old.numel()
    ]
    return max(changes, default=math.inf)
