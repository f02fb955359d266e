"""Strategy "local": each rank steps by itself, and parameters are averaged now and then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import LBFGS, SGD

import pools
import shoal
from shoal.compression import parse
from shoal.errors import MismatchError, PeerError, ShoalError
from shoal.optim import GradientCompressionOptimizer, LocalSGDOptimizer
from shoal.strategies import DDPModel, LocalModel
from strategies.gradients.compressed.replay import Replay
from strategies.independent.replicas import RANKS, State, assert_equal, build, data, on_ranks, train

pytestmark = pytest.mark.timeout(60)


def nesterov(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def made(**options: Any) -> tuple[Any, Any]:
    module = build()
    optimizer = SGD(module.parameters(), lr=0.1, momentum=0.9)
    return shoal.as_distributed(module, optimizer, strategy="local", **options)


def replayed(num_steps: int, every: int, outer: Any = None, ranks: int = RANKS) -> State:
    """The definition, in one process."""
    models = [build() for _ in range(ranks)]
    optimizers = [SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    agreed = [nn.Parameter(each.detach().clone()) for each in models[0].parameters()]
    stepper = None if outer is None else outer(agreed)
    for step in range(num_steps):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            inputs, targets = data(step, rank)
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()
        if (step + 1) % every:
            continue
        with torch.no_grad():
            for start, *replicas in zip(agreed, *(m.parameters() for m in models), strict=True):
                parts = replicas if stepper is None else [start - each for each in replicas]
                mean = sum(parts[1:], start=parts[0]) / ranks
                if stepper is None:
                    start.copy_(mean)
                else:
                    start.grad = mean
            if stepper is not None:
                stepper.step()
            for start, *replicas in zip(agreed, *(m.parameters() for m in models), strict=True):
                for each in replicas:
                    each.copy_(start)
    names = [name for name, _ in models[0].named_parameters()]
    return {name: each.detach() for name, each in zip(names, agreed, strict=True)}


# The definition ---------------------------------------------------------------------------


@pytest.mark.parametrize("outer", [None, nesterov], ids=["average", "diloco"])
@pytest.mark.parametrize("every", [1, 3])
def test_equals_its_definition_to_the_last_bit(every: int, outer: Any) -> None:
    def go() -> State:
        model, optimizer = made(every=every, outer=outer)
        train(model, optimizer, range(6))
        return model.state_dict()

    for state in on_ranks(go):
        assert_equal(state, replayed(6, every, outer))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # Gradients are 1 on rank 0 and 3 on rank 1: two steps of 0.5 lead to -1 and -3.
        ({}, -2.0),
        ({"outer": lambda ps: SGD(ps, lr=0.5)}, -1.0),
        ({"outer": lambda ps: SGD(ps, lr=0.7, momentum=0.9, nesterov=True)}, -2.66),
        ({"compression": "fp16"}, -2.0),
        ({"compression": "topk:1.0"}, -2.0),
        ({"compression": "fp16", "outer": lambda ps: SGD(ps, lr=0.5)}, -1.0),
    ],
)
def test_one_round_by_hand(options: Any, expected: float) -> None:
    """Nothing is applied twice, nothing left out."""

    def go() -> list[float]:
        module = nn.Linear(4, 1, bias=False)
        nn.init.zeros_(module.weight)
        optimizer = SGD(module.parameters(), lr=0.5)
        model, optimizer = shoal.as_distributed(
            module, optimizer, strategy="local", every=2, **options
        )
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, 4) * (1 + 2 * shoal.world().rank)).sum().backward()
            optimizer.step()
        return module.weight.flatten().tolist()

    for weights in on_ranks(go, ranks=2):
        assert weights == pytest.approx([expected] * 4)


def test_what_compression_leaves_out_comes_in_a_later_round() -> None:
    def go() -> list[list[float]]:
        module = nn.Linear(4, 1, bias=False)
        nn.init.zeros_(module.weight)
        optimizer = SGD(module.parameters(), lr=1.0)
        model, optimizer = shoal.as_distributed(
            module, optimizer, strategy="local", every=1, compression="topk:0.25"
        )
        seen = []
        for inputs in ([[8.0, 4.0, 2.0, 1.0]], [[0.0, 0.0, 0.0, 0.0]]):
            optimizer.zero_grad()
            model(torch.tensor(inputs)).sum().backward()
            optimizer.step()
            seen.append(module.weight.flatten().tolist())
        return seen

    for first, second in on_ranks(go, ranks=2):
        assert first == [-8.0, 0.0, 0.0, 0.0]
        assert second == [-8.0, -4.0, 0.0, 0.0]


def replayed_compressed(num_steps: int, every: int, codec: Any, outer: Any) -> State:
    """The definition: what a round has changed is averaged as payloads, then stepped with."""
    models = [build() for _ in range(RANKS)]
    optimizers = [SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    names, start = zip(*build().named_parameters(), strict=True)
    shapes = [(name, each.shape) for name, each in zip(names, start, strict=True)]
    replay = Replay(codec, shapes, RANKS, sharded=False)
    stepper = SGD(start, lr=1.0) if outer is None else outer(list(start))
    for step in range(num_steps):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            inputs, targets = data(step, rank)
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()
        if (step + 1) % every:
            continue
        with torch.no_grad():
            changes = [
                replay.flat([s - own for s, own in zip(start, m.parameters(), strict=True)])
                for m in models
            ]
            average = replay.average(changes)
            for slot, parameter in zip(replay.layout.slots, start, strict=True):
                parameter.grad = average[slot.start : slot.stop].view(slot.shape)
            stepper.step()
            for model in models:
                for parameter, value in zip(model.parameters(), start, strict=True):
                    parameter.copy_(value)
    return {name: each.detach() for name, each in zip(names, start, strict=True)}


@pytest.mark.parametrize("outer", [None, nesterov], ids=["average", "diloco"])
@pytest.mark.parametrize(
    "compression", ["bf16", "int8", "int4", "sign", "topk:0.2", "randomk:0.3", "powersgd:1"]
)
def test_compressed_rounds_equal_their_definition_to_the_last_bit(
    compression: str, outer: Any
) -> None:
    def go() -> State:
        model, optimizer = made(every=2, compression=compression, outer=outer)
        train(model, optimizer, range(8))
        return model.state_dict()

    expected = replayed_compressed(8, 2, parse(compression), outer)
    for state in on_ranks(go):
        assert_equal(state, expected)


@pytest.mark.parametrize("compression", ["int8", "powersgd:1", "topk:0.3"])
def test_compressed_ranks_are_equal_at_boundaries(compression: str) -> None:
    def go() -> tuple[State, int]:
        model, optimizer = made(every=2, compression=compression, outer=nesterov, check_every=1)
        train(model, optimizer, range(4))
        return model.state_dict(), shoal.world().stats().compression.sent_bytes

    states = on_ranks(go)
    for state, sent in states:
        assert sent > 0
        assert_equal(state, states[0][0])


@pytest.mark.parametrize("outer", [None, nesterov], ids=["average", "diloco"])
def test_bytes_are_as_many_times_fewer_as_a_round_has_steps(outer: Any) -> None:
    def go(strategy: str, **options: Any) -> int:
        module = build()
        model, optimizer = shoal.as_distributed(
            module, SGD(module.parameters(), lr=0.1), strategy=strategy, check_every=0, **options
        )
        train(model, optimizer, range(2))
        shoal.world().backend.reset_stats()
        train(model, optimizer, range(2, 12))
        return shoal.world().stats()["all_reduce"].num_bytes

    def both() -> tuple[int, int]:
        return go("ddp"), go("local", every=10, outer=outer)

    for synchronous, local in on_ranks(both):
        assert synchronous == 10 * local > 0


# In the middle of a round -----------------------------------------------------------------


def test_a_rank_is_on_its_own_between_averages() -> None:
    def go() -> tuple[Tensor, Tensor, State]:
        model, optimizer = made(every=4)
        train(model, optimizer, range(2))
        before = model[0].weight.detach().clone()
        state = model.state_dict()  # of all ranks, and nothing changes by it
        assert torch.equal(model[0].weight, before)
        with model.predicting():
            model(torch.ones(1, 5))
        train(model, optimizer, range(2, 4))
        return before, model[0].weight.detach(), state

    (first, end, state), *others = on_ranks(go)
    for other, others_end, others_state in others:
        assert not torch.equal(first, other)
        assert torch.equal(end, others_end)
        assert_equal(state, others_state)
    mean = sum((other for other, _, _ in others), start=first) / RANKS
    assert torch.allclose(state["0.weight"], mean)
    assert torch.equal(end, replayed(4, 4)["0.weight"])


def test_a_round_can_end_early() -> None:
    def go() -> tuple[bool, int, State]:
        model, optimizer = made(every=100)
        train(model, optimizer, range(3))
        optimizer.average()
        optimizer.average()  # nothing left to do
        return model.is_at_boundary, optimizer.num_local_steps, model.state_dict()

    for is_at_boundary, steps, state in on_ranks(go):
        assert is_at_boundary
        assert steps == 0
        assert_equal(state, replayed(3, 3))


@pytest.mark.parametrize(("averages", "expected"), [(False, 1.0), (True, 2.0)])
def test_buffers_are_shared_at_boundaries(averages: bool, expected: float) -> None:
    def go() -> tuple[float, float]:
        module = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1, momentum=1.0))
        nn.init.ones_(module[0].weight)
        nn.init.zeros_(module[0].bias)
        model, optimizer = shoal.as_distributed(
            module,
            SGD(module.parameters(), lr=0.0),
            strategy="local",
            every=2,
            average_buffers=averages,
        )
        seen = []
        for _ in range(2):
            model(torch.full((2, 1), 1.0 + 2 * shoal.world().rank)).sum().backward()
            optimizer.step()
            seen.append(module[1].running_mean.item())
        return seen[0], seen[1]

    ranks = on_ranks(go, ranks=2)
    assert [first for first, _ in ranks] == [1.0, 3.0]
    assert [last for _, last in ranks] == [expected] * 2


def test_parameters_that_a_rank_does_not_use_and_frozen_ones() -> None:
    def go() -> tuple[State, list[str]]:
        module = nn.ModuleDict({name: nn.Linear(2, 1, bias=False) for name in "abc"})
        for each in module.parameters():
            nn.init.ones_(each)
        module["c"].requires_grad_(False)
        optimizer = torch.optim.Adam(module.parameters(), lr=0.5)
        model, optimizer = shoal.as_distributed(module, optimizer, strategy="local", every=2)
        used = "ab"[shoal.world().rank]
        for _ in range(2):
            optimizer.zero_grad()
            module[used](torch.ones(1, 2)).sum().backward()
            optimizer.step()
        state = model.state_dict()
        return state, sorted(str(key) for key in optimizer.state_dict()["state"])

    for state, keys in on_ranks(go, ranks=2):
        # Two steps of 0.5 on one of two ranks.
        assert torch.allclose(state["a.weight"], torch.full((1, 2), 0.5), atol=1e-6)
        assert torch.allclose(state["b.weight"], torch.full((1, 2), 0.5), atol=1e-6)
        assert torch.equal(state["c.weight"], torch.ones(1, 2))
        assert keys == ["0", "1"]


def test_each_of_several_optimizers_has_rounds_of_its_own() -> None:
    def go() -> list[tuple[bool, float, float]]:
        module = nn.ModuleDict({name: nn.Linear(1, 1, bias=False) for name in "ab"})
        for each in module.parameters():
            nn.init.zeros_(each)
        optimizers = [SGD(module[name].parameters(), lr=1.0) for name in "ab"]
        model = LocalModel(module, every=2)
        first = LocalSGDOptimizer(optimizers[0], model)
        second = LocalSGDOptimizer(optimizers[1], model, every=3)
        seen = []
        for _ in range(6):
            module["a"](torch.full((1, 1), 1.0 + 2 * shoal.world().rank)).backward()
            module["b"](torch.full((1, 1), 1.0 + 2 * shoal.world().rank)).backward()
            for optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad()
            seen.append(
                (model.is_at_boundary, module["a"].weight.item(), module["b"].weight.item())
            )
        return seen

    zero, one = on_ranks(go, ranks=2)
    assert [step for step, (is_there, _, _) in enumerate(zero, 1) if is_there] == [6]
    assert [a == b for (_, a, _), (_, b, _) in zip(zero, one, strict=True)] == [0, 1, 0, 1, 0, 1]
    assert [a == b for (_, _, a), (_, _, b) in zip(zero, one, strict=True)] == [0, 0, 1, 0, 0, 1]
    assert zero[-1] == (True, -12.0, -12.0)


def test_schedulers_scale_the_steps_of_each_rank() -> None:
    def go() -> float:
        model, optimizer = made(every=2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        for step in range(4):
            train(model, optimizer, range(step, step + 1))
            scheduler.step()
        return optimizer.param_groups[0]["lr"]

    assert on_ranks(go) == [pytest.approx(0.025)] * RANKS


def test_mixed_precision_averages_masters() -> None:
    def go() -> tuple[torch.dtype, State]:
        model, optimizer = made(every=2, mixed_precision="bf16", check_every=1)
        train(model, optimizer, range(4))
        return model[0].weight.dtype, model.state_dict()

    states = on_ranks(go)
    for dtype, state in states:
        assert dtype is torch.bfloat16
        assert state["0.weight"].dtype is torch.float32
        assert_equal(state, states[0][1])


# What is found and refused ----------------------------------------------------------------


def test_a_rank_that_leaves_out_a_step_is_named() -> None:
    def go() -> None:
        model, optimizer = made(every=4)
        train(model, optimizer, range(4 - (shoal.world().rank == 1)))
        model.state_dict()

    with pytest.raises((MismatchError, PeerError, ShoalError)) as caught:
        on_ranks(go)
    text = str(caught.value)
    assert "average of parameters after 4 local steps" in text
    assert "state_dict() in the middle of a round" in text
    assert "rank 1" in text


def test_ranks_that_end_after_other_numbers_of_steps() -> None:
    def go() -> None:
        model, optimizer = made(every=4)
        train(model, optimizer, range(3 - (shoal.world().rank == 1)))

    with pytest.raises(MismatchError, match="steps, and rank"):
        on_ranks(go)


def test_another_learning_rate_is_found_at_the_boundary() -> None:
    def go() -> None:
        model, optimizer = made(every=2)
        if shoal.world().rank == 2:
            optimizer.param_groups[0]["lr"] = 0.3
        train(model, optimizer, range(2))

    with pytest.raises(MismatchError, match=r"lr of parameter group 0.*rank 2"):
        on_ranks(go)


def test_parameters_that_drift_apart_in_spite_of_averages_are_found() -> None:
    """Those that no optimizer has are equal by nothing but good behaviour."""

    def go() -> None:
        module = build()
        optimizer = SGD(module[0].parameters(), lr=0.1)
        model, optimizer = shoal.as_distributed(
            module, optimizer, strategy="local", every=2, check_every=1
        )
        with torch.no_grad():
            module[2].bias.add_(float(shoal.world().rank))
        train(model, optimizer, range(2))

    with pytest.raises(MismatchError, match=r"drifted apart: 2\.bias"):
        on_ranks(go)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"every": 0}, ValueError, "at least 1"),
        ({"every": 2.5}, TypeError, "option 'every' must be a whole number"),
        ({"outer": lambda _: None}, TypeError, "outer must be a function that makes an optimizer"),
        ({"outer": lambda ps: SGD(ps[:1], lr=1.0)}, ValueError, "of all parameters"),
        ({"outer": "nesterov"}, TypeError, "makes an optimizer from a list.*got a str"),
        ({"outer": lambda ps: LBFGS(ps)}, TypeError, "a LBFGS, which calls a closure"),
        ({"sync_batchnorm": True}, TypeError, "has no option 'sync_batchnorm'"),
        ({"replica": 2}, TypeError, "has no option 'replica'"),
    ],
)
def test_wrong_options(options: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        on_ranks(lambda: made(**options), ranks=2)


def test_an_outer_optimizer_that_differs_between_ranks() -> None:
    def go() -> None:
        made(outer=lambda ps: SGD(ps, lr=0.5 + shoal.world().rank))

    with pytest.raises(MismatchError, match="lr of parameter group 0 of the outer optimizer"):
        on_ranks(go, ranks=2)


def test_an_outer_optimizer_on_some_ranks_only() -> None:
    def by_option() -> None:
        made(outer=nesterov if shoal.world().rank else None)

    def by_class() -> None:
        module = build()
        optimizer = SGD(module.parameters(), lr=0.1)
        LocalSGDOptimizer(
            optimizer, LocalModel(module), outer=nesterov if shoal.world().rank else None
        )

    with pytest.raises(MismatchError, match="outer='a function'"):
        on_ranks(by_option, 2)
    with pytest.raises(MismatchError, match="outer='a function'"):
        on_ranks(by_class, 2)


@pytest.mark.parametrize(
    "outer",
    [
        lambda ps: SGD(ps, lr=0.7, weight_decay=0.1),
        lambda ps: torch.optim.AdamW(ps, lr=0.1, weight_decay=0.1),
        nesterov,
    ],
    ids=["decay", "adamw", "momentum"],
)
def test_the_outer_optimizer_leaves_frozen_parameters_alone(outer: Any) -> None:
    """From the beginning, and once they are frozen: neither decay nor momentum moves them."""

    def go() -> list[bool]:
        model, optimizer = made(every=1, outer=outer)
        model[0].requires_grad_(False)
        seen = []
        for step in range(4):
            before = model[0].weight.detach().clone()
            train(model, optimizer, range(step, step + 1))
            seen.append(torch.equal(model[0].weight, before))
            model[0].requires_grad_(step == 1)
        return seen

    assert on_ranks(go) == [[True, True, False, True]] * RANKS


def test_rounds_that_differ_between_ranks() -> None:
    """Where they wrap, not at the first boundary."""

    def by_option() -> None:
        made(every=2 + shoal.world().rank)

    def by_class() -> None:
        module = build()
        optimizer = SGD(module.parameters(), lr=0.1)
        LocalSGDOptimizer(optimizer, LocalModel(module), every=2 + shoal.world().rank)

    with pytest.raises(MismatchError, match="wrapping with strategy='local', every=2"):
        on_ranks(by_option, 2)
    with pytest.raises(MismatchError, match=r"LocalSGDOptimizer\(every=2\)"):
        on_ranks(by_class, 2)


def test_classes_by_hand() -> None:
    def go() -> tuple[str, State]:
        module = build()
        model = LocalModel(module)
        inner = SGD(module.parameters(), lr=0.1, momentum=0.9)
        optimizer = LocalSGDOptimizer(inner, model, every=3, outer=nesterov)
        train(model, optimizer, range(3))
        return model.describe(), model.state_dict()

    for text, state in on_ranks(go):
        assert "averaged after every 3 steps, and SGD steps" in text
        assert_equal(state, replayed(3, 3, nesterov))


@pytest.mark.parametrize("every", [2.5, "5", True])
def test_an_optimizer_refuses_what_is_no_number_of_steps(every: Any) -> None:
    def go() -> None:
        module = build()
        LocalSGDOptimizer(SGD(module.parameters(), lr=0.1), LocalModel(module), every=every)

    with pytest.raises(TypeError, match="'every' must be a whole number"):
        on_ranks(go, ranks=2)


def test_wrong_partners() -> None:
    def go() -> None:
        module = build()
        model = DDPModel(module)
        LocalSGDOptimizer(SGD(module.parameters(), lr=0.1), model)  # type: ignore[arg-type]

    with pytest.raises(TypeError, match="LocalSGDOptimizer goes with LocalModel"):
        on_ranks(go, ranks=2)


def test_the_compressing_optimizer_goes_with_it() -> None:
    def go() -> tuple[bool, str]:
        module = build()
        model = LocalModel(module, every=2)
        inner = SGD(module.parameters(), lr=0.1)
        optimizer = GradientCompressionOptimizer(inner, model, compression="int8")
        train(model, optimizer, range(2))
        return isinstance(optimizer, LocalSGDOptimizer), model.describe()

    for is_local, text in on_ranks(go, ranks=2):
        assert is_local
        assert "what a round changed is averaged as int8" in text


def test_states_of_optimizers_are_averaged_and_loaded_everywhere() -> None:
    def go() -> tuple[Any, Any, State]:
        model, optimizer = made(every=2, outer=nesterov)
        train(model, optimizer, range(4))
        state, weights = optimizer.state_dict(), model.state_dict()
        other, other_optimizer = made(every=2, outer=nesterov)
        other.load_state_dict(weights)
        other_optimizer.load_state_dict(state)
        again = other_optimizer.state_dict()
        train(other, other_optimizer, range(4, 6))
        return state, again, other.state_dict()

    ranks = on_ranks(go, ranks=2)
    for state, again, weights in ranks:
        for number, values in state["state"].items():
            assert torch.equal(values["momentum_buffer"], again["state"][number]["momentum_buffer"])
        outer = state["outer"]["state"]
        assert all(torch.equal(v["momentum_buffer"], outer[k]["momentum_buffer"])
                   for k, v in ranks[0][0]["outer"]["state"].items())  # fmt: skip
        assert_equal(weights, ranks[0][2])


def test_one_rank_is_the_plain_optimizer() -> None:
    def go() -> State:
        model, optimizer = made(every=2)
        train(model, optimizer, range(4))
        return model.state_dict()

    (state,) = on_ranks(go, ranks=1)
    assert_equal(state, replayed(4, 2, ranks=1))


# Processes --------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["shm", "gloo", pytest.param("mpi", marks=pytest.mark.mpi)])
@pytest.mark.parametrize("outer", [None, nesterov], ids=["average", "diloco"])
def test_between_processes(outer: Any, backend: str) -> None:
    def go() -> State:
        model, optimizer = made(every=3, outer=outer)
        train(model, optimizer, range(6))
        return model.state_dict()

    expected = replayed(6, 3, outer)
    states = pools.Team(backend, RANKS).run(go)
    for state in states:
        assert_equal(state, states[0])
        for name, value in expected.items():
            assert torch.allclose(state[name], value, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("backend", ["shm", "gloo", pytest.param("mpi", marks=pytest.mark.mpi)])
@pytest.mark.parametrize("compression", ["int8", "powersgd:1"])
def test_compressed_between_processes(compression: str, backend: str) -> None:
    def go() -> State:
        model, optimizer = made(every=2, compression=compression)
        train(model, optimizer, range(6))
        return model.state_dict()

    expected = on_ranks(go)[0]
    for state in pools.Team(backend, RANKS).run(go):
        for name, value in expected.items():
            assert torch.allclose(state[name], value, rtol=1e-5, atol=1e-6)


def test_a_scaler_that_skips_a_step_on_one_rank() -> None:
    """It did something else to its gradients, which are its own; but it is a step behind."""

    def go() -> None:
        model, optimizer = made(every=2)
        rank = shoal.world().rank
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(4):
            inputs, targets = data(step, rank)
            if (step, rank) == (1, 1):
                targets[0, 0] = float("inf")
            optimizer.zero_grad()
            scaler.scale(F.mse_loss(model(inputs), targets)).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()

    with pytest.raises(PeerError, match="rank 1 failed: it has left"):
        on_ranks(go)
