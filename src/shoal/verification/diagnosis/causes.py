"""Why training might differ: possible causes are tested in one process, one after the other.

One process on the whole batch and one that replays the ranks' local batches need no
communication. Where already these two differ, the ranks are not to blame.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from shoal.comm.operation.partition import split_sizes
from shoal.strategies.training import count_items
from shoal.verification.diagnosis.replay import Replay


def likely_cause(replay: Replay) -> str:
    """What the first test that finds something says."""
    answers = (_tested(cause, replay) for cause in _CAUSES)
    return next((answer for answer in answers if answer), _the_ranks(replay))


def _tested(cause: Callable[[Replay], str], replay: Replay) -> str:
    """A guess that cannot be made must not hide what is known for sure."""
    try:
        return cause(replay)
    except Exception:
        return ""


def _repetition(replay: Replay) -> str:
    if replay.compare(replay.whole(), replay.whole()) is None:
        return ""
    return (
        "training is not deterministic: two runs in one process differ already. Look for random "
        "numbers from generators of your own, the time, or the order of a set in build(), the "
        "model or the loss; everything drawn from torch, numpy and random is seeded alike"
    )


def _divergence(replay: Replay) -> str:
    whole = replay.whole()
    losses = [
        float(seen.value)
        for step in range(replay.num_steps)
        for seen in whole.observe(step)
        if seen.kind == "loss" and seen.value is not None
    ]
    if all(map(math.isfinite, losses)):
        return ""
    return (
        "the loss is not finite in one process either, and what is not a number cannot be "
        "compared: lower the learning rate, or the number of steps"
    )


def _random_numbers(replay: Replay) -> str:
    if replay.experiment.reference == "split":
        return ""
    if replay.compare(replay.whole(), replay.whole(variation=1)) is None:
        return ""
    return (
        "the model draws random numbers while it trains (dropout?), and ranks draw others for "
        'their rows than one process does for the whole batch: compare with reference="split", '
        "which draws as the ranks do, or switch the dropout off"
    )


def _batch_statistics(replay: Replay) -> str:
    is_synchronized = bool(replay.experiment.options.get("sync_batchnorm"))
    if not replay.has_batch_statistics:
        return ""
    if replay.has_micro_batches:
        return (
            "BatchNorm takes the statistics of each micro-batch, and running ones from one after "
            f"the other, where one process takes those of the whole batch; a pipeline cuts it into "
            f"{replay.findings.num_micro_batches}. Train with micro_batches=1 (and with "
            "sync_batchnorm=True beside other pipelines), or with layers that look at single rows "
            "(GroupNorm, LayerNorm)"
        )
    if replay.experiment.reference == "split" and is_synchronized:
        return (
            "with sync_batchnorm=True the ranks train as one process on the whole batch: compare "
            'with reference="batch"'
        )
    if replay.experiment.reference == "split" or is_synchronized or replay.division is None:
        return ""
    return (
        "BatchNorm takes the statistics of a rank's own rows where one process takes those of the "
        'whole batch: train with sync_batchnorm=True, or compare with reference="split"'
    )


def _rounding(replay: Replay) -> str:
    if replay.is_replayed or replay.division is None:
        return ""
    # Where the gradients agree and what the same optimizer makes of them does not, it is its doing.
    if replay.division.kind != "parameter" and not _is_same_in_double(replay):
        return ""
    names = ", ".join(type(one).__name__ for one in replay.whole().setup.optimizers)
    return (
        "rounding, amplified: one process on the parts of a batch and one on the whole also "
        f"differ, but only in what {names} makes of equal gradients, or not in float64. Adam "
        "with a small eps, for example, makes full steps of a gradient that is zero but for "
        'rounding: compare in float64, with a larger eps, or with reference="split"'
    )


def _is_same_in_double(replay: Replay) -> bool:
    whole, split = replay.whole(), replay.split()
    whole.to_double()
    split.to_double()
    return replay.compare(whole, split) is None


def _sum(replay: Replay) -> str:
    if replay.is_replayed or replay.losses.is_mean_over_rows or not replay.losses.is_sum:
        return ""
    number, parts = replay.num_parts, _name_of_parts(replay)
    return (
        "the loss is a sum, not a mean: that of the whole batch is the sum of those of its "
        f"{number} parts ({parts}), and gradients are averaged over these, so they are {number} "
        'times too small. Take the mean over the rows (reduction="mean"), or multiply the loss by '
        f"the number of {parts}"
    )


def _tokens(replay: Replay) -> str:
    """A mean over something of which parts have different numbers."""
    if (
        replay.is_replayed
        or replay.experiment.weight is not None
        or replay.losses.is_mean_over_rows
    ):
        return ""
    tokens = replay.losses.find_tokens()
    if tokens is None:
        return ""
    counts = ", ".join(map(str, tokens.counts))
    found = (
        f"the loss is a mean over the elements of {tokens.name} that are not {tokens.mark} (tokens "
        f"that are not padded, masked or ignored?), and their number differs between "
        f"{_name_of_parts(replay)}: {counts}. "
    )
    if replay.has_micro_batches:
        return found + (
            "Micro-batches count by their rows: train with micro_batches=1 and train_step(weight="
            "number of tokens), or with a loss that is a mean over rows"
        )
    return found + (
        "Ranks count by their rows: call model.train_step(inputs, targets, loss_fn, weight=number "
        "of tokens), and verify it with shoal.verify(..., weight=lambda inputs, targets: number of "
        "tokens). In a plain loop multiply the loss by that number and by the number of ranks, and "
        "divide it by the sum of that number over the ranks"
    )


def _name_of_parts(replay: Replay) -> str:
    return "micro-batches of all ranks" if replay.has_micro_batches else "ranks"


def _rows(replay: Replay) -> str:
    is_synchronized = bool(replay.experiment.options.get("sync_batchnorm"))
    if replay.is_replayed or replay.division is None or is_synchronized:
        return ""
    return (
        "one process gives different results for the whole batch and for its parts, so the ranks "
        "are not to blame: the loss must be the mean over the rows of a batch (not a sum, not a "
        "mean over tokens whose number varies), and a row's output must not depend on other rows"
        f'{_uneven(replay)}. reference="split" compares with one process on the parts'
    )


def _uneven(replay: Replay) -> str:
    rows = count_items(replay.setup.batches[replay.num_steps - 1][0])
    if rows % replay.num_parts == 0:
        return ""
    sizes = split_sizes(rows, replay.num_parts)
    return f" (the parts have {', '.join(map(str, sizes))} rows)"


def _own_ways(replay: Replay) -> str:
    if not replay.findings.ranks_differ:
        return ""
    return (
        f"{replay.findings.ranks_differ}: they did not make the same step. Something outside of "
        "the averaged gradients changes the parameters on single ranks (code that asks for the "
        "rank, state of the optimizer from elsewhere), or gradients were not averaged"
    )


def _narrow_miss(replay: Replay) -> str:
    is_late = replay.difference.step > 1  # rounding needs time
    if not (is_late and replay.difference.absolute <= 10 * replay.findings.tolerance):
        return ""
    return (
        f"perhaps only rounding that adds up: the difference is less than ten times the tolerance "
        f"of {replay.findings.tolerance:g}. Try float64, or a larger tolerance"
    )


def _the_ranks(replay: Replay) -> str:
    return (
        "one process that replays the ranks' parts gives the right result, so the difference comes "
        "from the ranks: does the model, the loss or build() depend on the rank, on the number of "
        "ranks, or on how often it was called? If not, this is a bug in shoal"
    )


_CAUSES: tuple[Callable[[Replay], str], ...] = (
    _divergence,  # before all that compares: what is not a number equals nothing
    _repetition,
    _random_numbers,
    _batch_statistics,
    _rounding,
    _sum,
    _tokens,
    _rows,
    _own_ways,
    _narrow_miss,
)
