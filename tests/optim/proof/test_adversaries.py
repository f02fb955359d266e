"""Optimizers that look harmless: training with each is right, or refused."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import leaks
import shoal
from shoal.errors import ShoalError
from shoal.launch.function.forkserver.forkserver import fork_server
from shoal.optim import Kind, find_kind
from shoal.optim.proof.judging import judge

pytestmark = pytest.mark.filterwarnings("ignore:.*may couple any of its parameters")


class Own(Optimizer):
    """Gradient descent, with something of its own for each parameter."""

    def __init__(self, params: Any, lr: Any = 0.01) -> None:
        super().__init__(params, {"lr": lr})
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        self.prepare()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.move(p, p.grad, group["lr"])

    def every(self) -> Iterator[nn.Parameter]:
        return (p for group in self.param_groups for p in group["params"] if p.grad is not None)

    def prepare(self) -> None:
        """Before any parameter moves."""

    def move(self, p: nn.Parameter, gradient: Tensor, lr: Any) -> None:
        p.sub_(gradient * lr)


class CoupledAboveThreshold(Own):
    def prepare(self) -> None:
        norm = torch.stack([p.grad.norm() for p in self.every()]).norm()
        self.factor = torch.where(norm > 50, 50 / norm, torch.ones(()))

    def move(self, p: nn.Parameter, gradient: Tensor, lr: Any) -> None:
        p.sub_(gradient * self.factor * lr)


class LearnsItsRate(Own):
    """As Prodigy: a number of all parameters, kept as a hyperparameter."""

    def prepare(self) -> None:
        size = sum(p.grad.abs().sum().item() for p in self.every())
        for group in self.param_groups:
            group["d"] = max(group.get("d", 0.5), min(size, 2.0))

    def move(self, p: nn.Parameter, gradient: Tensor, lr: Any) -> None:
        p.sub_(gradient * (lr * self.param_groups[0]["d"]))


class Clips(Own):
    def prepare(self) -> None:
        nn.utils.clip_grad_norm_(list(self.every()), 1.0)


class BranchesLate(Own):
    """Not at the rate that the probe takes."""

    def prepare(self) -> None:
        if self.count == 5 and self.param_groups[0]["lr"] == 0.02:
            total = sum(p.grad.sum() for p in self.every())
            for p in self.every():
                p.sub_(total * 1e-3)


class WritesThroughNumpy(Own):
    def move(self, p: nn.Parameter, gradient: Tensor, lr: Any) -> None:
        values = p.detach().numpy()
        values -= lr * gradient.numpy() / (1 + abs(gradient.numpy()).max())


class FactorsBySize(Own):
    def move(self, p: nn.Parameter, gradient: Tensor, lr: Any) -> None:
        if p.dim() > 1 and min(p.shape) >= 32:
            gradient = gradient / (gradient.abs().mean(0, keepdim=True) + 1e-3)
        p.sub_(gradient * lr)


class ClippedByItem(Own):
    """Divided by its root mean square where that is large."""

    def move(self, p: nn.Parameter, gradient: Tensor, lr: Any) -> None:
        state = self.state[p]
        if not state:
            state["v"], state["t"] = torch.zeros_like(p), 0
        state["t"] += 1
        state["v"].mul_(0.99).addcmul_(gradient, gradient, value=0.01)
        update = gradient / ((state["v"] / (1 - 0.99 ** state["t"])).sqrt() + 1e-8)
        update.div_(max(1.0, float(update.pow(2).mean().sqrt()) / 1.5))
        p.sub_(update * lr)


class ClippedInTensors(Own):
    def move(self, p: nn.Parameter, gradient: Tensor, lr: Any) -> None:
        p.sub_(gradient / gradient.pow(2).mean().sqrt().clamp(min=1.5) * lr)


class MasksByPlace(Own):
    def move(self, p: nn.Parameter, gradient: Tensor, lr: Any) -> None:
        mask = torch.ones_like(p)
        mask.select(0, 0).zero_()
        p.sub_(gradient * mask * lr)


class AddsUpAlong(Own):
    def move(self, p: nn.Parameter, gradient: Tensor, lr: Any) -> None:
        p.sub_(gradient.cumsum(0) * lr)


class CountsParameters(Own):
    def move(self, p: nn.Parameter, gradient: Tensor, lr: Any) -> None:
        p.sub_(gradient * (lr / len(list(self.every()))))


class CountsElements(Own):
    def prepare(self) -> None:
        self.total = sum(p.numel() for p in self.every())

    def move(self, p: nn.Parameter, gradient: Tensor, lr: Any) -> None:
        p.sub_(gradient * (lr / self.total))


class CountsLate(Own):
    """As `CountsParameters`, once it has warmed up; of a number that counts, no operation tells."""

    def move(self, p: nn.Parameter, gradient: Tensor, lr: Any) -> None:
        p.sub_(gradient * (lr / (len(list(self.every())) if self.count > 4 else 1)))


class KeepsAside(Own):
    """Its momentum is not in the state, so it is not cut where parameters are."""

    def move(self, p: nn.Parameter, gradient: Tensor, lr: Any) -> None:
        momenta = vars(self).setdefault("momenta", {})
        if p not in momenta:
            momenta[p] = torch.zeros_like(p)
        p.sub_(momenta[p].mul_(0.9).add_(gradient) * lr)


class KeepsList(Own):
    def __init__(self, params: Any, lr: Any = 0.01) -> None:
        super().__init__(params, lr)
        self.momenta = [torch.zeros_like(p) for p in self.param_groups[0]["params"]]

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for p, own in zip(self.param_groups[0]["params"], self.momenta, strict=True):
                if p.grad is not None:
                    p.sub_(own.mul_(0.9).add_(p.grad) * 0.01)


class KeepsForLater(Own):
    """Another method of its own may look at that."""

    def move(self, p: nn.Parameter, gradient: Tensor, lr: Any) -> None:
        p.sub_(gradient * lr)
        vars(self).setdefault("seen", {})[p] = gradient * 2


class Momentum:
    def __init__(self, like: Tensor) -> None:
        self.value = torch.zeros_like(like)


class KeepsInObject(Own):
    """Where parameters are not cut, that is as good as a tensor in the state."""

    def move(self, p: nn.Parameter, gradient: Tensor, lr: Any) -> None:
        own = self.state[p].setdefault("momentum", Momentum(p)).value
        p.sub_(own.mul_(0.9).add_(gradient) * lr)


class KeepsInGroup(Own):
    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                like = [torch.zeros_like(p) for p in group["params"]]
                for p, own in zip(group["params"], group.setdefault("like", like), strict=True):
                    if p.grad is not None:
                        p.sub_(own.mul_(0.9).add_(p.grad) * 0.01)


class KeepsInClosure(Own):
    """No attribute of the object leads to what it keeps."""

    def __init__(self, params: Any, lr: Any = 0.01) -> None:
        super().__init__(params, lr)
        momenta: dict[nn.Parameter, Tensor] = {}

        def move(p: nn.Parameter, gradient: Tensor) -> Tensor:
            momenta[p] = momenta[p] * 0.9 + gradient if p in momenta else gradient.clone()
            return momenta[p]

        self.momentum = move

    def move(self, p: nn.Parameter, gradient: Tensor, lr: Any) -> None:
        p.sub_(self.momentum(p, gradient) * lr)


def patched(params: Any) -> Optimizer:
    """What is known of a class does not hold for an object whose step was replaced."""
    optimizer = AdamW(params)
    step = optimizer.step

    def clip_and_step(closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 0.1)
        return step(closure)

    optimizer.step = clip_and_step  # type: ignore[method-assign]
    return optimizer


def scaled_by_size(gradient: Tensor) -> Tensor:
    return gradient / gradient.numel()


with warnings.catch_warnings():  # it is deprecated, and in use
    warnings.simplefilter("ignore")
    compiled = torch.jit.script(scaled_by_size)


class CountsUnseen(Own):
    """Modes see no look at a shape from inside of a compiled function."""

    def move(self, p: nn.Parameter, gradient: Tensor, lr: Any) -> None:
        p.sub_(compiled(gradient) * lr)


class ReplacesMemory(Own):
    def move(self, p: nn.Parameter, gradient: Tensor, lr: Any) -> None:
        p.data = p.data - gradient * lr


class ReplacesGradients(Own):
    """What users see of them after the step, and what the next backward adds to."""

    def move(self, p: nn.Parameter, gradient: Tensor, lr: Any) -> None:
        p.grad = gradient + p * 0.1
        p.sub_(p.grad * lr)


class ForgetsGradients(Own):
    def move(self, p: nn.Parameter, gradient: Tensor, lr: Any) -> None:
        p.sub_(gradient * lr)
        p.grad = None


class Langevin(Own):
    def move(self, p: nn.Parameter, gradient: Tensor, lr: Any) -> None:
        p.sub_((gradient + torch.randn_like(p)) * lr)


class DrawsForNobody(Own):
    def move(self, p: nn.Parameter, gradient: Tensor, lr: Any) -> None:
        p.sub_((gradient + torch.randn(p.shape)) * lr)


class DrawsWithPython(Own):
    def move(self, p: nn.Parameter, gradient: Tensor, lr: Any) -> None:
        p.sub_(gradient * (lr * random.random()))


class SharesScratch(Own):
    """What one parameter leaves in a buffer moves the next."""

    def move(self, p: nn.Parameter, gradient: Tensor, lr: Any) -> None:
        self.scratch = gradient.sum() + getattr(self, "scratch", torch.zeros(())) * 0.5
        p.sub_(gradient * lr).sub_(self.scratch * 1e-6)


class OwnStep(AdamW):
    def step(self, closure: Any = None) -> None:
        super().step()
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.clamp_(-1, 1)


class Centred(AdamW):
    """Moves the mean of each parameter to zero."""

    def step(self, closure: Any = None) -> None:
        super().step()
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.sub_(p.mean() * 0.1)


REFUSED = "refused"
ADVERSARIES: list[tuple[Callable[..., Optimizer], Kind, str]] = [
    (CoupledAboveThreshold, Kind.GLOBAL, "`stack` combines data of several parameters"),
    (LearnsItsRate, Kind.GLOBAL, "`item` takes a number"),
    (Clips, Kind.GLOBAL, "several parameters"),
    (partial(BranchesLate, lr=0.02), Kind.ELEMENT_WISE, REFUSED),
    (WritesThroughNumpy, Kind.GLOBAL, "`numpy` takes data"),
    (FactorsBySize, Kind.PER_PARAMETER, "`dim` looks at the shape"),
    (ClippedByItem, Kind.GLOBAL, "`item` takes a number"),
    (ClippedInTensors, Kind.PER_PARAMETER, "`mean` combines elements"),
    (MasksByPlace, Kind.PER_PARAMETER, "`mul` combines elements"),
    (AddsUpAlong, Kind.PER_PARAMETER, "`cumsum` combines elements"),
    (CountsParameters, Kind.GLOBAL, "each parameter on its own"),
    (CountsElements, Kind.GLOBAL, "each parameter on its own"),
    (CountsLate, Kind.GLOBAL, "each parameter on its own"),
    (KeepsAside, Kind.GLOBAL, "`mul_` takes data of a parameter that was kept outside"),
    (KeepsList, Kind.GLOBAL, "`mul_` takes data of a parameter that was kept outside"),
    (KeepsInGroup, Kind.GLOBAL, "`mul_` takes data of a parameter that was kept outside"),
    (KeepsInClosure, Kind.GLOBAL, "`mul` takes data of a parameter that was kept outside"),
    (KeepsInObject, Kind.PER_PARAMETER, "keeps data of a parameter in an object"),
    (KeepsForLater, Kind.GLOBAL, "keeps data of parameters in `seen`, outside of its state"),
    (patched, Kind.GLOBAL, "`step` was replaced"),
    (CountsUnseen, Kind.PER_PARAMETER, "cut into pieces"),
    (ReplacesMemory, Kind.GLOBAL, "other memory"),
    (ReplacesGradients, Kind.ELEMENT_WISE, "nothing"),
    (ForgetsGradients, Kind.GLOBAL, "leaves parameters without their gradients"),
    (Langevin, Kind.PER_PARAMETER, "`randn_like` draws"),
    (DrawsForNobody, Kind.GLOBAL, "`randn` draws"),
    (DrawsWithPython, Kind.GLOBAL, "Python or numpy"),
    (SharesScratch, Kind.GLOBAL, "`add` combines data of several parameters"),
    (OwnStep, Kind.ELEMENT_WISE, "nothing"),
    (partial(OwnStep, fused=True), Kind.ELEMENT_WISE, "nothing"),
    (partial(OwnStep, foreach=True, amsgrad=True), Kind.ELEMENT_WISE, "nothing"),
    (partial(OwnStep, lr=torch.tensor(0.01), foreach=False), Kind.ELEMENT_WISE, "nothing"),
    (Centred, Kind.PER_PARAMETER, "`mean` combines elements"),
]
NAMES = [
    getattr(make, "__name__", str(getattr(make, "keywords", ""))) for make, _, _ in ADVERSARIES
]


class SometimesWide(nn.Module):
    """Has a layer that only every third batch leaves out, in the middle of the others' memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(5, 7), nn.Linear(5, 7), nn.Linear(7, 2)

    def forward(self, x: Tensor, is_wide: bool) -> Tensor:
        return self.last(self.first(x) + self.second(x) if is_wide else self.first(x))


def train_sometimes_wide(make: Callable[..., Optimizer], strategy: str | None) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model: Any = SometimesWide().double()
    optimizer: Any = make(model.parameters())
    if strategy is not None:
        model, optimizer = shoal.as_distributed(model, optimizer, strategy=strategy)
    for step in range(6):
        batch = torch.arange(30.0).view(6, 5).double().sin() + step
        optimizer.zero_grad()
        model(batch, step % 3 != 1).square().mean().backward()
        optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.filterwarnings("ignore:.*identical inputs")
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@pytest.mark.parametrize("make", [KeepsAside, KeepsInGroup, KeepsInClosure, KeepsInObject])
def test_what_is_kept_outside_of_the_state_survives_a_parameter_that_comes_and_goes(
    make: Callable[..., Optimizer], strategy: str
) -> None:
    expected = train_sometimes_wide(make, None)
    for state in shoal.run(train_sometimes_wide, 2, "memory", (make, strategy)):
        for name, value in state.items():
            assert torch.allclose(value, expected[name], rtol=0, atol=1e-10), name


def build(make: Callable[..., Optimizer]) -> Any:
    """Gradients of usual size for three steps and far larger ones from then on."""
    model = nn.Sequential(nn.Linear(5, 33), nn.ReLU(), nn.Linear(33, 34), nn.Linear(34, 2))
    scales = (1, 1, 1, 40, 40, 1)
    batches = [(scale * torch.randn(6, 5), torch.randn(6, 2)) for scale in scales]
    return model, make(model.parameters()), batches, nn.functional.mse_loss


@pytest.mark.parametrize(("make", "kind", "reason"), ADVERSARIES, ids=NAMES)
def test_kind_and_why(make: Callable[..., Optimizer], kind: Kind, reason: str) -> None:
    _, optimizer, _, _ = build(make)
    judgement = judge(optimizer)
    assert find_kind(optimizer) is judgement.kind is kind
    assert reason == REFUSED or reason in judgement.reason
    if reason.startswith("`") and "replaced" not in reason:
        assert "test_adversaries.py:" in judgement.reason or "clip_grad.py:" in judgement.reason


@pytest.mark.parametrize(("strategy", "ranks"), [("ddp", 2), ("zero2", 3), ("zero3", 2)])
@pytest.mark.parametrize(("make", "kind", "reason"), ADVERSARIES, ids=NAMES)
def test_training_is_right_or_refused(
    make: Callable[..., Optimizer], kind: Kind, reason: str, strategy: str, ranks: int
) -> None:
    def verify() -> Any:
        return shoal.verify(
            partial(build, make), strategy=strategy, ranks=ranks, steps=6, reference="split"
        )

    if reason == REFUSED:
        with pytest.raises(ShoalError, match="steps as element-wise"):
            verify()
    else:
        verify().raise_if_different()


@pytest.fixture(scope="module")
def forkserver() -> None:
    """It serves the whole run of the tests."""
    fork_server()
    leaks.baseline()


OVER_PROCESSES = (CoupledAboveThreshold, ClippedByItem, CountsLate, KeepsAside, Langevin)


@pytest.mark.parametrize(
    ("backend", "strategy", "ranks"), [("shm", "zero2", 3), ("gloo", "zero3", 2)]
)
@pytest.mark.parametrize("make", OVER_PROCESSES)
@pytest.mark.usefixtures("forkserver")
def test_training_is_right_over_processes(
    make: Callable[..., Optimizer], backend: str, strategy: str, ranks: int
) -> None:
    shoal.verify(
        partial(build, make), strategy, ranks, backend, steps=6, reference="split"
    ).raise_if_different()
