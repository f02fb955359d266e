"""Compressed gradients are what their definition says, on every rank, and nothing is lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from compression.test_codecs import Plain
from shoal.compression import (
    Choose,
    Codec,
    Identity,
    LowRank,
    Payload,
    Quantize,
    RandomK,
    Sign,
    TopK,
    parse,
)
from shoal.errors import MismatchError
from shoal.optim import DDPOptimizer, GradientCompressionOptimizer, ZeRO3Optimizer
from shoal.sharding.layout import GroupLayout
from shoal.strategies import AsyncModel, DDPModel, LocalModel, ZeRO3Model
from shoal.strategies.gradients.compressed.plan import ExchangePlan
from strategies.gradients.compressed.replay import Replay

SHAPES = (("matrix", (24, 30)), ("bias", (11,)), ("kernel", (8, 5, 3)), ("scalar", ()))
NAMES = ("none", "bf16", "int8", "int4", "sign", "topk:0.1", "randomk:0.2", "powersgd:2")
STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
STEPS = 4


class Wished(nn.Module):
    """A model whose gradients are what a rank wishes for."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES:
            setattr(self, name, nn.Parameter(torch.zeros(shape)))

    def forward(self, wishes: dict[str, Tensor]) -> Tensor:
        return sum((getattr(self, name) * wish).sum() for name, wish in wishes.items())  # type: ignore[return-value]


def wishes(step: int, rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {
        name: torch.randn(shape, generator=generator) * (1 + rank) + 0.5 for name, shape in SHAPES
    }


def nothing() -> dict[str, Tensor]:
    return {name: torch.zeros(shape) for name, shape in SHAPES}


def made(strategy: str, compression: Any, **options: Any) -> tuple[Any, Any]:
    module = Wished()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    return shoal.as_distributed(
        module, optimizer, strategy=strategy, compression=compression, **options
    )


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: gradient.clone() for name, gradient in model.full_gradients()}


def run(fn: Any, *args: Any, ranks: int = 3) -> list[Any]:
    return shoal.run(fn, ranks, "memory", args=args, timeout=40)


# The definition ---------------------------------------------------------------------------


def some_steps(strategy: str, compression: Any, feedback: bool) -> list[dict[str, Tensor]]:
    model, optimizer = made(strategy, compression, error_feedback=feedback)
    rank, found = shoal.world().rank, []
    for step in range(STEPS):
        optimizer.zero_grad()
        model(wishes(step, rank)).backward()
        found.append(gradients(model))
        optimizer.step()
    found.append({name: value.clone() for name, value in model.state_dict().items()})
    return found


@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize("name", [*NAMES, "int8 at random"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_equals_the_definition_replayed_in_one_process(
    strategy: str, name: str, feedback: bool
) -> None:
    codec: Codec = Quantize(8, stochastic=True) if name == "int8 at random" else parse(name)
    ranks = 3
    results = run(some_steps, strategy, codec, feedback, ranks=ranks)
    shapes = [(key, torch.Size(shape)) for key, shape in SHAPES]
    sharded = strategy in ("zero2", "zero3")
    replay = Replay(codec, shapes, ranks, sharded=sharded, feedback=feedback)
    values = torch.zeros(replay.layout.num_elements)
    for step in range(STEPS):
        flat = [replay.flat([*wishes(step, rank).values()]) for rank in range(ranks)]
        average = replay.average(flat)
        values -= average
        for result in results:
            assert torch.equal(replay.flat([*result[step].values()]), average), (step, name)
    for result in results:
        assert torch.equal(replay.flat([*result[-1].values()]), values)


# Nothing is lost and nothing is applied twice (P11) -----------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_p11_one_step_in_closed_form(name: str) -> None:
    """Rank r's gradient is r + 1 everywhere, so the average is 2: all codecs can say that."""

    def step() -> Any:
        model, optimizer = made("ddp", name)
        wish = {key: torch.full(shape, shoal.world().rank + 1.0) for key, shape in SHAPES}
        model(wish).backward()
        optimizer.step()
        return model.state_dict(), [
            held.memory.clone() for held in model.compression_state.held_residual()
        ]

    for rank, (state, residual) in enumerate(run(step)):
        joined = torch.cat([value.view(-1) for value in state.values()])
        left = torch.cat(residual)
        if name.startswith(("topk", "randomk")):
            assert set(joined.tolist()) == {0.0, -2.0}
            assert torch.equal(left != 0, joined == 0)
        else:
            assert torch.allclose(joined, torch.tensor(-2.0), atol=1e-5)
            # A factored gradient is compared with the average, which the ranks' own are around.
            expected = rank - 1.0 if name == "powersgd:2" else 0.0
            assert left[:720].sub(expected).abs().max() < 1e-4


@pytest.mark.parametrize("mode", ["plain", "no_sync", "twice"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_p11_what_is_not_applied_is_in_the_residual(strategy: str, name: str, mode: str) -> None:
    def steps() -> Any:
        model, optimizer = made(strategy, name)
        rank = shoal.world().rank
        for step in range(3):
            optimizer.zero_grad()
            if mode != "plain":
                with model.no_sync() if mode == "no_sync" else torch.enable_grad():
                    model(wishes(50 + step, rank)).backward()
            model(wishes(step, rank)).backward()
            optimizer.step()
        residual = {h.name: h.memory.clone() for h in model.compression_state.held_residual()}
        return model.state_dict(), residual

    results = run(steps)
    for key, _ in SHAPES:
        given = sum(wishes(step, rank)[key] for step in range(3) for rank in range(3)) / 3
        if mode != "plain":
            given = (
                given + sum(wishes(50 + s, rank)[key] for s in range(3) for rank in range(3)) / 3
            )
        left = sum(residual[key] for _, residual in results).view_as(given) / 3
        for state, _ in results:
            assert torch.allclose(left - state[key], given, atol=1e-4), key


@pytest.mark.parametrize("name", ["int8", "sign", "topk:0.25", "powersgd:2"])
def test_what_is_left_out_comes_later(name: str) -> None:
    def steps() -> Any:
        model, optimizer = made("ddp", name)
        for step in range(40):
            optimizer.zero_grad()
            model(nothing() if step else wishes(0, shoal.world().rank)).backward()
            optimizer.step()
        return model.state_dict()["kernel"]

    expected = -sum(wishes(0, rank)["kernel"] for rank in range(3)) / 3
    error = (run(steps)[0] - expected).norm() / expected.norm()
    assert error < (0.3 if name == "sign" else 1e-2)


# Parameters that take part sometimes ---------------------------------------------------------


@pytest.mark.parametrize("name", ["int8", "sign", "topk:0.1", "powersgd:2"])
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_what_nobody_used_keeps_its_residual(strategy: str, name: str) -> None:
    def steps() -> Any:
        model, optimizer = made(strategy, name)
        rank, found = shoal.world().rank, []
        for used in (("matrix", "kernel", "bias"), ("bias", "matrix")):
            optimizer.zero_grad()
            own = {key: wish for key, wish in wishes(1, rank).items() if key in used}
            if rank == 0:
                own.pop("matrix")  # others have a gradient of it
            model(own).backward()
            found.append([key for key, gradient in model.full_gradients() if gradient is not None])
            optimizer.step()
            held = model.compression_state.held_residual()
            found.append({each.name: each.memory.clone() for each in held})
        return found

    for first, before, second, after in run(steps):
        assert sorted(first) == ["bias", "kernel", "matrix"]
        assert sorted(second) == ["bias", "matrix"]
        assert torch.equal(before["kernel"], after["kernel"])
        assert before["kernel"].any() or strategy == "zero3"
        assert not after["scalar"].any()


@pytest.mark.parametrize("name", ["topk:0.01", "randomk:0.01"])
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_sparse_codecs_leave_vectors_as_they_are(strategy: str, name: str) -> None:
    def step(compression: Any) -> Any:
        model, _ = made(strategy, compression)
        model(wishes(0, shoal.world().rank)).backward()
        residual = {held.name: held.memory for held in model.compression_state.held_residual()}
        return gradients(model), residual

    for found, residual in run(step, name):
        for key in ("bias", "scalar"):
            expected = sum(wishes(0, rank)[key] for rank in range(3)) / 3
            assert torch.allclose(found[key], expected)
            assert not residual[key].any()
    asked_for = run(step, Choose(parse(name), below=0, vectors=parse(name)))
    assert any(residual["bias"].any() for _, residual in asked_for)


def test_a_gradient_that_comes_late_counts() -> None:
    """A parameter that is used again by a hook, after its group has been sent."""

    def step() -> Any:
        model, _ = made("ddp", "none", min_group_bytes=0)

        def late(_: Tensor) -> None:
            with torch.enable_grad():
                (model.module.scalar * 2.0).backward()

        model.module.matrix.register_hook(late)
        model(wishes(0, shoal.world().rank)).backward()
        return model.module.scalar.grad.clone()

    expected = sum(wishes(0, rank)["scalar"] for rank in range(3)) / 3 + 2
    for found in run(step):
        assert torch.allclose(found, expected)


# What is not finite ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_nan_is_seen_by_all_and_not_kept(strategy: str, name: str) -> None:
    def steps() -> Any:
        model, optimizer = made(strategy, name)
        rank, seen = shoal.world().rank, []
        for step in range(3):
            optimizer.zero_grad()
            wish = wishes(step, rank)
            if step == 1 and rank == 1:
                wish["matrix"][3, 4] = float("inf")
            model(wish).backward()
            seen.append(all(g.isfinite().all() for g in gradients(model).values()))
        held = model.compression_state.held_residual()
        return seen, all(each.memory.isfinite().all() for each in held)

    for seen, is_clean in run(steps):
        assert seen == [True, False, True]
        assert is_clean


# Options -----------------------------------------------------------------------------------------


def test_warm_up_is_uncompressed() -> None:
    def steps() -> Any:
        model, optimizer = made("ddp", "topk:0.1", compression_warmup=2)
        found = []
        for step in range(4):
            optimizer.zero_grad()
            model(wishes(step, shoal.world().rank)).backward()
            counted = shoal.world().stats().compression
            found.append((gradients(model)["matrix"], counted.raw_bytes, counted.sent_bytes))
            optimizer.step()
        return found

    for found in run(steps):
        for step, (matrix, raw, sent) in enumerate(found):
            expected = sum(wishes(step, rank)["matrix"] for rank in range(3)) / 3
            assert torch.allclose(matrix, expected, atol=1e-5) == (step < 2)
            assert (raw == sent) == (step < 2)


def test_bytes_are_counted() -> None:
    def step(strategy: str, compression: str) -> Any:
        model, _ = made(strategy, compression)
        shoal.world().reset_stats()
        model(wishes(0, shoal.world().rank)).backward()
        stats = shoal.world().stats()
        return stats.compression, stats.memory["residual"].current, stats

    numel = sum(torch.Size(shape).numel() for _, shape in SHAPES)
    for counted, residual, stats in run(step, "ddp", "topk:0.1", ranks=2):
        sparse = sum(
            TopK(0.1).payload_bytes((torch.Size(s).numel(),), torch.float32)
            for _, s in SHAPES
            if len(s) > 1
        )
        vectors = 48 + 8  # go to their owner as they are, and come back as an average
        assert counted.sent_bytes == sparse + vectors
        assert stats["all_to_all"].num_bytes == vectors
        assert stats["all_gather"].num_bytes == 2 * sparse + vectors
        assert "all_reduce" not in stats
        assert numel * 4 <= counted.raw_bytes == residual < numel * 4 + 256
    for counted, _, stats in run(step, "zero3", "int8", ranks=2):
        assert "reduce_scatter" not in stats
        assert stats["all_to_all"].num_bytes in (counted.sent_bytes, 456)
        assert counted.sent_bytes < 0.3 * counted.raw_bytes


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["bf16", "int8", "int4", "sign", "topk:0.01", "powersgd:1"])
def test_no_whole_gradient_travels(strategy: str, name: str) -> None:
    """What moved is what was announced, or not even that: a gather of payloads counts them once."""

    def step() -> Any:
        model, _ = made(strategy, name)
        shoal.world().reset_stats()
        model(wishes(0, shoal.world().rank)).backward()
        stats = shoal.world().stats()
        moved = {kind: counter.num_bytes for kind, counter in stats.items()}
        return moved, stats.compression

    for moved, counted in run(step):
        whole = sum(torch.Size(shape).numel() for _, shape in SHAPES) * 4
        assert moved.get("reduce_scatter", 0) == 0
        assert moved.get("all_reduce", 0) < 0.3 * whole
        assert counted.sent_bytes <= 0.55 * counted.raw_bytes


GPT = [
    *((f"{n}.{name}", shape) for n in range(8) for name, shape in (
        ("norm", (384,)), ("qkv", (1152, 384)), ("qkv_bias", (1152,)), ("out", (384, 384)),
        ("out_bias", (384,)), ("up", (1536, 384)), ("up_bias", (1536,)), ("down", (384, 1536)),
        ("down_bias", (384,)), ("norm2", (384,)),
    )),
    ("tokens", (2048, 384)),
]  # fmt: skip


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("ranks", [2, 4, 8, 64])
def test_shares_of_bytes_on_a_gpt(ranks: int, is_sharded: bool) -> None:
    """As promised for 15 million parameters, by the plans alone."""
    layout = GroupLayout.even([(name, torch.Size(shape)) for name, shape in GPT], ranks, 4)
    assert 14.5e6 < layout.num_elements < 15.5e6
    most = {"int8": 0.27, "int4": 0.15, "sign": 0.05, "powersgd:2": 0.03, "topk:0.01": 0.03}
    for name, bound in most.items():
        if name.startswith("topk") and ranks > 2 and not is_sharded:
            bound = 0.015 * ranks  # payloads go to everybody
        plan = ExchangePlan(layout, parse(name), torch.float32, is_sharded=is_sharded)
        shares = [plan.sent_bytes(rank) / plan.raw_bytes(rank) for rank in range(ranks)]
        assert max(shares) <= bound, name


def test_each_parameter_has_its_codec() -> None:
    codec = Choose(
        Quantize(8), below=20, names={"matrix": LowRank(1), "kernel": TopK(0.05)}, small=Identity()
    )

    def step() -> Any:
        model, _ = made("ddp", codec)
        model(wishes(0, shoal.world().rank)).backward()
        return gradients(model)

    for found in run(step):
        mean = {key: sum(wishes(0, r)[key] for r in range(3)) / 3 for key, _ in SHAPES}
        assert torch.linalg.matrix_rank(found["matrix"]) == 1
        assert (found["kernel"] != 0).sum() <= 18
        assert torch.allclose(found["bias"], mean["bias"])
        assert torch.allclose(found["scalar"], mean["scalar"])


@pytest.mark.parametrize("name", ["int8", "powersgd:2"])
def test_put_in_by_hand(name: str) -> None:
    def step() -> Any:
        model, optimizer = made("ddp", name)
        model.module.bias.grad = torch.full((11,), 1.0 + shoal.world().rank)
        optimizer.step()
        return model.state_dict()["bias"]

    for bias in run(step):
        assert torch.allclose(bias, torch.tensor(-2.0), atol=1e-5)


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_a_codec_of_a_user(strategy: str) -> None:
    """Each rank makes one of its own."""

    def step() -> Any:
        model, _ = made(strategy, Choose(Plain(), below=0, names={"matrix": Plain()}))
        model(wishes(0, shoal.world().rank)).backward()
        return gradients(model)

    for found in run(step):
        for key, _ in SHAPES:
            expected = sum(wishes(0, rank)[key] for rank in range(3)) / 3
            assert torch.allclose(found[key], expected), key


def test_a_codec_that_makes_other_bytes_than_it_announces() -> None:
    class Short(Plain):
        def encode(self, tensor: Tensor, **options: Any) -> Payload:
            whole = super().encode(tensor, **options)
            return Payload(whole.data[:-8], whole.shape, whole.dtype)

    def step() -> None:
        model, _ = made("ddp", Short())
        model(wishes(0, shoal.world().rank)).backward()

    with pytest.raises(ValueError, match=r"payload_bytes\(\) had announced"):
        run(step)


def test_one_rank_has_nothing_to_send() -> None:
    def step() -> Any:
        model, optimizer = made("ddp", "topk:0.1")
        model(wishes(0, 0)).backward()
        optimizer.step()
        assert model.compression_state is None
        assert "one rank sends none" in model.describe()
        return model.state_dict()["matrix"]

    assert torch.equal(run(step, ranks=1)[0], -wishes(0, 0)["matrix"])


def test_describe_says_what_it_takes() -> None:
    def text(**options: Any) -> str:
        return str(made("zero2", "int8", **options)[0].describe())

    assert "compressed to int8; what is left out takes 3,456 bytes on every rank" in run(text)[0]
    without = run(lambda: text(error_feedback=False))[0]
    assert "without error feedback: what is left out is lost" in without
    assert "after 5 steps" in run(lambda: text(compression_warmup=5))[0]


def test_ranks_that_compress_differently_are_told() -> None:
    """Where they wrap, not in their first backward."""

    def by_option() -> None:
        made("ddp", "int8" if shoal.world().rank else "int4")

    def by_class() -> None:
        module = Wished()
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        codec = Quantize(8 if shoal.world().rank else 4)
        GradientCompressionOptimizer(optimizer, DDPModel(module), codec)

    with pytest.raises(MismatchError, match="wrapping with strategy='ddp', compression='int4'"):
        run(by_option)
    with pytest.raises(MismatchError, match=r"GradientCompressionOptimizer.*Quantize\(bits=4"):
        run(by_class)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"compression": "int7"}, ValueError, "must be one of none, fp16"),
        ({"compression": 8}, TypeError, "'compression' must be a string or Codec or None; got 8"),
        ({"compression_warmup": 3}, ValueError, "say compression= too"),
        ({"compression": "int8", "compression_warmup": -1}, ValueError, "must not be negative"),
        ({"compression": RandomK(0.1, unbiased=True)}, ValueError, "or error_feedback=False"),
        (
            {"compression": Choose(Sign(), names={"a": RandomK(0.1, unbiased=True)})},
            ValueError,
            "or error_feedback=False",
        ),
        ({"compression": "int8", "error_feedback": 1}, TypeError, "must be True or False"),
    ],
)
def test_what_makes_no_sense_is_refused(options: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        run(lambda: shoal.as_distributed(Wished(), **options), ranks=1)


def test_wrong_pairs_are_refused() -> None:
    def with_replicas() -> None:
        shoal.as_distributed(Wished(), strategy="fsdp", replica=2, compression="int8")

    with pytest.raises(ValueError, match="does not go with replica="):
        run(with_replicas, ranks=2)

    def complex_numbers() -> None:
        module = nn.ParameterDict({"phase": nn.Parameter(torch.zeros(3, dtype=torch.complex64))})
        shoal.as_distributed(module, compression="int8")

    with pytest.raises(ValueError, match="phase is complex"):
        run(complex_numbers, ranks=1)


# The optimizer by its name ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_class", "partner", "strategy"),
    [(DDPModel, DDPOptimizer, "ddp"), (ZeRO3Model, ZeRO3Optimizer, "zero3")],
)
def test_optimizer_does_what_the_option_does(model_class: Any, partner: Any, strategy: str) -> None:
    def by_hand() -> Any:
        module = Wished()
        model = model_class(module)
        plain = torch.optim.SGD(module.parameters(), lr=1.0)
        optimizer = GradientCompressionOptimizer(plain, model, "topk:0.1")
        assert isinstance(optimizer, GradientCompressionOptimizer)
        assert isinstance(optimizer, partner)
        for step in range(STEPS):
            optimizer.zero_grad()
            model(wishes(step, shoal.world().rank)).backward()
            optimizer.step()
        return model.state_dict()

    expected = run(some_steps, strategy, "topk:0.1", True)
    for found, other in zip(run(by_hand), expected, strict=True):
        for key, value in found.items():
            assert torch.equal(value, other[-1][key])


def test_optimizer_refuses_what_a_strategy_does_not_have() -> None:
    """As `as_distributed` does, in the same words."""

    def wrap(model_class: Any, *args: Any) -> None:
        module = Wished()
        plain = torch.optim.SGD(module.parameters(), lr=1.0)
        GradientCompressionOptimizer(plain, model_class(module), *args)

    for model_class, args, error, words in (
        (AsyncModel, ("int8",), TypeError, "'async' has no option 'compression'"),
        (LocalModel, ("int8", True, 3), TypeError, "'local' has no option 'compression_warmup'"),
        (DDPModel, ("int8", True, -1), ValueError, "must not be negative"),
        (DDPModel, ("int8", 1), TypeError, "must be True or False"),
        (DDPModel, (None,), TypeError, "compression must be a name"),
    ):
        with pytest.raises(error, match=words):
            run(wrap, model_class, *args, ranks=2)


def test_optimizer_refuses_what_does_not_fit() -> None:
    def plain() -> None:
        module = Wished()
        GradientCompressionOptimizer(torch.optim.SGD(module.parameters(), lr=1.0), module)  # type: ignore[arg-type]

    with pytest.raises(TypeError, match="goes with a wrapped model"):
        run(plain, ranks=1)

    def twice() -> None:
        module = Wished()
        model = DDPModel(module, compression="int8")
        GradientCompressionOptimizer(torch.optim.SGD(module.parameters(), lr=1.0), model)

    with pytest.raises(shoal.errors.ShoalError, match="compressed already"):
        run(twice, ranks=2)
