"""`shoal.verify`: says equal where it is, and finds what is wrong where it is not."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import leaks
import shoal
from shoal.api import as_distributed, run
from shoal.errors import ShoalError
from shoal.launch.function.forkserver.forkserver import fork_server
from shoal.optim import DATA_PARALLEL
from shoal.strategies.gradients.compressed.residual import Residual
from shoal.strategies.independent.shard import unpack
from shoal.verification import Experiment, verify_experiment

STRATEGIES = DATA_PARALLEL


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def builder(*middle, optimizer=sgd, rows=10, dtype=torch.float32, loss_fn=F.mse_loss, wrap=None):
    """A build function for a small network with something special in its middle."""

    def build():
        layers = [make() for make in middle]
        model = nn.Sequential(nn.Linear(6, 17), *layers, nn.Tanh(), nn.Linear(17, 3)).to(dtype)
        batches = [
            (torch.randn(rows, 6, dtype=dtype), torch.randn(rows, 3, dtype=dtype)) for _ in range(3)
        ]
        made = optimizer(list(model.parameters()))
        return (wrap(model) if wrap else model), made, batches, loss_fn

    return build


# What is equal --------------------------------------------------------------------------


@pytest.mark.parametrize("reference", ["batch", "split"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_equal(strategy, ranks, reference) -> None:
    report = shoal.verify(builder(), strategy, ranks, reference=reference)
    assert report.equal, report
    assert report.difference is None
    assert report.cause == ""
    assert "equals one process" in str(report)
    report.raise_if_different()
    if reference == "split":
        assert set(report.largest.values()) == {0.0}  # not a bit


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("middle", [lambda: nn.BatchNorm1d(17), lambda: nn.Dropout(0.3)])
def test_the_split_reference_replays_what_ranks_do(strategy, middle) -> None:
    """Their statistics and their random numbers."""
    report = shoal.verify(builder(middle), strategy, 3, reference="split", tolerance=0)
    assert report.equal, report


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_processes(strategy) -> None:
    fork_server()
    leaks.baseline()
    report = shoal.verify(builder(optimizer=torch.optim.AdamW), strategy, 2, backend="shm")
    assert report.equal, report


def test_double_precision() -> None:
    report = shoal.verify(builder(dtype=torch.float64), "zero2", 3)
    assert report.equal, report
    assert report.tolerance == 1e-10


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@pytest.mark.filterwarnings("ignore:LBFGS may couple")
def test_an_optimizer_with_a_closure(strategy) -> None:
    def lbfgs(parameters):
        return torch.optim.LBFGS(parameters, lr=0.5, max_iter=4)

    report = shoal.verify(builder(optimizer=lbfgs, dtype=torch.float64), strategy, steps=3)
    assert report.equal, report


def test_a_list_of_optimizers() -> None:
    def both(parameters):
        matrices = [p for p in parameters if p.dim() == 2]
        others = [p for p in parameters if p.dim() < 2]
        return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others)]

    report = shoal.verify(builder(optimizer=both), "zero1", 2, reference="split")
    assert report.equal, report


def test_structured_batches() -> None:
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x, scale=None):
            return self.layer(x) * scale

    def build():
        model = Pair()
        inputs = {"x": torch.randn(7, 4), "scale": torch.tensor(2.0)}
        batches = [(inputs, (torch.randn(7, 2), "a name"))]
        return model, sgd(model.parameters()), iter(batches), lambda y, t: F.mse_loss(y, t[0])

    report = shoal.verify(build, "zero3", 3)
    assert report.equal, report


def test_nothing_outside_is_changed() -> None:
    """Neither the caller's random numbers nor its world."""
    torch.manual_seed(7)
    expected = torch.rand(2)
    torch.manual_seed(7)
    shoal.verify(builder(lambda: nn.Dropout(0.3)), steps=1)  # differs, so it is looked into
    assert torch.equal(torch.rand(2), expected)


# What is not ----------------------------------------------------------------------------


class UrandomNoise(nn.Module):
    def forward(self, x):
        # Eight bytes: one alone comes twice in a row in one of 256 runs, and hides the noise.
        return x + int.from_bytes(os.urandom(8)) / 2**64


class RankDependent(nn.Module):
    def forward(self, x):
        return x * (1 + 0.1 * shoal.world().rank)


class BatchMean(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


@pytest.mark.parametrize(
    ("build", "kind", "words"),
    [
        (builder(lambda: nn.BatchNorm1d(17)), "loss", "sync_batchnorm=True"),
        (builder(lambda: nn.Dropout(0.3)), "loss", "dropout"),
        (builder(UrandomNoise), "loss", "not deterministic"),
        (builder(RankDependent), "loss", "depend on the rank"),
        (builder(BatchMean), "loss", "must not depend on other rows"),
        (builder(loss_fn=lambda y, t: (y - t).square().sum()), "loss", "2 times too small"),
        (builder(optimizer=lambda p: torch.optim.SGD(p, lr=1e25)), "loss", "not finite"),
    ],
    ids=["batchnorm", "dropout", "noise", "rank", "batch mean", "sum", "diverges"],
)
def test_the_likely_cause(build, kind, words) -> None:
    report = shoal.verify(build, "ddp", 2)
    assert not report.equal
    assert report.difference.kind == kind
    assert words in report.cause
    assert "DIFFERS" in str(report)
    assert words in str(report)
    with pytest.raises(ShoalError, match="DIFFERS"):
        report.raise_if_different()


def language(rows=6, *, mark=-100, shifted=False, masked=False):
    """A build function for a loss over tokens, of which rows have different numbers."""

    def build():
        model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 11))
        batches = []
        for _ in range(3):
            tokens = torch.randint(2, 11, (rows, 7))
            is_padding = torch.arange(7) > torch.arange(rows)[:, None]
            targets = tokens.masked_fill(is_padding, mark)
            batches.append((tokens, (targets, (~is_padding).float()) if masked else targets))
        return model, sgd(model.parameters()), batches, loss_fn

    def loss_fn(logits, targets):
        if masked:
            targets, mask = targets
            losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
            return (losses * mask.flatten()).sum() / mask.sum()
        if shifted:
            logits, targets = logits[:, :-1], targets[:, 1:]
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=mark)

    return build


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (language(), "targets that are not -100"),
        (language(7), "differs between ranks: 10, 18"),
        (language(mark=1), "targets that are not 1"),
        (language(shifted=True), "differs between ranks: 3, 12"),
        (language(mark=0, masked=True), "targets[0] that are not 0"),
    ],
)
def test_a_mean_over_tokens(build, words) -> None:
    """Its number differs between ranks; with the right weight it is equal."""
    report = shoal.verify(build, "ddp", 2)
    assert not report.equal
    assert words in report.cause
    assert "weight=" in report.cause

    def num_tokens(inputs, targets):
        tokens = targets[0] if isinstance(targets, tuple) else targets
        first = 1 if "3, 12" in words else 0
        mark = {"-100": -100, " not 1": 1, " not 0": 0}
        marks = [value for name, value in mark.items() if name in words] or [-100]
        return (tokens[:, first:] != marks[0]).sum()

    for strategy in ("ddp", "zero3"):
        for reference in ("batch", "split"):
            report = shoal.verify(build, strategy, 3, reference=reference, weight=num_tokens)
            assert report.equal, report


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_sum(ranks) -> None:
    build = builder(loss_fn=lambda y, t: F.mse_loss(y, t, reduction="sum"), rows=7)
    report = shoal.verify(build, "zero2", ranks)
    assert f"its {ranks} parts (ranks)" in report.cause
    assert f"they are {ranks} times too small" in report.cause
    assert shoal.verify(build, "zero2", ranks, reference="split").equal


@pytest.mark.parametrize(("strategy", "options"), [("pipeline", {}), ("hybrid", {"pipeline": 2})])
def test_causes_in_a_pipeline(strategy, options) -> None:
    """Micro-batches are parts too, and it is not the ranks that are to blame."""
    normal = builder(lambda: nn.BatchNorm1d(17), rows=16)
    for reference in ("batch", "split"):
        report = shoal.verify(normal, strategy, 2, reference=reference, **options)
        assert "BatchNorm takes the statistics of each micro-batch" in report.cause
        assert "into 8" in report.cause
    report = shoal.verify(normal, strategy, 2, micro_batches=1, **options)
    assert report.equal, report
    total = builder(loss_fn=lambda y, t: F.mse_loss(y, t, reduction="sum"), rows=8)
    report = shoal.verify(total, strategy, 2, micro_batches=4, **options)
    assert "4 parts (micro-batches of all ranks)" in report.cause
    report = shoal.verify(language(8), strategy, 2, micro_batches=2, **options)
    assert "micro_batches=1" in report.cause
    assert "not -100" in report.cause


def test_uneven_parts_are_named() -> None:
    report = shoal.verify(builder(BatchMean, rows=7), "ddp", 2)
    assert "(the parts have 4, 3 rows)" in report.cause


def test_rounding_that_an_optimizer_amplifies() -> None:
    """A bias before a softmax's common shift has no gradient, but noise; Adam makes steps of it."""

    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(1))

        def forward(self, x):
            return torch.softmax(x * 3 + self.shift, -1)

    def adam(parameters):
        return torch.optim.Adam(parameters, lr=0.01, eps=1e-20)

    report = shoal.verify(builder(Shifted, optimizer=adam), "ddp", 2)
    assert not report.equal
    assert (report.difference.kind, report.difference.name) == ("parameter", "1.shift")
    assert "rounding, amplified" in report.cause
    assert "Adam" in report.cause
    better = builder(Shifted, optimizer=lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-3))
    assert shoal.verify(better, "ddp", 2).equal


def sabotage(change):
    """A way to make things distributed that does something wrong to each model and optimizer."""

    def wrap(model, optimizers, **options):
        model, optimizers = as_distributed(model, optimizers, **options)
        change(model, optimizers)
        return model, optimizers

    return wrap


def forget_a_gradient(model, optimizers):
    inner = model.train_step

    def train_step(*args):
        loss = inner(*args)
        model.engine.gradients.buffers()[0][:2] = 0
        return loss

    model.train_step = train_step


def step_twice(model, optimizers):
    """P11: two steps instead of one."""
    inner = optimizers[0].step
    optimizers[0].step = lambda *args: (inner(*args), inner(*args))


def keep_to_oneself(model, optimizers):
    """Each rank goes its own way: gradients that look synchronized and are not."""
    model.engine.passes.auto_sync = False
    for gradients in model.engine.gradients:
        gradients.check_averaged = lambda places: None


def drift(model, optimizers):
    """One rank ends up a tiny bit elsewhere, far below any tolerance."""
    inner = optimizers[0].step

    def step(*args):
        inner(*args)
        if shoal.world().rank == 1:
            with torch.no_grad():
                model.module[2].weight[0, 0] += 1e-7

    optimizers[0].step = step


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_a_forgotten_gradient_is_found(strategy) -> None:
    report = verify_experiment(Experiment(builder(), sabotage(forget_a_gradient), strategy), run)
    assert report.difference.kind == "gradient"
    assert report.difference.step == 1
    assert report.difference.absolute > 1e-3
    assert "comes from the ranks" in report.cause


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_a_step_too_many_is_found(strategy) -> None:
    report = verify_experiment(Experiment(builder(), sabotage(step_twice), strategy), run)
    assert report.difference.kind == "parameter"
    assert report.difference.name == "0.weight"
    assert report.difference.num_others == 3
    assert "3 more like it" in str(report)


def test_gradients_that_were_not_averaged_are_found() -> None:
    report = verify_experiment(Experiment(builder(), sabotage(keep_to_oneself)), run)
    assert not report.equal
    assert report.difference.step == 1


def test_ranks_that_differ_by_a_bit_are_found() -> None:
    report = verify_experiment(Experiment(builder(), sabotage(drift)), run)
    assert (report.difference.kind, report.difference.name) == ("ranks", "2.weight")
    assert report.difference.absolute == pytest.approx(1e-7, rel=0.5)
    assert "rank 0 and rank 1 differ in 2.weight" in report.cause


def test_a_step_too_small_to_test_anything() -> None:
    report = shoal.verify(builder(optimizer=lambda p: torch.optim.SGD(p, lr=1e-9)))
    assert report.equal
    assert "hardly tested" in str(report)


# What cannot be tried -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "options", "error", "words"),
    [
        (lambda: 1, {}, TypeError, "must return"),
        (lambda: (1, 2, [3], 4), {}, TypeError, "plain module"),
        (lambda: (nn.Linear(1, 1), None, [], None), {}, ValueError, "at least one batch"),
        (lambda: (nn.Linear(1, 1), None, [1], None), {}, TypeError, "pair"),
        (builder(), {"reference": "whole"}, ValueError, "'batch' or 'split'"),
        (builder(), {"steps": 0}, ValueError, "at least one step"),
        (builder(), {"strategy": "zero7"}, ValueError, "zero7"),
    ],
)
def test_what_cannot_be_tried(build, options, error, words) -> None:
    with pytest.raises(error, match=words):
        shoal.verify(build, **options)


# Strategies that are not to equal one process ---------------------------------------------


def outer_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("options", [{}, {"every": 3, "outer": outer_sgd}])
def test_local_equals_its_definition(ranks, options) -> None:
    build = builder(lambda: nn.BatchNorm1d(17), lambda: nn.Dropout(0.3))
    report = shoal.verify(build, "local", ranks, **options)
    assert report.equal, report
    assert report.reference == "replay"
    assert "equals its definition in one process" in str(report)
    assert "equal to the bit" not in str(report)
    assert set(report.largest.values()) == {0.0}


def test_local_that_is_not_its_definition_is_found() -> None:
    def wrap(model, optimizers, *, every, **how):
        return as_distributed(model, optimizers, every=every + 1, **how)

    report = verify_experiment(Experiment(builder(), wrap, "local"), run)
    assert not report.equal
    assert report.difference.step == 2
    assert "does what the ranks are to do" in report.cause


@pytest.mark.parametrize("when_stale", ["drop", "damp", "wait"])
def test_async_equals_its_definition(when_stale) -> None:
    build = builder(lambda: nn.BatchNorm1d(17), lambda: nn.Dropout(0.3))
    report = shoal.verify(build, "async", 3, max_staleness=1, when_stale=when_stale)
    assert report.equal, report
    assert "async on 3 ranks over memory equals its definition in one process" in str(report)
    assert set(report.largest.values()) == {0.0}


def test_async_that_is_not_its_definition_is_found(monkeypatch) -> None:
    monkeypatch.setattr(
        "shoal.strategies.independent.shard.unpack",
        lambda data, like: [2 * each for each in unpack(data, like)],
    )
    report = shoal.verify(builder(), "async", 2)
    assert not report.equal
    assert report.difference.kind == "loss"


def test_async_is_verified_over_memory_only() -> None:
    with pytest.raises(ValueError, match="over 'memory' only"):
        shoal.verify(builder(), "async", backend="shm")


def test_compressed_averages_are_not_replayed() -> None:
    with pytest.raises(ValueError, match="leave out compression="):
        shoal.verify(builder(), "local", compression="int8")


@pytest.mark.parametrize("codec", ["bf16", "int8", "sign", "topk:0.2", "powersgd:2"])
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("ddp", {"min_group_bytes": 100}),
        ("zero1", {"error_feedback": False}),
        ("zero3", {"compression_warmup": 2}),
    ],
)
def test_compressed_gradients_equal_their_definition(strategy, options, codec) -> None:
    build = builder(lambda: nn.BatchNorm1d(17), lambda: nn.Dropout(0.3))
    report = shoal.verify(build, strategy, 3, compression=codec, **options)
    assert report.equal, report
    assert "equals its definition in one process" in str(report)
    assert set(report.largest.values()) == {0.0}


def test_compressed_gradients_over_processes() -> None:
    report = shoal.verify(builder(), "zero2", 2, backend="shm", compression="int4")
    assert report.equal, report


@pytest.mark.parametrize("codec", ["int4", "topk:0.2", "powersgd:1"])
def test_a_residual_that_is_lost_is_found(monkeypatch, codec) -> None:
    monkeypatch.setattr(Residual, "keep", lambda self, elements, error: None)
    report = shoal.verify(builder(), "ddp", 2, compression=codec)
    assert not report.equal
    assert (report.difference.kind, report.difference.step) == ("gradient", 2)
    assert "does what the ranks are to do" in report.cause


@pytest.mark.parametrize(
    ("strategy", "options", "words"),
    [
        ("tensor", {"compression": "int8"}, "leave out compression= with 'tensor'"),
        ("ddp", {"compression": "randomk:0.5", "min_group_bytes": 0}, "travel in one group"),
    ],
)
def test_compression_that_is_not_replayed(strategy, options, words) -> None:
    with pytest.raises(ValueError, match=words):
        shoal.verify(builder(), strategy, 2, **options)
