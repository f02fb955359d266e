"""Data, tensor and pipeline parallelism in one mesh: equal to one process, each rank its part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import leaks
import pools
import shoal
from shoal.errors import PeerError
from shoal.launch.function.forkserver.forkserver import fork_server
from shoal.launch.function.run import run_outcomes

WIDTH, HEADS, VOCABULARY, LENGTH, LAYERS, ITEMS = 8, 4, 12, 6, 2, 8
TWO_BY_TWO = {"tensor": 2, "pipeline": 2, "data": 1}
CUBE = {"tensor": 2, "pipeline": 2, "data": 2}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.second_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            self.add_module(name, nn.Linear(WIDTH, WIDTH))
        self.fc1, self.fc2 = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        heads = [
            layer(y).view(*y.shape[:2], -1, WIDTH // HEADS).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        ]
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.o_proj(attended.transpose(1, 2).flatten(2))
        return x + self.fc2(F.gelu(self.fc1(self.second_norm(x))))


class GPT(nn.Module):
    """Its head is tied to its embedding, at the other end of the pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def text(step: int, items: int = ITEMS, device: str = "cpu") -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (items, LENGTH + 1), generator=generator).to(device)
    return tokens[:, :-1], tokens[:, 1:]


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build(device: str = "cpu") -> Any:
    torch.manual_seed(0)
    model = GPT().double().to(device)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01, eps=1e-4)
    return model, optimizer, [text(step, device=device) for step in range(20)], loss_fn


def verify(ranks: int, backend: str = "memory", steps: int = 4, **options: Any) -> None:
    options = {"micro_batches": 2, **options}
    report = shoal.verify(build, "hybrid", ranks, backend, steps, **options)
    assert report.equal, str(report)


@pytest.mark.parametrize(
    ("zero", "steps", "schedule"),
    [
        (0, 2, "1f1b"),
        (3, 2, "zero-bubble"),
        *(
            pytest.param(zero, 20, schedule, marks=pytest.mark.full)
            for zero in range(4)
            for schedule in ("1f1b", "zero-bubble")
        ),
    ],
)
def test_two_by_two_by_two(zero: int, steps: int, schedule: str) -> None:
    verify(8, steps=steps, zero=zero, schedule=schedule, **CUBE)


@pytest.mark.parametrize(
    ("ranks", "axes"),
    [
        (1, {}),
        (2, {"tensor": 2}),
        (2, {"pipeline": 2}),
        pytest.param(3, {"data": 3}, marks=pytest.mark.full),
        pytest.param(6, {"tensor": 2, "data": 3}, marks=pytest.mark.full),
        pytest.param(8, {"tensor": 4, "pipeline": 2}, marks=pytest.mark.full),
    ],
)
def test_some_axes_only(ranks: int, axes: dict[str, int]) -> None:
    verify(ranks, steps=3, **axes)


@pytest.mark.parametrize(
    "backend",
    ["shm", *(pytest.param(b, marks=pytest.mark.full) for b in ("gloo", "mpi"))],
)
def test_processes(backend: str) -> None:
    fork_server()
    leaks.baseline()
    verify(4, backend, steps=3, **TWO_BY_TWO)


# Clipping and accumulation ----------------------------------------------------------------


def clipped_and_accumulated(
    zero: int | None, device: str = "cpu", axes: dict[str, int] = CUBE
) -> tuple[list[float], dict[str, Tensor]]:
    """Two batches to a step, the first without synchronization; None for one process."""
    model, optimizer, _, _ = build(device)
    rank, size = 0, 1
    if zero is not None:
        options = {"micro_batches": 2, "zero": zero, **axes}
        model, optimizer = shoal.as_distributed(model, optimizer, strategy="hybrid", **options)
        rank, size = model.data_group.rank, model.data_group.size
    norms = []
    for step in range(4):
        for number in range(2):
            batch = text(2 * step + number, device=device)
            inputs, targets = (rows.chunk(size)[rank] for rows in batch)
            if zero is None:
                loss_fn(model(inputs), targets).backward()
            elif number == 0:
                with model.no_sync():
                    model.train_step(inputs, targets, loss_fn)
            else:
                model.train_step(inputs, targets, loss_fn)
        clip = nn.utils.clip_grad_norm_
        total = clip(model.parameters(), 0.1) if zero is None else model.clip_grad_norm_(0.1)
        norms.append(total.item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("zero", [0, pytest.param(3, marks=pytest.mark.full)])
def test_clipping_and_accumulation(zero: int) -> None:
    check_clipping_and_accumulation(zero, "cpu", CUBE, 8)


def check_clipping_and_accumulation(
    zero: int, device: str, axes: dict[str, int], ranks: int
) -> None:
    norms, expected = clipped_and_accumulated(None, device)
    results = pools.Team("memory", ranks).run(clipped_and_accumulated, zero, device, axes)
    for own_norms, state in results:
        assert own_norms == pytest.approx(norms, rel=1e-10), "what everybody has counts once"
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-10)


# Who holds what ---------------------------------------------------------------------------


def held() -> tuple[int, int, int]:
    model, optimizer, batches, _ = build()
    total = sum(p.numel() for p in model.parameters())
    model, optimizer = shoal.as_distributed(
        model, optimizer, strategy="hybrid", micro_batches=2, **TWO_BY_TWO
    )
    inputs, targets = batches[0]
    model.train_step(inputs, targets, loss_fn)
    optimizer.step()
    memory = shoal.world().stats().memory
    whole = optimizer.state_dict()["state"]
    return (
        total,
        memory["parameters"].current // 8,
        sum(s["exp_avg"].numel() for s in whole.values()),
    )


def test_each_rank_holds_its_part() -> None:
    results = shoal.run(held, 4, "memory")
    total = results[0][0]
    own = [parameters for _, parameters, _ in results]
    split = sum(own)
    assert max(own) < 0.4 * total, "a fourth, and the norms and biases that every rank has"
    assert total <= split < 1.25 * total
    assert all(state == total for _, _, state in results), "the optimizer's state is the whole's"


def move_to(axes: dict[str, int], state: Any) -> Any:
    """Goes on from another layout's state, and returns its own."""
    model, optimizer, batches, _ = build()
    model, optimizer = shoal.as_distributed(
        model, optimizer, strategy="hybrid", micro_batches=2, **axes
    )
    if state is not None:
        model.load_state_dict(state[0])
        optimizer.load_state_dict(state[1])
    rank, size = model.data_group.rank, model.data_group.size
    for number in range(2):
        step = number if state is None else 2 + number
        inputs, targets = (rows.chunk(size)[rank] for rows in batches[step])
        model.train_step(inputs, targets, loss_fn)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), optimizer.state_dict()


def test_states_move_between_layouts() -> None:
    first = shoal.run(move_to, 4, "memory", args=(TWO_BY_TWO, None))[0]
    moved = shoal.run(move_to, 2, "memory", args=({"tensor": 1, "data": 2}, first))[1]
    model, optimizer, batches, _ = build()
    for step in range(4):
        loss_fn(model(batches[step][0]), batches[step][1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(moved[0][name], value, rtol=1e-9, atol=1e-10)
    for number, state in optimizer.state_dict()["state"].items():
        torch.testing.assert_close(
            moved[1]["state"][number]["exp_avg"], state["exp_avg"], rtol=1e-8, atol=1e-10
        )


# What goes wrong --------------------------------------------------------------------------


def test_axes_that_do_not_fit() -> None:
    def wrap() -> None:
        model, _, _, _ = build()
        shoal.as_distributed(model, strategy="hybrid", tensor=2, pipeline=2)

    with pytest.raises(ValueError, match="must multiply to the 6 ranks"):
        shoal.run(wrap, 6, "memory")


def fail_in_a_stage() -> None:
    model, optimizer, batches, _ = build()
    model, optimizer = shoal.as_distributed(
        model, optimizer, strategy="hybrid", micro_batches=2, **TWO_BY_TWO
    )
    model.train_step(*batches[0], loss_fn)
    if shoal.world().rank == 3:
        model.module.blocks[1].register_forward_hook(lambda *_: 1 / 0)
    model.train_step(*batches[1], loss_fn)


def test_a_failure_in_one_rank_of_one_stage_reaches_all() -> None:
    outcomes = run_outcomes(fail_in_a_stage, (), 4, "memory", 20.0)
    assert isinstance(outcomes[3].error, ZeroDivisionError)
    for outcome in outcomes[:3]:
        assert isinstance(outcome.error, PeerError), outcome.traceback
        assert outcome.error.rank == 3
        assert "ZeroDivisionError" in outcome.error.reason


def predict() -> tuple[Tensor, Tensor]:
    model, _, batches, _ = build()
    with torch.no_grad():
        expected = model(batches[0][0])
    wrapped = shoal.as_distributed(model, strategy="hybrid", **TWO_BY_TWO)
    with wrapped.predicting():
        return expected, wrapped(batches[0][0])


def test_predictions_are_everywhere() -> None:
    for expected, found in shoal.run(predict, 4, "memory"):
        torch.testing.assert_close(found, expected)


class UnevenLayers(nn.Module):
    """Layers of a size that two ranks cannot share equally, so that each weighs them otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc3(torch.tanh(self.fc2(torch.tanh(self.fc1(x)))))


def test_all_ranks_cut_the_same_stages() -> None:
    def train(*, is_wrapped: bool) -> Tensor:
        torch.manual_seed(0)
        model: Any = UnevenLayers()
        optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
        x, y = torch.randn(8, 5), torch.randn(8, 3)
        if is_wrapped:
            model, optimizer = shoal.as_distributed(
                model, optimizer, strategy="hybrid", tensor=2, pipeline=2, micro_batches=2
            )
            model.train_step(x, y, F.mse_loss)
        else:
            F.mse_loss(model(x), y).backward()
        optimizer.step()
        return torch.cat([value.flatten() for value in model.state_dict().values()])

    wanted = train(is_wrapped=False)
    for found in shoal.run(lambda: train(is_wrapped=True), 4, "memory"):
        torch.testing.assert_close(found, wanted)
