"""An experiment from beginning to end: on every rank, and the search for a cause if they differ.

Rank 0 also trains the reference, beside its own part. Both train step by step and are compared as
they go, so nothing but the two models is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from shoal.comm.world import World, current
from shoal.optim import DATA_PARALLEL, INDEPENDENT
from shoal.strategies.layers.precision import parse_precision
from shoal.verification.comparison import Comparison, Difference, default_tolerance
from shoal.verification.diagnosis.causes import likely_cause
from shoal.verification.diagnosis.replay import Replay
from shoal.verification.experiment import REPLAY, Experiment, Findings, Report
from shoal.verification.trainers.async_replay import train_async_on_rank
from shoal.verification.trainers.compressed_replay import CompressedReplay
from shoal.verification.trainers.distributed import DistributedTrainer
from shoal.verification.trainers.local_replay import LocalReplay
from shoal.verification.trainers.one_process import SplitBatch, WholeBatch
from shoal.verification.trainers.trainer import Trainer

_MIXED_PRECISION_TOLERANCE = 1e-2
# After how many steps replicas are averaged, if the experiment does not say.
_EVERY = 2
_NOT_AS_DEFINED = (
    "one process that does what the ranks are to do gets something else. Either the model depends "
    "on more than its rows and its random numbers, or this is a mistake of shoal's"
)


def verify_experiment(experiment: Experiment, run: Callable[..., list[Any]]) -> Report:
    """Trains and compares; ``run(fn, ranks, backend, args)`` calls a function on every rank."""
    if experiment.strategy in INDEPENDENT:
        experiment = _as_replay(experiment)
    else:
        for option in ("compression", "gather_compression"):
            if experiment.options.get(option) is not None:
                experiment = _as_compressed_replay(experiment, option)
    train = train_async_on_rank if experiment.strategy == "async" else train_on_rank
    findings: Findings = run(train, experiment.ranks, experiment.backend, (experiment,))[0]
    difference, cause = findings.difference, ""
    if difference is not None and experiment.reference == REPLAY:
        cause = _NOT_AS_DEFINED
    elif difference is not None:  # in a world of one: the model may ask for its rank
        cause = run(likely_cause, 1, "memory", (Replay(experiment, findings, difference),))[0]
    return Report(
        strategy=experiment.strategy,
        ranks=experiment.ranks,
        backend=experiment.backend,
        reference=experiment.reference,
        steps=experiment.steps,
        tolerance=findings.tolerance,
        difference=difference,
        cause=cause,
        largest=findings.largest,
        notes=_notes(findings),
    )


def _as_replay(experiment: Experiment) -> Experiment:
    """Compared with the strategy's own definition, with averages often enough to see some."""
    options = experiment.options
    if options.get("compression") is not None:
        raise ValueError(
            "shoal.verify replays averages as they are, without compression: leave out compression="
        )
    if experiment.strategy == "local":
        options = {"every": _EVERY, **options}
    elif options.get("topology") == "gossip":
        raise ValueError('shoal.verify replays servers: leave out topology="gossip"')
    elif experiment.backend != "memory":
        raise ValueError(
            "shoal.verify replays the order of updates of strategy 'async', which servers share "
            f"over 'memory' only; got {experiment.backend!r}"
        )
    return replace(experiment, reference=REPLAY, options=options)


def _as_compressed_replay(experiment: Experiment, option: str) -> Experiment:
    """Compared with one process that compresses as the ranks do."""
    if experiment.strategy not in DATA_PARALLEL:
        raise ValueError(
            "shoal.verify replays compression under strategies that divide the data alone "
            f"({', '.join(DATA_PARALLEL)}): leave out {option}= with {experiment.strategy!r}"
        )
    return replace(experiment, reference=REPLAY)


def _notes(findings: Findings) -> tuple[str, ...]:
    if findings.first_move >= findings.tolerance:
        return ()
    return (
        f"no parameter moved by more than {findings.first_move:.1e} in the first step, which is "
        "less than the tolerance: the optimizer was hardly tested (raise its learning rate)",
    )


def train_on_rank(experiment: Experiment) -> Findings:
    """Trains until the end or the first difference; rank 0's findings are the ones that count."""
    world = current()
    wrap = partial(experiment.wrap, strategy=experiment.strategy, **experiment.options)
    trainer = DistributedTrainer(experiment.build, experiment.steps, world, wrap, experiment.weight)
    num_shares = trainer.data_group.size
    reference = _reference(experiment, num_shares, trainer) if world.rank == 0 else None
    comparison, first_move, ranks_differ = Comparison(_tolerance(experiment, trainer)), 0.0, ""
    for step in range(experiment.steps):
        before = _copies(reference) if step == 0 else []
        is_same = _observe(step, reference, trainer, comparison)
        if step == 0:
            first_move = _largest_change(before, _copies(reference))
        odd, is_same = _compare_ranks(world, trainer, is_same)
        if odd is not None:
            ranks_differ = f"{_sides(odd[1])} differ in {odd[0]}"
            difference = Difference(step + 1, "ranks", odd[0], *trainer.spread(odd[0]))
            comparison.first = comparison.first or difference
        if odd is not None or not is_same:
            break
    return Findings(
        comparison.tolerance,
        comparison.first,
        comparison.largest,
        ranks_differ,
        first_move,
        num_shares,
        trainer.num_micro_batches,
    )


def _reference(experiment: Experiment, num_shares: int, trainer: DistributedTrainer) -> Trainer:
    build, steps, options = experiment.build, experiment.steps, experiment.options
    if experiment.strategy in INDEPENDENT:
        return LocalReplay(build, steps, num_shares, options)
    compute_dtype = parse_precision(options.get("mixed_precision"))
    if experiment.reference == "batch":
        return WholeBatch(build, steps, compute_dtype=compute_dtype)
    how: dict[str, Any] = {
        "weight": experiment.weight,
        "compute_dtype": compute_dtype,
        "averages_buffers": bool(options.get("average_buffers")),
    }
    model: Any = trainer.setup.model
    if any(group.rounding is not None for group in model.engine.groups):
        how["gather_codec"] = model.engine.settings.gather_codec
    compressed = model.compression_state if experiment.reference == REPLAY else None
    if compressed is None:
        return SplitBatch(build, steps, num_shares, **how)
    warmup = model.engine.settings.compression.warmup_steps
    return CompressedReplay(compressed.exchanges, warmup, build, steps, num_shares, **how)


def _tolerance(experiment: Experiment, trainer: DistributedTrainer) -> float:
    if experiment.tolerance is not None:
        return experiment.tolerance
    usual = default_tolerance(trainer.setup.model)
    is_rounded = experiment.options.get("mixed_precision") and experiment.reference == "batch"
    return max(usual, _MIXED_PRECISION_TOLERANCE) if is_rounded else usual


def _observe(
    step: int, reference: Trainer | None, trainer: DistributedTrainer, comparison: Comparison
) -> bool:
    if reference is not None:
        return comparison.compare(step, reference.observe(step), trainer.observe(step))
    for _ in trainer.observe(step):
        pass
    return True


def _compare_ranks(
    world: World, trainer: DistributedTrainer, is_same: bool
) -> tuple[tuple[str, list[list[int]]] | None, bool]:
    """What the ranks have different bits of, and who has which; and whether all go on."""
    answers = world.all_gather_object((is_same, trainer.fingerprints))
    all_same, by_rank = zip(*answers, strict=True)
    odd = None
    for kind, name in trainer.fingerprints:
        holders: dict[str, list[int]] = {}
        for rank, prints in enumerate(by_rank):
            holders.setdefault(prints.get((kind, name), ""), []).append(rank)
        # Parameters tell most: how far apart they are can be looked up.
        if len(holders) > 1 and (odd is None or kind == "parameter"):
            odd = (name or "the loss", list(holders.values()))
            if kind == "parameter":
                break
    return odd, all(all_same)


def _sides(sides: list[list[int]]) -> str:
    names = [f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" for ranks in sides]
    return " and ".join(names)


def _copies(reference: Trainer | None) -> list[Tensor]:
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
