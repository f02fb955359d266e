"""What a block's second call needs, and what makes it another one than the first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal

WIDTH = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Blocks one after the other; kinds of it differ in what they do."""

    kind: type[nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(self.kind() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return x


def train(kind: type[Net], strategy: str, **options: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = kind().double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = shoal.as_distributed(
        module, optimizer, strategy=strategy, min_group_bytes=200, **options
    )
    for step in range(3):
        torch.manual_seed(step)
        x = torch.randn(4, WIDTH, dtype=torch.double)
        model.train_step(x, x.flip(1), F.mse_loss)
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


def compare(kind: type[Net], strategy: str, policy: str, **options: Any) -> None:
    def both() -> None:
        plain = train(kind, strategy, **options)
        again = train(kind, strategy, activations=policy, **options)
        assert [name for name in plain if not torch.equal(plain[name], again[name])] == []

    shoal.run(both, 2, "memory")


policies = pytest.mark.parametrize("policy", ["full", "selective"])


class Scaled(Block):
    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        return super().forward(x * scale)


class Shared(Net):
    """Every block is given a parameter that is not its own."""

    kind = Scaled

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x, scale=self.scale)
        return x


@policies
@pytest.mark.parametrize("strategy", ["ddp", "zero3", "pipeline"])
def test_a_parameter_among_the_arguments(strategy: str, policy: str) -> None:
    compare(Shared, strategy, policy)


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_a_parameter_among_the_arguments_that_has_changed(strategy: str) -> None:
    def change() -> None:
        model = shoal.as_distributed(Shared(), strategy=strategy, activations="full")
        output = model(torch.ones(2, WIDTH))
        with torch.no_grad():
            model.module.scale.mul_(2)
        output.sum().backward()

    with pytest.raises(RuntimeError, match=r"needs the parameters of 'blocks\.\d' as they were"):
        shoal.run(change, 1, "memory")


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight  # type: ignore[union-attr]


@policies
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_blocks_of_two_stages_with_one_weight(schedule: str, policy: str) -> None:
    compare(Tied, "pipeline", policy, schedule=schedule, micro_batches=2)


class Twice(Net):
    """One block with several names."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = self.blocks[0]


@policies
@pytest.mark.parametrize("strategy", ["zero3", "tensor", "pipeline"])
def test_a_block_with_several_names(strategy: str, policy: str) -> None:
    compare(Twice, strategy, policy)


class Forces(Block):
    """Takes a gradient inside of its forward: it is called again before that has ended."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            place = x.detach().requires_grad_()
            (force,) = torch.autograd.grad(torch.tanh(self.up(place)).sum(), place)
        return super().forward(x + force)


class Physics(Net):
    kind = Forces


@policies
@pytest.mark.parametrize("strategy", ["ddp", "zero3", "tensor"])
def test_a_gradient_inside_of_forward(strategy: str, policy: str) -> None:
    compare(Physics, strategy, policy)


# What it finds, and what it leaves behind -----------------------------------------------------


class Dropping(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(x, 0.4, self.training))


class Dropped(Net):
    kind = Dropping


def gradients(kind: type[Net], policy: str | None, mode_in_backward: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = shoal.as_distributed(kind(), strategy="ddp", activations=policy, check_every=0)
    model.train(not mode_in_backward)
    output = model(torch.randn(4, WIDTH))
    model.train(mode_in_backward)
    output.square().mean().backward()
    return [each.grad for each in model.parameters()]


@policies
@pytest.mark.parametrize("mode_in_backward", [False, True])
def test_eval_between_forward_and_backward(mode_in_backward: bool, policy: str) -> None:
    plain, again = (
        shoal.run(gradients, 1, "memory", args=(Dropped, each, mode_in_backward))[0]
        for each in (None, policy)
    )
    assert all(map(torch.equal, plain, again))


class Mean(Block):
    """Has a loss of its own, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []
        self.num_calls, self.last = 0, torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.num_calls += 1
        self.last = y.square().mean()
        self.losses.append(self.last)
        return y


class WithLosses(Net):
    """All blocks append to one list, which is emptied before backward."""

    kind = Mean

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []
        for block in self.blocks:
            block.losses = self.losses

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        y = y + sum(self.losses) + sum(block.last for block in self.blocks)
        self.losses.clear()
        return y


@pytest.mark.parametrize(
    ("strategy", "policy"),
    [("ddp", "full"), ("zero3", "full"), ("zero3", "selective"), ("tensor", "partition")],
)
def test_a_second_call_leaves_nothing_behind(strategy: str, policy: str) -> None:
    options = {} if strategy != "tensor" else {"plan": {"*.up": "column", "*.down": "row"}}
    compare(WithLosses, strategy, policy, **options)


def counts_and_losses() -> list[int]:
    model = shoal.as_distributed(WithLosses(), strategy="ddp", activations="full")
    model(torch.ones(2, WIDTH)).sum().backward()
    return [model.module.blocks[0].num_calls, len(model.module.losses)]


def test_a_second_call_is_not_counted() -> None:
    assert shoal.run(counts_and_losses, 1, "memory") == [[1, 0]]


class Graph(Block):
    """Is given neighbours as a sparse matrix."""

    def forward(self, x: Tensor, neighbours: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(torch.sparse.mm(neighbours, x))


class GraphNet(Net):
    kind = Graph
    layout = torch.sparse_coo

    def forward(self, x: Tensor) -> Tensor:
        x, neighbours = self.enter(x), torch.ones(len(x), len(x), dtype=x.dtype).tril()
        for block in self.blocks:
            x = block(x, neighbours.to_sparse(layout=self.layout))
        return x


class CompressedGraphNet(GraphNet):
    layout = torch.sparse_csr


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("policy", ["full", "selective", "auto"])
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@pytest.mark.parametrize("kind", [GraphNet, CompressedGraphNet])
def test_sparse_arguments(kind: type[Net], strategy: str, policy: str) -> None:
    def both() -> None:
        options = {"memory": "1GB"} if policy == "auto" else {}
        plain, again = train(kind, strategy), train(kind, strategy, activations=policy, **options)
        assert [name for name in plain if not torch.equal(plain[name], again[name])] == []

    shoal.run(both, 2, "memory")


def freeze_in_between() -> None:
    model = shoal.as_distributed(Net(), strategy="ddp", activations="full")
    output = model(torch.ones(2, WIDTH))
    model.module.blocks[1].up.requires_grad_(False)
    output.sum().backward()


def test_freezing_between_forward_and_backward_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"'blocks\.1' as they were .* requires_grad_\(\)"):
        shoal.run(freeze_in_between, 1, "memory")


# Blocks that go by what nobody puts back ----------------------------------------------------------


class Counting(Block):
    num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return super().forward(x) / self.num_calls


class Drawing(Block):
    def __init__(self) -> None:
        super().__init__()
        self.generator: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.generator is None:
            self.generator = torch.Generator().manual_seed(1)
        return super().forward(x * torch.rand(x.shape, generator=self.generator))


@dataclass
class State:
    x: Tensor
    total: Any = 0.0


class Collecting(Block):
    def forward(self, state: State) -> State:  # type: ignore[override]
        state.total = state.total + state.x.detach().mean()
        return State(super().forward(state.x) * state.total, state.total)


class Counted(Net):
    kind = Counting


class Drawn(Net):
    kind = Drawing


class Collected(Net):
    kind = Collecting

    def forward(self, x: Tensor) -> Tensor:
        state = State(self.enter(x))
        for block in self.blocks:
            state = block(state)
        return state.x


@pytest.mark.parametrize("policy", ["full", "selective", "auto"])
@pytest.mark.parametrize("kind", [Counted, Drawn, Collected])
def test_another_result_is_an_error(kind: type[Net], policy: str) -> None:
    options = {"memory": "1GB"} if policy == "auto" else {}
    with pytest.raises(RuntimeError, match=r"block 'blocks\.\d' gave another result when backward"):
        shoal.run(lambda: train(kind, "zero3", activations=policy, **options), 2, "memory")


def test_what_auto_tries_is_not_counted() -> None:
    def first_forward() -> int:
        model = shoal.as_distributed(Counted(), strategy="ddp", activations="auto", memory="1GB")
        model(torch.ones(2, WIDTH))
        return model.module.blocks[0].num_calls

    assert shoal.run(first_forward, 1, "memory") == [1]


def test_how_often_results_are_compared() -> None:
    """A block that begins to differ later is found at the next comparison, if there is one."""

    def go(check_every: int) -> None:
        model = shoal.as_distributed(
            Counted(), strategy="ddp", activations="full", check_every=check_every
        )
        model(torch.ones(2, WIDTH)).sum().backward()

    shoal.run(go, 1, "memory", args=(0,))
    with pytest.raises(RuntimeError, match="gave another result"):
        shoal.run(go, 1, "memory", args=(100,))
