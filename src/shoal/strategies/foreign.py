"""What users pass that is no plain model, optimizer or loader, and what to pass instead.

Classes of other libraries are recognised by their names, so that none of them is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from shoal.torch_internals.optimizers import is_initialised

_INSIDE = "pass the module inside of it (model.module) to shoal.as_distributed, and leave it out"
_PREPARE = "leave out accelerator.prepare(): shoal.as_distributed takes its place"
_SHARDED = "leave out fully_shard() and choose strategy='fsdp', which shards the plain module"
# By the package that defines a class, and the class.
_MODELS = {
    ("torch", "DistributedDataParallel"): _INSIDE,
    ("torch", "DataParallel"): _INSIDE,
    ("torch", "FullyShardedDataParallel"): "build the plain module, and choose strategy='fsdp'",
    ("torch", "FSDPModule"): _SHARDED,
    ("deepspeed", "DeepSpeedEngine"): "leave out deepspeed.initialize(), and choose "
    "strategy='zero1', 'zero2' or 'zero3' for its stage",
    ("lightning", "_FabricModule"): "leave out fabric.setup(): shoal.as_distributed takes its "
    "place",
    ("lightning_fabric", "_FabricModule"): "leave out fabric.setup(): shoal.as_distributed takes "
    "its place",
    ("megatron", "DistributedDataParallel"): _INSIDE,
}
_OPTIMIZERS = {
    ("accelerate", "AcceleratedOptimizer"): _PREPARE,
    ("torch", "ZeroRedundancyOptimizer"): "pass the plain optimizer (its optimizer_class over the "
    "model's parameters), and choose strategy='zero1'",
    ("torch", "PostLocalSGDOptimizer"): "pass the plain optimizer, and choose strategy='local'",
    ("deepspeed", "ZeROOptimizer"): "leave out deepspeed.initialize(), and pass the plain "
    "optimizer",
    ("lightning", "_FabricOptimizer"): "leave out fabric.setup(), and pass the plain optimizer",
    ("lightning_fabric", "_FabricOptimizer"): "leave out fabric.setup(), and pass the plain "
    "optimizer",
}
_LOADERS = {
    ("accelerate", "DataLoaderShard"): _PREPARE,
    ("accelerate", "DataLoaderDispatcher"): _PREPARE,
    ("lightning", "_FabricDataLoader"): "leave out fabric.setup_dataloaders()",
    ("lightning_fabric", "_FabricDataLoader"): "leave out fabric.setup_dataloaders()",
}
_SPLIT = (
    "leave out fully_shard(), parallelize_module() and distribute_tensor(), and choose "
    "strategy='fsdp', 'tensor' or 'hybrid', which divides the plain module"
)


def refuse_foreign_model(model: nn.Module) -> None:
    """Raises a TypeError if the model, or a part of it, is another library's wrapper."""
    for name, part in model.named_modules():
        _refuse("the model's part " + name if name else "the model", part, _MODELS)
    for name, parameter in model.named_parameters():
        _refuse(f"the parameter {name}", parameter, {("torch", "DTensor"): _SPLIT})


def refuse_foreign_optimizer(optimizer: Any) -> None:
    """Raises a TypeError if it is another library's wrapper of one."""
    _refuse("the optimizer", optimizer, _OPTIMIZERS)
    if isinstance(optimizer, Optimizer) and not is_initialised(optimizer):
        raise TypeError(
            f"the optimizer is a {type(optimizer).__name__} that has not called "
            "torch.optim.Optimizer.__init__, as wrappers around another optimizer do: pass the one "
            "inside of it, or let the class call super().__init__(params, defaults)"
        )


def refuse_foreign_loader(loader: Any) -> None:
    """Raises a TypeError if it is divided among ranks by another library already."""
    _refuse("the loader", loader, _LOADERS)


def _refuse(what: str, value: object, remedies: dict[tuple[str, str], str]) -> None:
    for kind in type(value).__mro__:
        package = kind.__module__.partition(".")[0]
        remedy = remedies.get((package, kind.__name__))
        if remedy is not None:
            raise TypeError(
                f"{what} is a {package} {kind.__name__}, which is distributed already: {remedy}"
            )


def check_arguments(model: Any, optimizer: Any, loader: Any) -> None:
    """Before anything is started or changed: each is what its place is for, and plain."""
    for each in _listed(optimizer):
        refuse_foreign_optimizer(each)
    for each in _listed(loader):
        refuse_foreign_loader(each)
    for place, value in {"model": model, "optimizer": optimizer, "loader": loader}.items():
        _check_place(place, value)
    refuse_foreign_model(model)


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else [value]


def _check_place(place: str, value: Any) -> None:
    """Raises if it belongs to another place; loaders of other kinds are refused later."""
    belongs = {_place_of(each) for each in _listed(value)}
    if belongs <= {place} or (value is None and place != "model"):
        return
    (other, *_) = belongs - {place}
    if other:
        raise TypeError(
            f"shoal.as_distributed(model, optimizer, loader), in this order: got a "
            f"{type(value).__name__} for the {place}, which is a value for {other}="
        )
    if isinstance(value, LRScheduler):
        raise TypeError(
            "shoal.as_distributed takes no schedulers: make the scheduler from the optimizer that "
            "comes back, or from the plain one, and leave it out here"
        )
    if place != "loader":
        raise TypeError(f"{place} must be {_MUST_BE[place]}; got a {type(value).__name__}")


_KINDS: dict[str, type] = {"model": nn.Module, "optimizer": Optimizer, "loader": DataLoader}
_MUST_BE = {
    "model": "one torch module, an nn.Module",
    "optimizer": "a torch.optim.Optimizer, or a list of them",
}


def _place_of(value: Any) -> str:
    return next((place for place, kind in _KINDS.items() if isinstance(value, kind)), "")
