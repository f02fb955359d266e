"""Models, optimizers and loaders that another library distributes: what to pass instead.

Classes are recognised by their names, so that none of these libraries is imported.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

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
