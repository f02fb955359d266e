"""Models, optimizers and steps for tests of checkpoints; the same on every rank by construction."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal

STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "fsdp")
ITEMS = 120  # divides by all world sizes that are tried


class Net(nn.Module):
    """Odd sizes, a tie, buffers, a scalar, an empty, a frozen and an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(7, 13)
        self.norm = nn.LayerNorm(13)
        self.middle = nn.Linear(13, 7)
        self.exit = nn.Linear(7, 13, bias=False)
        self.exit.weight = self.entry.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(3, 0))
        self.unused = nn.Parameter(torch.ones(5))
        self.frozen = nn.Parameter(torch.ones(13), requires_grad=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(3, 2).T)
        self.register_buffer("passing", torch.ones(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        x = torch.tanh(self.norm(self.entry(x)) * self.frozen)
        return self.exit(torch.tanh(self.middle(x))) * self.scale


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups with settings of their own; and one without parameters."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 0.02}]
    return torch.optim.AdamW([*groups, {"params": [], "lr": 0.5}], lr=0.01, eps=1e-3)


def build(
    make_optimizer: Callable[[nn.Module], Any] = adamw, make_model: Callable[[], nn.Module] = Net
) -> tuple[nn.Module, Any]:
    """A plain model in double precision, and its optimizer."""
    torch.manual_seed(3)
    model = make_model().double()
    return model, make_optimizer(model)


def wrap(strategy: str, model: nn.Module, optimizer: Any, **options: Any) -> Any:
    """Under a strategy; "plain" for none."""
    if strategy == "plain":
        return model, optimizer
    options.setdefault("min_group_bytes", 400)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "LBFGS may couple")
        return shoal.as_distributed(model, optimizer, strategy=strategy, **options)


def train(model: Any, optimizer: Any, steps: Sequence[int]) -> None:
    """Some steps on global batches, of which each rank takes its part."""
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    dtype = next(model.parameters()).dtype
    for step in steps:
        numbers = torch.randn(ITEMS, 20, generator=torch.Generator().manual_seed(step)).double()
        if isinstance(model, shoal.strategies.ShardedModel):
            world = shoal.world()
            numbers = numbers.chunk(world.size)[world.rank]
        numbers = numbers if dtype is torch.float64 else numbers.to(torch.float32)
        loss = F.mse_loss(model(numbers[:, :7]), numbers[:, 7:])
        loss.backward()
        for each in optimizers:
            each.step()
            each.zero_grad()


def state(model: Any, optimizer: Any = None) -> dict[str, Any]:
    """All of it, full, in one flat dict that can be compared."""
    flat: dict[str, Any] = {f"model/{k}": value for k, value in model.state_dict().items()}
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    for number, each in enumerate(optimizers if optimizer is not None else []):
        content = each.state_dict()
        for which, own in content["state"].items():
            flat |= {f"{number}/{which}/{key}": value for key, value in own.items()}
        for which, group in enumerate(content["param_groups"]):
            flat |= {f"{number}/group {which}/{key}": value for key, value in group.items()}
    return copy.deepcopy(flat)


def assert_same(left: dict[str, Any], right: dict[str, Any], tolerance: float = 0.0) -> None:
    """Equal to the last bit, or within a tolerance."""
    assert left.keys() == right.keys(), left.keys() ^ right.keys()
    for key, value in left.items():
        other = right[key]
        if isinstance(value, Tensor):
            assert value.dtype == other.dtype, key
            assert value.shape == other.shape, key
            if tolerance:
                assert torch.allclose(value, other, rtol=tolerance, atol=tolerance), key
            else:
                assert torch.equal(value, other), key
        elif isinstance(value, list):
            pairs = zip(value, other, strict=True)
            for place, (a, b) in enumerate(pairs):
                assert_same({f"{key}/{place}": a}, {f"{key}/{place}": b}, tolerance)
        else:
            assert value == other, key


def on_ranks(fn: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    """As threads."""
    return shoal.run(fn, ranks, "memory", args=args, timeout=30)


def train_and_save(path: Path, strategy: str, steps: Sequence[int], **options: Any) -> Any:
    """Returns the state that was saved."""
    model, optimizer = wrap(strategy, *build())
    train(model, optimizer, steps)
    shoal.save(path, model, optimizer, step=len(steps), extra={"steps": list(steps)}, **options)
    return state(model, optimizer)


def load_and_train(path: Path, strategy: str, steps: Sequence[int], **options: Any) -> Any:
    """Returns the state that was loaded, and the one after some more steps."""
    model, optimizer = wrap(strategy, *build())
    with torch.no_grad():
        for group in model.parameters() if strategy == "plain" else ():
            group.fill_(9)
    shoal.load(path, model, optimizer, **options)
    loaded = state(model, optimizer)
    train(model, optimizer, steps)
    return loaded, state(model, optimizer)
