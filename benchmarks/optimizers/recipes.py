"""How each optimizer is built: most from parameters and a rate, some in a way of their own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

Recipe = Callable[[type[Optimizer], nn.Module, dict[str, Any]], "Optimizer | list[Optimizer]"]

UNUSABLE = {
    "po.AdaHessian": "needs backward(create_graph=True)",
    "po.AdaLOMO": "steps in backward, and has no step()",
    "po.AliG": "needs a closure that computes nothing",
    "po.DeMo": "communicates by itself",
    "po.DistributedMuon": "communicates by itself",
    "po.GSAM": "needs the batch before each step",
    "po.LOMO": "steps in backward, and has no step()",
    "po.PCGrad": "needs a loss for each task",
    "po.SafeFP16Optimizer": "needs a model in float16, and backward() of its own",
    "po.SophiaH": "needs backward(create_graph=True)",
    "timm.Adahessian": "needs backward(create_graph=True)",
    "torch.SparseAdam": "needs sparse gradients",
}
"""What a training loop of forward, backward and step() cannot use, and why."""


def build_optimizer(
    name: str, cls: type[Optimizer], model: nn.Module, options: dict[str, Any]
) -> list[Optimizer]:
    """One over all parameters; two where the one in question takes matrices only."""
    built = _RECIPES.get(name, _usual)(cls, model, options)
    return built if isinstance(built, list) else [built]


def known_options(cls: type[Optimizer]) -> list[str]:
    """What its constructor takes by name."""
    return list(inspect.signature(cls.__init__).parameters)


def _usual(cls: type[Optimizer], model: nn.Module, options: dict[str, Any]) -> Optimizer:
    if "lr" not in known_options(cls):
        options.pop("lr")
    return cls(model.parameters(), **options)


def _matrices_only(
    cls: type[Optimizer], model: nn.Module, options: dict[str, Any]
) -> list[Optimizer]:
    matrices, others = _divided(model)
    return [cls(matrices, **options), torch.optim.SGD(others, lr=options["lr"])]


def _marked_groups(cls: type[Optimizer], model: nn.Module, options: dict[str, Any]) -> Optimizer:
    matrices, others = _divided(model)
    groups = [{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}]
    return cls(groups, **options)  # type: ignore[arg-type]


def _low_rank(cls: type[Optimizer], model: nn.Module, options: dict[str, Any]) -> Optimizer:
    matrices, others = _divided(model)
    projected = {"rank": 4, "update_proj_gap": 2, "scale": 1.0, "projection_type": "std"}
    return cls([{"params": matrices, **projected}, {"params": others}], **options)


def _of_the_model(cls: type[Optimizer], model: nn.Module, options: dict[str, Any]) -> Optimizer:
    return cls(model, **options)  # type: ignore[arg-type]


def _around_adam(**more: Any) -> Recipe:
    def build(cls: type[Optimizer], model: nn.Module, options: dict[str, Any]) -> Optimizer:
        inner = torch.optim.AdamW(model.parameters(), lr=options.pop("lr"))
        return cls(inner, **options, **more)  # type: ignore[arg-type]

    return build


def _in_training(recipe: Recipe) -> Recipe:
    """For those that keep two sets of weights, and are told which to work with."""

    def build(cls: type[Optimizer], model: nn.Module, options: dict[str, Any]) -> Optimizer:
        optimizer: Any = recipe(cls, model, options)
        optimizer.train()
        return optimizer

    return build


def _with(**more: Any) -> Recipe:
    def build(cls: type[Optimizer], model: nn.Module, options: dict[str, Any]) -> Optimizer:
        return cls(model.parameters(), **options, **more)

    return build


def _scaled_by_itself(**more: Any) -> Recipe:
    """For those whose rate is a factor of what they find out, and who begin with very little."""

    def build(cls: type[Optimizer], model: nn.Module, options: dict[str, Any]) -> Optimizer:
        return cls(model.parameters(), **{**options, "lr": 100 * options["lr"]}, **more)

    return build


def _with_closure(**more: Any) -> Recipe:
    """For those that say that a closure may be left out, and then ask for it."""

    def build(cls: type[Optimizer], model: nn.Module, options: dict[str, Any]) -> Optimizer:
        def step(self: Optimizer, closure: Callable[[], Any]) -> Any:
            return cls.step(self, closure)

        if "model" in known_options(cls):
            options = {**options, "model": model}
        names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "step": step}
        return type(cls.__name__, (cls,), names)(params=model.parameters(), **options, **more)

    return build


def _divided(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    parameters = list(model.parameters())
    return [p for p in parameters if p.dim() == 2], [p for p in parameters if p.dim() != 2]


_SAM = _with_closure(base_optimizer=torch.optim.SGD)
_RECIPES: dict[str, Recipe] = {
    "po.APOLLO": _low_rank,
    "po.AdaGO": _marked_groups,
    "po.AdaDelta": _scaled_by_itself(),
    "po.AdaMuon": _marked_groups,
    "po.AdaShift": _with(keep_num=2),
    "po.AdamG": _scaled_by_itself(),
    "po.AdamMini": _of_the_model,
    "po.BSAM": _with_closure(num_data=64),
    "po.DAdaptAdaGrad": _scaled_by_itself(d0=1e-2),
    "po.DAdaptAdam": _scaled_by_itself(d0=1e-2),
    "po.DAdaptAdan": _scaled_by_itself(d0=1e-2),
    "po.DAdaptLion": _scaled_by_itself(d0=1e-2),
    "po.DAdaptSGD": _scaled_by_itself(d0=1e-2),
    "po.Fira": _low_rank,
    "po.FriendlySAM": _SAM,
    "po.GaLore": _low_rank,
    "po.LookSAM": _SAM,
    "po.Lookahead": _around_adam(),
    "po.Magma": _around_adam(),
    "po.Muon": _marked_groups,
    "po.MuonClip": _marked_groups,
    "po.NorMuon": _marked_groups,
    "po.OrthoGrad": _around_adam(),
    "po.Prodigy": _scaled_by_itself(d0=1e-2),
    "po.Ranger21": _with(num_iterations=6),
    "po.SAM": _SAM,
    "po.ScheduleFreeAdamW": _in_training(_usual),
    "po.ScheduleFreeRAdam": _in_training(_usual),
    "po.ScheduleFreeSGD": _in_training(_usual),
    "po.ScheduleFreeWrapper": _in_training(_around_adam()),
    "po.SpectralSphere": _matrices_only,
    "po.TRAC": _around_adam(s_prev=1e-2),
    "po.WSAM": _SAM,
    "timm.Lookahead": _around_adam(),
    "torch.Adadelta": _scaled_by_itself(),
    "torch.Muon": _matrices_only,
}
