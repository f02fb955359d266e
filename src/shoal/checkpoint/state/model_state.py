"""What a model has to save, whether it is wrapped or a plain module."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from shoal.comm import Backend
from shoal.comm.world import find_current
from shoal.errors import CheckpointMismatchError
from shoal.sharding.extent import Extent
from shoal.sharding.holding import Held
from shoal.strategies import ShardedModel
from shoal.torch_internals.modules import buffers_of, is_persistent
from shoal.torch_support.copying import copy


def ranks_of(model: nn.Module) -> Backend | None:
    """Everybody who holds something of a model; None for a process of its own."""
    if isinstance(model, ShardedModel):
        return model.all_ranks
    world = find_current()
    return None if world is None or world.size == 1 else world.backend


def is_same_everywhere(model: nn.Module) -> bool:
    """Whether ranks that hold the same elements are known to have the same values of them."""
    return isinstance(model, ShardedModel) or ranks_of(model) is None


def plain_module(model: nn.Module) -> nn.Module:
    """The user's own module."""
    module: nn.Module = model.module if isinstance(model, ShardedModel) else model
    return module


def held_parameters(model: nn.Module) -> Iterator[Held]:
    """What this rank holds of the parameters, tied ones once, under their first names."""
    if isinstance(model, ShardedModel):
        yield from model.held()
        return
    for name, parameter in model.named_parameters():
        memory = parameter.detach()
        if not memory.is_contiguous():  # read only; what is loaded is copied in another way
            memory = memory.contiguous()
        yield Held(name, Extent.whole(parameter.shape), memory.reshape(-1))


def held_dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    """What optimizers step the parameters in, by name."""
    own = {name: parameter.dtype for name, parameter in model.named_parameters()}
    return own | model.held_dtypes() if isinstance(model, ShardedModel) else own


def check_steps(model: nn.Module) -> None:
    """Raises for a model whose last step has stopped half-way."""
    if isinstance(model, ShardedModel):
        model.engine.steps.check()


def check_has_memory(model: nn.Module) -> None:
    """Raises for a plain module on the meta device, where nothing can be put."""
    if isinstance(model, ShardedModel):
        return
    for name, tensor in [*model.named_parameters(), *buffers(model).items()]:
        if tensor.is_meta:
            raise CheckpointMismatchError(
                f"{name} is on the meta device and has no memory to load into: call "
                'model.to_empty(device="cpu") first, or wrap the model with as_distributed'
            )


@contextlib.contextmanager
def receiving(model: nn.Module) -> Iterator[None]:
    """Inside, parameters may be written to; afterwards every rank has the new values."""
    with model.receiving() if isinstance(model, ShardedModel) else torch.no_grad():
        yield


def put_parameter(model: nn.Module, held: Held, values: Tensor) -> None:
    """Gives this rank's elements of a parameter new values."""
    if isinstance(model, ShardedModel):
        copy(held.memory, values)
    else:
        parameter = model.get_parameter(held.name)
        parameter.copy_(values.view(parameter.shape))


def aliases(module: nn.Module) -> dict[str, str]:
    """Further names of tied parameters and shared buffers, with the first name of each."""
    first: dict[int, str] = {}
    further: dict[str, str] = {}
    parameters = module.named_parameters(remove_duplicate=False)
    for name, tensor in [*parameters, *_persistent_buffers(module)]:
        known = first.setdefault(id(tensor), name)
        if known != name:
            further[name] = known
    return further


def buffers(model: nn.Module) -> dict[str, Tensor]:
    """This rank's buffers that are part of the state, each once, under their first names."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, buffer in _persistent_buffers(plain_module(model)):
        if not isinstance(model, ShardedModel) or model.holds_buffer(name):
            found.setdefault(id(buffer), (name, buffer))
    return dict(found.values())


def _persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, inner in module.named_modules(remove_duplicate=False):
        for name, buffer in buffers_of(inner).items():
            if buffer is not None and is_persistent(inner, name):
                yield (f"{prefix}.{name}" if prefix else name), buffer


def modules_with_extra_state(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Parts that have something of their own to save, by name; each once."""
    for name, inner in module.named_modules():
        if type(inner).get_extra_state is not nn.Module.get_extra_state:
            yield name, inner


def extra_states(module: nn.Module) -> dict[str, Any]:
    """What modules have to save besides tensors."""
    return {name: inner.get_extra_state() for name, inner in modules_with_extra_state(module)}
