"""Ranks that do not train alike are found out: another step, option, gradient or weight."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pools
import shoal
from pools import Team
from shoal.errors import MismatchError
from shoal.optim import PAIRS
from shoal.strategies.consistency import drift
from shoal.strategies.consistency.progress import StepRecord
from shoal.torch_support.fingerprint import checksum
from strategies.loops import distinct, local, seeded, wrapped
from strategies.models import OddMLP

TRANSPORTS = ("memory", "shm", "gloo")
ODD_RANK = 1
"""Which rank does something else."""


def is_odd() -> bool:
    return shoal.world().rank == ODD_RANK


def train(strategy: str, change: Callable[[Any, Any, int], bool], **options: Any) -> Any:
    """Four steps; ``change`` is called before each, and says whether the rank leaves it out."""
    model, optimizer = wrapped(strategy, **options)
    for step in range(4):
        x, y = local(step)
        F.mse_loss(model(x), y).backward()
        if not change(model, optimizer, step):
            optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def leaves_out_a_step(model: Any, optimizer: Any, step: int) -> bool:
    return is_odd() and step == 2


def takes_another_rate(model: Any, optimizer: Any, step: int) -> bool:
    if is_odd() and step == 1:
        optimizer.param_groups[0]["lr"] *= 0.5
    return False


def edits_a_gradient(model: Any, optimizer: Any, step: int) -> bool:
    if is_odd() and step == 1:
        model.layers[0].weight.grad.mul_(2)
    return False


def edits_a_weight(model: Any, optimizer: Any, step: int) -> bool:
    if is_odd() and step == 2:
        with torch.no_grad():
            model.layers[0].weight[0, 0] += 1e-3
    return False


def freezes_a_parameter(model: Any, optimizer: Any, step: int) -> bool:
    if is_odd() and step == 1:
        model.layers[0].weight.requires_grad_(False)
    return False


def does_nothing(model: Any, optimizer: Any, step: int) -> bool:
    return False


def freezes_for_a_micro_batch(model: Any, optimizer: Any, step: int) -> bool:
    """Its gradients add up with those of the next backward, when it is trained again."""
    parameter = model.layers[0].weight
    parameter.requires_grad_(not (is_odd() and step == 1))
    x, y = local(step + 10)
    with model.no_sync():
        F.mse_loss(model(x), y).backward()
    parameter.requires_grad_(True)
    return False


CHANGES = {
    each.__name__: each
    for each in (
        leaves_out_a_step,
        takes_another_rate,
        edits_a_gradient,
        edits_a_weight,
        freezes_a_parameter,
    )
}


def complaint(strategy: str, change: str, check_every: int = 100) -> str:
    """What this rank is told, if it is told anything."""
    try:
        train(strategy, CHANGES[change], check_every=check_every)
    except MismatchError as error:
        return str(error)
    finally:
        gc.collect()  # groups, and they hold connections
    return ""


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("transport", TRANSPORTS)
@distinct
def test_a_step_left_out_on_one_rank(strategy: str, transport: str, ranks: int) -> None:
    for text in Team(transport, ranks).run(complaint, strategy, "leaves_out_a_step"):
        is_counted = "the number of steps of the optimizer" in text
        is_met = "optimizer.step()" in text and "average of gradients" in text
        assert is_counted or is_met
        assert "rank 0" in text or "ranks 0" in text
        assert "rank 1: " in text


@pytest.mark.parametrize("transport", TRANSPORTS)
@distinct
def test_another_learning_rate_on_one_rank(strategy: str, transport: str) -> None:
    for text in Team(transport, 2).run(complaint, strategy, "takes_another_rate"):
        assert "lr of parameter group 0 of the optimizer is not the same" in text
        assert "(rank 0: 0.1; rank 1: 0.05)" in text
        assert "world.agree" in text


@pytest.mark.parametrize("transport", TRANSPORTS)
@distinct
def test_a_parameter_frozen_on_one_rank(strategy: str, transport: str) -> None:
    for text in Team(transport, 3).run(complaint, strategy, "freezes_a_parameter"):
        assert "requires_grad of layers.0.weight is not the same on all of them" in text
        assert "(ranks 0, 2: True; rank 1: False)" in text


@pytest.mark.parametrize("transport", TRANSPORTS)
@distinct
def test_a_parameter_frozen_on_one_rank_for_a_micro_batch(strategy: str, transport: str) -> None:
    for text in Team(transport, 3).run(accumulation_complaint, strategy):
        assert "requires_grad of layers.0.weight is not the same on all of them" in text
        assert "(ranks 0, 2: True; rank 1: False)" in text


def accumulation_complaint(strategy: str) -> str:
    model, optimizer = wrapped(strategy)
    try:
        for step in range(3):
            optimizer.zero_grad()
            freezes_for_a_micro_batch(model, optimizer, step)
            x, y = local(step)
            F.mse_loss(model(x), y).backward()
            optimizer.step()
    except MismatchError as error:
        return str(error)
    finally:
        gc.collect()
    return ""


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_a_gradient_edited_on_one_rank(strategy: str, transport: str) -> None:
    for text in Team(transport, 3).run(complaint, strategy, "edits_a_gradient"):
        assert "the gradient of layers.0.weight is not the same" in text
        assert "(ranks 0, 2: value 1; rank 1: value 2)" in text


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
def test_a_weight_edited_on_one_rank(strategy: str) -> None:
    for text in Team("memory", 2).run(complaint, strategy, "edits_a_weight", 1):
        assert "drifted apart: layers.0.weight is not the same" in text


def wrap_unlike(strategy: str, difference: str) -> str:
    module = seeded()
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.1)
    if is_odd() and difference == "class":
        optimizer = torch.optim.Adafactor(module.parameters(), lr=0.1)
    elif is_odd() and difference in ("group", "order"):
        first, second, *others = module.parameters()
        own = [[first], [second, *others]] if difference == "group" else [[second, first], others]
        optimizer = torch.optim.SGD([{"params": each} for each in own], lr=0.1)
    elif difference in ("group", "order"):
        first, second, *others = module.parameters()
        groups = [{"params": [first, second]}, {"params": others}]
        optimizer = torch.optim.SGD(groups, lr=0.1)
    elif is_odd() and difference == "option":
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.5)
    try:
        shoal.as_distributed(module, optimizer, strategy=strategy)
    except MismatchError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("difference", ["class", "option", "group", "order"])
@distinct
def test_optimizers_are_compared_when_they_are_wrapped(strategy: str, difference: str) -> None:
    values = {
        "class": "(rank 0: torch.optim.sgd.SGD; rank 1: torch.optim.",
        "group": "the place of layers.0.bias in the optimizer is not the same on all of them "
        "(rank 0: group 0, number 1; rank 1: group 1, number 0)",
        "order": "the place of layers.0.weight in the optimizer is not the same on all",
        "option": "momentum of parameter group 0 is not the same on all of them (rank 0: 0; rank",
    }
    for text in Team("memory", 2).run(wrap_unlike, strategy, difference):
        assert values[difference] in text


# Where nothing is communicated any more --------------------------------------------------------


def leaves_out_the_last(model: Any, optimizer: Any, step: int) -> bool:
    return is_odd() and step == 3


def end_after_it(strategy: str) -> None:
    train(strategy, leaves_out_the_last, check_every=0)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_last_to_leave_finds_a_step_left_out(transport: str) -> None:
    if transport != "memory":
        pools.get(transport, 2)  # has what starts processes running before leaks are looked for
    with pytest.raises(MismatchError, match=r"has made [34] steps, and rank [01] had made [34]"):
        shoal.run(end_after_it, 2, transport, ("ddp",), timeout=20)


def edits_the_last_gradient(model: Any, optimizer: Any, step: int) -> bool:
    if is_odd() and step == 3:
        model.layers[0].weight.grad.mul_(2)
    return False


def end_after_an_edit(strategy: str) -> None:
    train(strategy, edits_the_last_gradient, check_every=0)


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_the_last_to_leave_finds_an_edit_of_sharded_gradients(strategy: str) -> None:
    with pytest.raises(MismatchError, match="gradients that were changed in another way"):
        shoal.run(end_after_an_edit, 2, "memory", (strategy,), timeout=20)


def look_after_the_last_step(strategy: str) -> None:
    model, _ = train(strategy, does_nothing, check_every=0)
    if is_odd():
        for parameter in model.parameters():
            parameter.requires_grad_(False)


@distinct
def test_a_rank_may_freeze_its_model_after_training(strategy: str) -> None:
    shoal.run(look_after_the_last_step, 2, "memory", (strategy,), timeout=20)


def end_with_another_rate(rank: int) -> None:
    _, optimizer = train("ddp", does_nothing)
    if shoal.world().rank == rank:
        optimizer.param_groups[0]["lr"] = 1.0


@pytest.mark.parametrize("rank", [0, 1])
def test_the_last_to_leave_finds_another_option(rank: int) -> None:
    with pytest.raises(MismatchError, match="with other options than this rank"):
        shoal.run(end_with_another_rate, 2, "memory", (rank,), timeout=20)


def save_after_it(folder: str, change: str) -> str:
    steps = {"steps": leaves_out_the_last, "weight": does_nothing}
    model, optimizer = train("ddp", steps[change], check_every=50 if change == "weight" else 0)
    if change == "weight" and is_odd():
        with torch.no_grad():
            model.layers[0].bias += 1e-6
    try:
        shoal.save(folder, model, optimizer)
    except MismatchError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("change", "told"),
    [("steps", "(rank 0: 4; rank 1: 3)"), ("weight", "layers.0.bias is not the")],
)
def test_a_save_is_refused(tmp_path: Path, change: str, told: str) -> None:
    for text in Team("memory", 2).run(save_after_it, str(tmp_path), change):
        assert told in text
    assert not list(tmp_path.glob("*/manifest*"))


# Layers that are split or spread ---------------------------------------------------------------


def train_parts(strategy: str, **options: Any) -> str:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model, optimizer = shoal.as_distributed(module, optimizer, strategy=strategy, **options)
    if is_odd():
        optimizer.param_groups[0]["lr"] = 0.2
    try:
        model.train_step(torch.ones(4, 6), torch.ones(4, 3), F.mse_loss)
        optimizer.step()
    except MismatchError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("strategy", "options"),
    [("tensor", {}), ("pipeline", {"micro_batches": 2}), ("hybrid", {"tensor": 2, "data": 1})],
)
def test_ranks_that_hold_parts_of_one_model(strategy: str, options: dict[str, Any]) -> None:
    for text in shoal.run(lambda: train_parts(strategy, **options), 2, "memory", timeout=30):
        assert "(rank 0: 0.1; rank 1: 0.2)" in text


# No false alarms -------------------------------------------------------------------------------


class Counting(torch.optim.SGD):
    """Writes into its groups while it steps, only where it has something to step."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            if group["params"]:
                group["count"] = group.get("count", 0) + 1
                group["momentum"] += 0.01
        return super().step(closure)


class Tiny(nn.Module):
    """Fewer elements than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def train_counting(strategy: str) -> float:
    module = Tiny()
    optimizer: Any = Counting(module.parameters(), lr=0.1, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model = shoal.as_distributed(module, strategy=strategy)
    optimizer = PAIRS[strategy][1](optimizer, model, kind="element-wise")
    for _ in range(4):
        model(torch.ones(1)).sum().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return float(model.state_dict()["weight"])


@distinct
def test_what_an_optimizer_writes_into_its_groups_is_not_the_users(strategy: str) -> None:
    results = shoal.run(train_counting, 3, "memory", (strategy,), timeout=30)
    assert len(set(results)) == 1


def test_options_changed_by_the_user_count_and_others_do_not() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=torch.tensor(0.5))
    options = StepRecord(optimizer)
    group = optimizer.param_groups[0]
    group["momentum"] = 0.9
    assert options.facts()["momentum of parameter group 0"] == "0.9"
    group["momentum"] = 0.1
    options.end_step()
    assert options.facts()["momentum of parameter group 0"] == "0.9"
    group["lr"].mul_(0.5)
    assert options.facts()["lr of parameter group 0"] == "0.25"


def test_when_replicas_are_compared() -> None:
    due = [number for number in range(1, 31) if drift.is_due(number, 10)]
    assert due == [1, 2, 4, 8, 10, 20, 30]
    assert not any(drift.is_due(number, 0) for number in range(1, 100))
    assert all(drift.is_due(number, 1) for number in range(1, 10))


def dtypes() -> Iterator[torch.dtype]:
    yield from (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)
    yield from (torch.int64, torch.uint8, torch.bool, torch.complex128)


@pytest.mark.parametrize("dtype", list(dtypes()), ids=str)
def test_a_fingerprint_sees_one_element(dtype: torch.dtype) -> None:
    tensor = torch.zeros(5, dtype=dtype)
    before = int(checksum(tensor))
    tensor[3] = 1
    assert int(checksum(tensor)) != before
    assert int(checksum(torch.flip(tensor, [0]).flip(0))) == int(checksum(tensor))


def test_a_fingerprint_sees_the_last_bit() -> None:
    tensor = torch.full((100,), 0.1)
    other = tensor.clone()
    other[7] = torch.nextafter(other[7], torch.tensor(1.0))
    assert int(checksum(tensor)) != int(checksum(other))


def train_quietly() -> int:
    """Parameters that ranks use differently, and frozen ones, are still the same everywhere."""
    model, optimizer = wrapped("ddp", OddMLP, check_every=1)
    for step in range(3):
        x, y = local(step)
        loss = F.mse_loss(model(x), y) if shoal.world().rank else model.layers[0](x).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return int(optimizer.num_steps)


def test_ranks_that_use_different_parameters_train_alike() -> None:
    assert shoal.run(train_quietly, 2, "memory", timeout=30) == [3, 3]


# Gradients of which each rank has a part ---------------------------------------------------------


def scales_alone(model: Any, own: Tensor) -> None:
    if is_odd():
        model.layers[0].weight.grad.mul_(2)


def replaces_alone(model: Any, own: Tensor) -> None:
    if is_odd():
        model.layers[0].weight.grad = model.layers[0].weight.grad * 2


def drops_alone(model: Any, own: Tensor) -> None:
    if is_odd():
        model.layers[0].weight.grad = None


def forgets_alone(model: Any, own: Tensor) -> None:
    if is_odd():
        model.zero_grad()


def adds_its_own(model: Any, own: Tensor) -> None:
    model.layers[0].weight.grad.add_(own)


def replaces_by_its_own(model: Any, own: Tensor) -> None:
    model.layers[0].weight.grad = model.layers[0].weight.grad + own


def scales_by_its_own(model: Any, own: Tensor) -> None:
    model.layers[0].weight.grad.mul_(float(own.sum()))


def writes_to_a_view_alone(model: Any, own: Tensor) -> None:
    row = model.layers[0].weight.grad[0]
    if is_odd():
        row.zero_()


def clips_as_all_do(model: Any, own: Tensor) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    model.layers[0].weight.grad[0] = 0.25
    model.layers[0].weight.grad[1].mul_(2)
    for parameter in model.parameters():
        parameter.grad.add_(parameter.detach(), alpha=0.1)
        parameter.grad = parameter.grad * 0.5


EDITS = {
    each.__name__: each
    for each in (
        scales_alone, replaces_alone, drops_alone, forgets_alone, adds_its_own,
        replaces_by_its_own, scales_by_its_own, writes_to_a_view_alone, clips_as_all_do,
    )
}  # fmt: skip


def edit_gradients(strategy: str, edit: str) -> str:
    model, optimizer = wrapped(strategy, check_every=0)
    try:
        for step in range(2):
            x, y = local(step)
            F.mse_loss(model(x), y).backward()
            (own,) = torch.autograd.grad(F.mse_loss(model(x), y), [model.layers[0].weight])
            EDITS[edit](model, own)
            optimizer.step()
            optimizer.zero_grad()
        shoal.world().barrier()
    except MismatchError as error:
        return str(error)
    finally:
        gc.collect()
    return ""


@pytest.mark.parametrize("edit", sorted(EDITS.keys() - {"clips_as_all_do"}))
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_an_edit_that_is_not_the_same_on_all_ranks(strategy: str, edit: str) -> None:
    for text in Team("memory", 3).run(edit_gradients, strategy, edit):
        assert "averaged gradients" in text


@pytest.mark.parametrize(
    "edit", ["scales_alone", "drops_alone", "forgets_alone", "writes_to_a_view_alone"]
)
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_an_edit_of_whole_gradients_by_one_rank(strategy: str, edit: str) -> None:
    """Under zero1 it left no trace in the weights: all ranks get them from one that steps."""
    for text in Team("memory", 3).run(edit_gradients, strategy, edit):
        assert "averaged gradients" in text


@pytest.mark.parametrize("transport", ["shm", "gloo"])
@pytest.mark.parametrize(
    ("strategy", "edit"),
    [("zero1", "scales_alone"), ("zero3", "adds_its_own"), ("zero3", "writes_to_a_view_alone")],
)
def test_an_edit_between_processes(transport: str, strategy: str, edit: str) -> None:
    for text in Team(transport, 2).run(edit_gradients, strategy, edit):
        assert "averaged gradients" in text


@distinct
def test_edits_that_all_ranks_make_are_no_mismatch(strategy: str) -> None:
    assert Team("memory", 3).run(edit_gradients, strategy, "clips_as_all_do") == [""] * 3


def keep_some(strategy: str, keep: str) -> str:
    """One rank holds on to gradients, to log them, while all of them edit alike."""
    model, optimizer = wrapped(strategy, check_every=0)
    kept: list[Tensor] = []
    try:
        for step in range(3):
            x, y = local(step)
            F.mse_loss(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            for parameter in model.parameters():
                seen = parameter.grad if keep == "gradient" else parameter.grad.view(-1)[:2]
                kept += [seen] if is_odd() else []
                del seen
            grads = [parameter.grad for parameter in model.parameters()]
            torch._foreach_mul_(grads[::2], 0.5)
            model.layers[0].weight.grad[0] = 0.25
            model.layers[1].weight.grad[1].mul_(2)
            for parameter in model.parameters():
                parameter.grad.mul_(0.9).add_(parameter.detach(), alpha=0.1)
            del grads
            optimizer.step()
            optimizer.zero_grad()
    except MismatchError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("keep", ["gradient", "view"])
@distinct
def test_a_rank_that_keeps_gradients_edits_them_like_the_others(strategy: str, keep: str) -> None:
    assert Team("memory", 3).run(keep_some, strategy, keep) == [""] * 3
