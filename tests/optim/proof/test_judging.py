"""What each of torch's optimizers needs to see at once: by the table, and by proof."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.optim import Kind, find_kind
from shoal.optim.proof.judging import judge
from shoal.optim.proof.proving import prove


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(3, 2)), nn.Parameter(torch.zeros(4, 4))]


ELEMENT_WISE: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "SGD maximizing": lambda p: torch.optim.SGD(p, lr=0.1, maximize=True, weight_decay=0.1),
    "SGD for each": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adam": lambda p: torch.optim.Adam(p),
    "Adam with amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "Adam fused": lambda p: torch.optim.Adam(p, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "AdamW fused": lambda p: torch.optim.AdamW(p, fused=True),
    "AdamW one by one": lambda p: torch.optim.AdamW(p, foreach=False),
    "AdamW with a tensor for lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
    "AdamW for graphs": lambda p: torch.optim.AdamW(p, torch.tensor(0.01), capturable=True),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "RMSprop": lambda p: torch.optim.RMSprop(p),
    "RMSprop centered": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5),
    "Adagrad": lambda p: torch.optim.Adagrad(p),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Rprop": lambda p: torch.optim.Rprop(p),
    "ASGD": lambda p: torch.optim.ASGD(p),
}
PER_PARAMETER: dict[str, Callable[[Any], Optimizer]] = {
    "Adafactor": lambda p: torch.optim.Adafactor(p),
    "Muon": lambda p: torch.optim.Muon(p),
}
GLOBAL: dict[str, Callable[[Any], Optimizer]] = {
    "LBFGS": lambda p: torch.optim.LBFGS(p),
    "SparseAdam": lambda p: torch.optim.SparseAdam(p),
}
ZOO = [
    *((name, make, Kind.ELEMENT_WISE) for name, make in ELEMENT_WISE.items()),
    *((name, make, Kind.PER_PARAMETER) for name, make in PER_PARAMETER.items()),
    *((name, make, Kind.GLOBAL) for name, make in GLOBAL.items()),
]


@pytest.mark.parametrize(("name", "make", "kind"), ZOO, ids=[name for name, _, _ in ZOO])
def test_kinds_of_torch_s_optimizers(
    name: str, make: Callable[[Any], Optimizer], kind: Kind
) -> None:
    assert find_kind(make(parameters())) is kind


def _proved(optimizer: Optimizer) -> Kind:
    """As if no table knew it."""
    found = [prove(optimizer, group, group["params"]) for group in optimizer.param_groups]
    return max((each.kind for each in found), key=list(Kind).index)


# A proof finds these coarser than they are. Adafactor decides by the norm of the parameter it
# steps; the others cannot be stepped by themselves.
UNPROVED = {"Adafactor": Kind.GLOBAL, "LBFGS": Kind.GLOBAL, "SparseAdam": Kind.GLOBAL}


@pytest.mark.parametrize(("name", "make", "kind"), ZOO, ids=[name for name, _, _ in ZOO])
def test_the_table_says_what_a_proof_finds(
    name: str, make: Callable[[Any], Optimizer], kind: Kind
) -> None:
    assert _proved(make(parameters())) is UNPROVED.get(name, kind)


GRID: dict[Callable[..., Optimizer], list[dict[str, Any]]] = {
    torch.optim.SGD: [{"momentum": 0.9, "nesterov": True}, {"fused": True}, {"dampening": 0.1}],
    torch.optim.Adam: [{"amsgrad": True}, {"fused": True, "amsgrad": True}, {"lr": "tensor"}],
    torch.optim.AdamW: [{"amsgrad": True, "foreach": False}, {"fused": True}, {"lr": "tensor"}],
    torch.optim.NAdam: [{"decoupled_weight_decay": True}],
    torch.optim.RAdam: [{"decoupled_weight_decay": True}],
    torch.optim.RMSprop: [{"centered": True, "momentum": 0.9}],
    torch.optim.Adagrad: [{"lr_decay": 0.1}, {"fused": True}],
    torch.optim.Adadelta: [{}],
    torch.optim.Adamax: [{}],
    torch.optim.ASGD: [{"lambd": 0.1}],
    torch.optim.Rprop: [{}],
}
COMMON: list[dict[str, Any]] = [
    {},
    {"foreach": True},
    {"foreach": False, "maximize": True},
    {"weight_decay": 0.1},
]


@pytest.mark.parametrize("make", GRID)
def test_options_make_no_optimizer_of_torch_coarser(make: Callable[..., Optimizer]) -> None:
    """Not tried: ``capturable``, for GPUs, and ``differentiable``, which steps no parameters."""
    known = inspect.signature(make).parameters
    for special in GRID[make]:
        for common in COMMON:
            options = {k: v for k, v in {**common, **special}.items() if k in known}
            if options.get("fused") and options.get("foreach"):
                continue
            if options.get("lr") == "tensor":
                options["lr"] = torch.tensor(0.01)
                if options.get("foreach"):
                    continue  # only with capturable
            assert _proved(make(parameters(), **options)) is Kind.ELEMENT_WISE, options


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtypes_make_no_difference(dtype: torch.dtype) -> None:
    own = [nn.Parameter(torch.zeros(3, 2, dtype=dtype)), nn.Parameter(torch.zeros(4, dtype=dtype))]
    assert _proved(torch.optim.AdamW(own)) is Kind.ELEMENT_WISE


def test_an_option_that_the_constructor_hides_counts() -> None:
    class Hidden(Normalized):
        """Takes its option under another name, and keeps it outside of the groups."""

        def __init__(self, params: Any, **options: Any) -> None:
            super().__init__(params)
            self._couples = options.get("coupled", False)

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    p.sub_(p.grad.norm() * 0.1 if self._couples else p.grad)

    assert find_kind(Hidden(parameters())) is Kind.ELEMENT_WISE
    assert find_kind(Hidden(parameters(), coupled=True)) is Kind.PER_PARAMETER


def test_every_optimizer_of_torch_is_tried() -> None:
    found = {
        name
        for name, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer
    }
    tried = {name.split()[0] for name, _, _ in ZOO}
    assert found <= tried


def test_groups_count_with_their_own_settings() -> None:
    first, second = parameters()
    groups = [{"params": [first], "lr": 0.1}, {"params": [second], "momentum": 0.9}]
    assert find_kind(torch.optim.SGD(groups, lr=0.2)) is Kind.ELEMENT_WISE


class Normalized(Optimizer):
    """Divides by the norm of all gradients: couples everything."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            gradients = [p.grad for p in group["params"] if p.grad is not None]
            norm = torch.stack([g.norm() for g in gradients]).norm()
            for p in group["params"]:
                p.sub_(p.grad / norm, alpha=group["lr"])


class LayerNormalized(Normalized):
    """Divides by the norm of the parameter's own gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad / p.grad.norm(), alpha=group["lr"])


class Sign(Normalized):
    """Looks at nothing but the element."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad.sign(), alpha=group["lr"])


class LateCoupling(Normalized):
    """Couples parameters only from its third step on."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count = getattr(self, "count", 0) + 1
        every = [p for group in self.param_groups for p in group["params"]]
        factor: float | Tensor = sum(p.grad.sum() for p in every) if self.count > 2 else 1.0
        for p in every:
            p.sub_(p.grad * factor)


class Demanding(Normalized):
    """Cannot be built from its settings, so it cannot be tried."""

    def __init__(self, params: Any, secret: object) -> None:
        super().__init__(params)
        self.secret = secret


OWN = [
    (Sign, Kind.ELEMENT_WISE),
    (LayerNormalized, Kind.PER_PARAMETER),
    (Normalized, Kind.GLOBAL),
    (LateCoupling, Kind.GLOBAL),
]


@pytest.mark.parametrize(("make", "kind"), OWN)
def test_kinds_of_one_s_own_optimizers(make: Any, kind: Kind) -> None:
    assert find_kind(make(parameters())) is kind


def test_in_doubt_it_is_global() -> None:
    assert find_kind(Demanding(parameters(), object())) is Kind.GLOBAL


def test_trying_leaves_no_trace() -> None:
    state = torch.get_rng_state()
    mine = parameters()
    optimizer = torch.optim.AdamW(mine, lr=0.1)
    find_kind(optimizer)
    assert torch.equal(torch.get_rng_state(), state)
    assert not optimizer.state
    assert all(p.eq(0).all() and p.grad is None for p in mine)


def test_a_kind_is_known_by_its_name() -> None:
    assert [kind.value for kind in Kind] == ["element-wise", "per-parameter", "global"]
    assert Kind("per-parameter") is Kind.PER_PARAMETER


class Projected(torch.optim.SGD):
    """Takes a key of its groups that its constructor does not know, and then looks at shapes."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if "rank" in group and parameter.grad is not None:
                    parameter.grad = parameter.grad / parameter.grad.norm()
        return super().step(closure)


def test_keys_that_a_group_has_of_its_own_are_part_of_the_proof() -> None:
    parameter = nn.Parameter(torch.zeros(3, 4))
    assert find_kind(Projected([parameter], lr=0.1)) is Kind.ELEMENT_WISE
    group = {"params": [parameter], "rank": 2, "step": 7}
    assert find_kind(Projected([group], lr=0.1)) is Kind.PER_PARAMETER


class DrawsForLargeOnes(torch.optim.SGD):
    """Its small copy never draws; a number of the data decides."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and float(parameter.grad.abs().max()) > 1e6:
                    parameter.data += torch.randn(parameter.shape)
        return super().step(closure)


def test_what_was_not_seen_to_draw_may_draw() -> None:
    judgement = judge(DrawsForLargeOnes([nn.Parameter(torch.zeros(3, 4))], lr=0.1))
    assert judgement.kind is Kind.GLOBAL
    assert not judgement.draws
    assert judgement.may_draw
    assert not judge(torch.optim.AdamW([nn.Parameter(torch.zeros(3))])).may_draw
