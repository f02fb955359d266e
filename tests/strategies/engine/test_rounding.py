"""Parameters that are gathered in 8 bits: what is computed with, what is stepped, what travels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import leaks
import pools
import shoal
from shoal.compression import Quantize
from shoal.errors import MismatchError, ShoalError
from shoal.launch.function.forkserver.forkserver import fork_server
from shoal.strategies import ZeRO3Model
from shoal.strategies.engine.gather_buffers import FILL_VARIABLE
from strategies.models import random_numbers

STRATEGIES = ("zero1", "zero2", "zero3", "fsdp")
each = pytest.mark.parametrize("strategy", STRATEGIES)
distinct = pytest.mark.parametrize("strategy", STRATEGIES[:3])
RATE = 2.0**-7

State = dict[str, Tensor]


def run(fn: Any, *args: Any, ranks: int = 2, backend: str = "memory") -> list[Any]:
    return shoal.run(fn, ranks, backend, args=args, timeout=40)


def rounded(value: Tensor, codec: Quantize | None = None) -> Tensor:
    """The definition: a matrix is what its payload stands for, a vector is what it is."""
    codec = codec or Quantize(8)
    return codec.decode(codec.encode(value)) if value.dim() > 1 else value.clone()


class Wished(nn.Module):
    """Gradients are what a rank wishes for; remembers what it computed with."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        for name, shape in (("wide", (20, 30)), ("bias", (11,)), ("kernel", (8, 5, 3))):
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=generator)))
        self.seen: list[State] = []

    def forward(self, wish: float) -> Tensor:
        self.seen.append({name: p.detach().clone() for name, p in self.named_parameters()})
        return sum((p * wish).sum() for p in self.parameters())  # type: ignore[return-value]


def made(strategy: str, module: nn.Module | None = None, **options: Any) -> tuple[Any, Any]:
    module = module or Wished()
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    options = {"gather_compression": "int8", **options}
    return shoal.as_distributed(module, optimizer, strategy=strategy, **options)


def whole_state(model: Any) -> State:
    return {name: value.clone() for name, value in model.state_dict().items()}


# The definition ---------------------------------------------------------------------------


def some_steps(strategy: str, options: dict[str, Any]) -> tuple[list[State], list[State]]:
    model, optimizer = made(strategy, **options)
    masters = [whole_state(model)]
    for step in range(3):
        model(2.0 * step + shoal.world().rank).backward()
        optimizer.step()
        optimizer.zero_grad()
        masters.append(whole_state(model))
    return masters, model.module.seen


def check_some_steps(results: list[Any], codec: Quantize | None = None) -> None:
    """Every number on the way is exact: steps are far smaller than what a block is rounded to."""
    ranks = len(results)
    expected = dict(Wished().named_parameters())
    for masters, seen in results:
        values = {name: p.detach().clone() for name, p in expected.items()}
        for step in range(4):
            for name, value in values.items():
                assert torch.equal(masters[step][name], value), (step, name)
                if step < 3:
                    assert torch.equal(seen[step][name], rounded(value, codec)), (step, name)
                    value -= RATE * (2.0 * step + (ranks - 1) / 2)


@pytest.mark.parametrize("options", [{}, {"min_group_bytes": 0}, {"prefetch_bytes": 0}])
@pytest.mark.parametrize("ranks", [2, 3])
@each
def test_all_compute_with_the_rounded_and_masters_are_stepped(
    strategy: str, ranks: int, options: dict[str, Any]
) -> None:
    check_some_steps(run(some_steps, strategy, options, ranks=ranks))


@pytest.mark.parametrize(("backend", "ranks"), [("shm", 2), ("gloo", 3)])
@distinct
def test_processes_do_the_same(backend: str, ranks: int, strategy: str) -> None:
    check_some_steps(pools.Team(backend, ranks).run(some_steps, strategy, {}))


@distinct
def test_a_codec_with_blocks_of_its_own(strategy: str) -> None:
    codec = Quantize(8, block=100)
    check_some_steps(run(some_steps, strategy, {"gather_compression": codec}), codec)


def test_shards_that_exist_several_times() -> None:
    check_some_steps(run(some_steps, "fsdp", {"replica": 2}, ranks=4))


@distinct
def test_small_parameters_that_stay_whole_are_rounded_too(strategy: str) -> None:
    check_some_steps(run(some_steps, strategy, {"resident_below": 200}))


def test_one_rank_gathers_nothing() -> None:
    def train() -> Any:
        model, _ = made("zero3")
        model(1.0)
        return model.module.seen[0], model.describe(), shoal.world().stats().compression.raw_bytes

    ((seen, words, raw_bytes),) = run(train, ranks=1)
    assert torch.equal(seen["wide"], Wished().wide)
    assert "parameters are not gathered as int8: one rank gathers none" in words
    assert raw_bytes == 0


# Training, replayed in one process ----------------------------------------------------------


class Tied(nn.Module):
    """A tied weight, norms, a frozen layer, one that nobody uses, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(40, 21)
        self.batch_norm = nn.BatchNorm1d(21)
        self.norm = nn.LayerNorm(21)
        self.frozen = nn.Linear(21, 21).requires_grad_(False)
        self.unused = nn.Linear(2, 2)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(21, 33), nn.Tanh(), nn.Linear(33, 21)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.frozen(self.batch_norm(F.gelu(self.first(x)))))
        for block in self.blocks:
            hidden = F.dropout(hidden + block(hidden), 0.1)
        return F.linear(hidden, self.first.weight.T)


class Builder:
    """For `shoal.verify`, also in other processes."""

    def __init__(self, kind: str = "AdamW") -> None:
        self.kind = kind

    def __call__(self) -> Any:
        torch.manual_seed(0)
        model = Tied()
        make: Any = getattr(torch.optim, self.kind)
        how = {"AdamW": {"eps": 1e-3}, "SGD": {"momentum": 0.9}}.get(self.kind, {})
        numbers = [random_numbers(step, 12, 80).float() for step in range(4)]
        batches = [(rows[:, :40], rows[:, 40:]) for rows in numbers]
        return model, make(model.parameters(), lr=0.01, **how), batches, F.mse_loss


@pytest.mark.parametrize(
    "options",
    [
        {"min_group_bytes": 100},
        {"mixed_precision": "bf16"},
        {"compression": "int8", "min_group_bytes": 1000},
        {"compression": "powersgd:2", "compression_warmup": 1},
        {"activations": "full"},
    ],
    ids=lambda options: "-".join(map(str, options)),
)
@pytest.mark.parametrize("ranks", [2, 3])
@distinct
def test_every_bit_is_that_of_one_process(
    strategy: str, ranks: int, options: dict[str, Any]
) -> None:
    report = shoal.verify(
        Builder(), strategy, ranks, steps=4, tolerance=0.0, gather_compression="int8", **options
    )
    assert report.equal, str(report)
    assert "equals its definition in one process" in str(report)


@pytest.mark.parametrize(("kind", "num_bytes"), [("SGD", 0), ("Adafactor", 0), ("Adafactor", None)])
@distinct
def test_with_other_optimizers(strategy: str, kind: str, num_bytes: int | None) -> None:
    """One of them must see whole parameters, so that slices are of other sizes, or empty."""
    options = {"gather_compression": "int8", "min_group_bytes": num_bytes}
    report = shoal.verify(Builder(kind), strategy, 3, steps=4, tolerance=0.0, **options)
    assert report.equal, str(report)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@distinct
def test_over_processes_too(strategy: str, backend: str) -> None:
    fork_server()
    leaks.baseline()
    report = shoal.verify(
        Builder(), strategy, 2, backend, steps=4, tolerance=0.0, gather_compression="int8"
    )
    assert report.equal, str(report)


def test_a_rank_that_computes_with_its_masters_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = "shoal.strategies.engine.rounding.Rounding.rounded"
    monkeypatch.setattr(plain, lambda self, part: part.clone())
    report = shoal.verify(Builder(), "zero2", 2, gather_compression="int8")
    assert not report.equal


def evaluate(strategy: str) -> Any:
    """Between steps, in each way to switch gradients off; also while groups are on their way."""
    model, optimizer = made(strategy, min_group_bytes=0, prefetch_bytes=1 << 20)
    for off in (torch.no_grad, torch.inference_mode, model.predicting):
        with off():
            model.eval()(1.0)
            model(1.0)
        model.train()(1.0).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.module.seen


@distinct
def test_evaluation_sees_the_same(strategy: str) -> None:
    for seen in run(evaluate, strategy, ranks=3):
        value = Wished().wide.detach().clone()
        for index in range(9):
            assert torch.equal(seen[index]["wide"], rounded(value)), index
            value -= RATE if index % 3 == 2 else 0


def accumulate_and_clip(strategy: str) -> Any:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 40), nn.Tanh(), nn.Linear(40, 4))
    model, optimizer = made(strategy, module, min_group_bytes=100)
    rank, norms = shoal.world().rank, []
    for step in range(3):
        for part in range(2):
            x = random_numbers(10 * step + 2 * part + rank, 4, 20).float()
            model.auto_sync = part == 1
            if part:
                F.mse_loss(model(x[:, :16]), x[:, 16:]).backward()
            else:
                with model.no_sync():
                    F.mse_loss(model(x[:, :16]), x[:, 16:]).backward()
        torchs = torch.nn.utils.clip_grad_norm_
        norm = model.clip_grad_norm_(0.1) if step else torchs(model.parameters(), 0.1)
        norms.append(float(norm))
        optimizer.step()
        optimizer.zero_grad()
    with model.predicting():
        predicted = model(torch.ones(2, 16))
    return norms, whole_state(model), predicted


@distinct
def test_accumulated_and_clipped(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FILL_VARIABLE, "1")  # what lies between parameters counts nowhere
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 40), nn.Tanh(), nn.Linear(40, 4))
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)

    def call(x: Tensor) -> Any:
        shown = {
            name: p + (rounded(p.detach()) - p.detach()) for name, p in module.named_parameters()
        }
        return torch.func.functional_call(module, shown, (x,))

    norms = []
    for step in range(3):
        for seed in range(10 * step, 10 * step + 4):
            x = random_numbers(seed, 4, 20).float()
            (F.mse_loss(call(x[:, :16]), x[:, 16:]) / 2).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)))
        optimizer.step()
        optimizer.zero_grad()
    for found, state, predicted in run(accumulate_and_clip, strategy):
        assert found == pytest.approx(norms, rel=1e-4)
        for name, value in module.state_dict().items():
            assert torch.allclose(state[name], value, rtol=0, atol=1e-6), name
        assert torch.allclose(predicted, call(torch.ones(2, 16)), rtol=0, atol=2e-3)


def go_on(strategy: str) -> Any:
    """The optimizer has state before it is wrapped, and loads some afterwards."""
    module = Wished()
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=RATE, momentum=0.5)
    module(4.0).backward()
    optimizer.step()
    optimizer.zero_grad()
    model, optimizer = shoal.as_distributed(
        module, optimizer, strategy=strategy, gather_compression="int8"
    )
    optimizer.load_state_dict(optimizer.state_dict())
    model(8.0).backward()
    optimizer.step()
    return whole_state(model), optimizer.state_dict()["state"]


@distinct
def test_an_optimizer_that_has_state(strategy: str) -> None:
    for state, momentum in run(go_on, strategy, ranks=3):
        for number, (name, value) in enumerate(Wished().named_parameters()):
            assert torch.equal(state[name], value.detach() - RATE * 4 - RATE * 10)
            assert torch.equal(momentum[number]["momentum_buffer"], torch.full_like(value, 10))


# What travels -----------------------------------------------------------------------------


def gathered_bytes(strategy: str, options: dict[str, Any]) -> Any:
    module = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    model, optimizer = made(strategy, module, **options)
    model.train_step(torch.ones(2, 256), torch.ones(2, 256), F.mse_loss)
    optimizer.step()
    world = shoal.world()
    world.reset_stats()
    for _ in range(2):
        model.train_step(torch.ones(2, 256), torch.ones(2, 256), F.mse_loss)
        optimizer.step()
    stats = world.stats()
    held = stats.memory["parameters"].current
    return stats["all_gather"].num_bytes, stats.compression, held


@pytest.mark.parametrize("ranks", [2, 3])
@distinct
def test_a_quarter_of_the_bytes_travels(strategy: str, ranks: int) -> None:
    packed = run(gathered_bytes, strategy, {}, ranks=ranks)
    plain = run(gathered_bytes, strategy, {"gather_compression": None}, ranks=ranks)
    for (num_bytes, counted, held), (full, nothing, others_held) in zip(packed, plain, strict=True):
        assert 0.25 < num_bytes / full <= 0.27
        assert 0.25 < counted.sent_bytes / counted.raw_bytes <= 0.26
        assert nothing.raw_bytes == 0
        # Payloads that are kept, or masters; nothing that was gathered.
        assert held / others_held < {"zero3": 1.27}.get(strategy, 1 + 1.01 / ranks)


def test_with_sixteen_bits_it_is_half_of_the_bytes() -> None:
    packed = run(gathered_bytes, "zero3", {"mixed_precision": "bf16"})
    for _, counted, _ in packed:
        assert 0.5 < counted.sent_bytes / counted.raw_bytes <= 0.51


def test_where_memory_is_shared_nothing_travels() -> None:
    def train() -> Any:
        _, counted, _ = gathered_bytes("zero2", {"min_group_bytes": 0})
        model, _ = made("zero3")
        return counted.raw_bytes, model.describe()

    for raw_bytes, words in pools.Team("shm", 2).run(train):
        assert raw_bytes == 0
        assert "720 parameters are rounded to int8 on all ranks" in words
        assert "ranks share memory, so that nothing is encoded to travel" in words


# Masters ----------------------------------------------------------------------------------


def change_and_load(strategy: str) -> Any:
    model, _ = made(strategy, min_group_bytes=0)
    untouched = whole_state(model)
    with model.full_parameters(), torch.no_grad():
        model.module.wide.mul_(1 + 2**-20)  # lost if it went through eight bits
        inside = whole_state(model)
    changed = whole_state(model)
    model(1.0)
    loaded = {name: value + 1 for name, value in untouched.items()}
    model.load_state_dict(loaded)
    model(1.0)
    return untouched, inside, changed, loaded, whole_state(model), model.module.seen


def check_change_and_load(results: list[Any]) -> None:
    before = {name: p.detach() for name, p in Wished().named_parameters()}
    for untouched, inside, changed, wanted, loaded, seen in results:
        assert all(torch.equal(untouched[name], value) for name, value in before.items())
        assert torch.equal(inside["wide"], before["wide"] * (1 + 2**-20))
        assert torch.equal(changed["wide"], inside["wide"])
        assert all(torch.equal(loaded[name], value) for name, value in wanted.items())
        for shown, masters in zip(seen, (changed, loaded), strict=True):
            assert all(torch.equal(shown[name], rounded(masters[name])) for name in masters)


@each
def test_masters_are_what_users_see_change_and_load(strategy: str) -> None:
    check_change_and_load(run(change_and_load, strategy, ranks=3))


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@distinct
def test_masters_over_processes(strategy: str, backend: str) -> None:
    check_change_and_load(pools.Team(backend, 2).run(change_and_load, strategy))


# Changes by hand --------------------------------------------------------------------------


def scale(model: Any) -> None:
    with torch.no_grad():
        model.module.wide.mul_(0.5)


def give(model: Any) -> None:
    model.module.wide.data = torch.zeros(20, 30)


def write_through_data(model: Any) -> None:
    model.module.wide.data.clamp_(-0.5, 0.5)


def write_late(model: Any) -> None:
    """The memory is freed, where it is gathered, before it is written to."""
    taken = model.module.wide.data
    model.module.taken = [taken]
    _ = model.module.kernel.data.sum()
    taken.zero_()


def change(strategy: str, doing: Any, use: str) -> Any:
    model, optimizer = made(strategy, min_group_bytes=0)

    def step() -> None:
        model(1.0).backward()
        optimizer.step()

    doing(model)
    with pytest.raises(ShoalError) as raised:
        step() if use == "step" else model.state_dict()
    vars(model.module).pop("taken", None)
    return str(raised.value), whole_state(model)


@pytest.mark.parametrize("use", ["step", "state_dict"])
@pytest.mark.parametrize("doing", [scale, give, write_through_data, write_late])
@distinct
def test_changes_of_rounded_parameters_are_refused(strategy: str, doing: Any, use: str) -> None:
    for words, state in run(change, strategy, doing, use):
        assert "wide was changed in place, but it is rounded to 8 bits here" in words
        assert "change it inside of `with model.full_parameters():`" in words
        assert torch.equal(state["wide"], Wished().wide)


@pytest.mark.parametrize("doing", [scale, give, write_through_data])
@distinct
def test_changes_of_shared_memory_are_refused(strategy: str, doing: Any) -> None:
    fork_server()
    leaks.baseline()
    for words, state in run(change, strategy, doing, "state_dict", backend="shm"):
        assert "wide was changed in place, but it is rounded to 8 bits here" in words
        assert torch.equal(state["wide"], Wished().wide)


@distinct
def test_vectors_are_changed_as_ever(strategy: str) -> None:
    def train() -> Any:
        model, optimizer = made(strategy)
        with torch.no_grad():
            model.module.bias.fill_(3.0)
        model(0.0).backward()
        optimizer.step()
        return whole_state(model)["bias"]

    assert all(torch.equal(bias, torch.full((11,), 3.0)) for bias in run(train))


def test_what_is_written_but_stays_the_same_is_no_change() -> None:
    def train() -> Any:
        model, optimizer = made("zero2")
        with torch.no_grad():
            model.module.wide.copy_(model.module.wide.clone())
        model(0.0).backward()
        optimizer.step()
        return whole_state(model)["wide"]

    assert all(torch.equal(wide, Wished().wide) for wide in run(train))


@distinct
def test_a_nan_stays_one(strategy: str) -> None:
    def train() -> Any:
        model, optimizer = made(strategy)
        with model.full_parameters(), torch.no_grad():
            model.module.wide[3, 4] = float("nan")
        model(0.0).backward()
        optimizer.step()
        _ = model.state_dict()
        return model.module.seen[0]["wide"], whole_state(model)["wide"]

    for seen, master in run(train):
        assert seen.flatten()[:256].isnan().all()
        assert not seen.flatten()[256:].isnan().any()
        assert master.isnan().sum() == 1


# What is refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "value", "error", "words"),
    [
        ("ddp", "int8", ValueError, "'zero2', 'zero3' and 'fsdp'; 'ddp' gathers none"),
        ("tensor", "int8", TypeError, "no option 'gather_compression': say .* under strategy"),
        ("pipeline", "int8", TypeError, "no option 'gather_compression': say .* under strategy"),
        ("hybrid", "int8", TypeError, "no option 'gather_compression': say .* under strategy"),
        ("local", "int8", TypeError, "no option 'gather_compression': say .* under strategy"),
        ("async", "int8", TypeError, "no option 'gather_compression': say .* under strategy"),
        ("zero3", "int4", ValueError, "rounds to the nearest; got 'int4'"),
        ("zero3", "int9", ValueError, "rounds to the nearest; got 'int9'"),
        ("zero2", Quantize(8, stochastic=True), ValueError, "rounds to the nearest; got Quantize"),
        ("zero1", 8, TypeError, "'gather_compression' must be a string or Codec or None; got 8"),
    ],
)  # fmt: skip
def test_what_it_does_not_go_with(strategy: str, value: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        run(made, strategy, nn.Linear(2, 2), ranks=1) if value == "int8" else run(
            lambda: made(strategy, gather_compression=value), ranks=1
        )


def test_an_optimizer_that_needs_everything() -> None:
    def wrap() -> None:
        module = Wished()
        optimizer = torch.optim.LBFGS(module.parameters())
        shoal.as_distributed(module, optimizer, strategy="zero3", gather_compression="int8")

    with pytest.raises(ValueError, match="gather_compression does not go with LBFGS"):
        run(wrap)


def test_ranks_that_ask_for_different_things() -> None:
    def wrap() -> None:
        ZeRO3Model(Wished(), gather_compression="int8" if shoal.world().rank else None)

    with pytest.raises(MismatchError, match="gather_compression='int8'"):
        run(wrap)


def test_verify_says_where_it_cannot_replay() -> None:
    with pytest.raises(ValueError, match="leave out gather_compression= with 'tensor'"):
        shoal.verify(Builder(), "tensor", gather_compression="int8")


@distinct
def test_what_is_described(strategy: str) -> None:
    words = run(lambda: made(strategy)[0].describe())[0]
    assert "720 parameters are rounded to int8 on all ranks, and their masters stepped" in words
    assert "they are gathered as int8" in words
