"""`as_distributed`: makes a model, its optimizer and its data distributed; typed use by use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeVar, Unpack, overload

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from shoal.comm.world import World, find_current, set_current
from shoal.comm.world_state import DEFAULT_TIMEOUT_S
from shoal.data import DividedLoader, divide
from shoal.elastic import ElasticOptimizer
from shoal.launch.joining.join import join, watch_exit
from shoal.launch.joining.presence import leave_mark
from shoal.optim.registry import wrap_model, wrap_optimizer, wrap_optimizers
from shoal.strategies import ShardedModel
from shoal.strategies.foreign import check_arguments
from shoal.strategies.option_types import (
    AsyncOptions,
    DataParallelOptions,
    DataParallelStrategy,
    HybridOptions,
    LocalOptions,
    PipelineOptions,
    TensorOptions,
)
from shoal.strategies.options import check_type

Loader = TypeVar("Loader", bound=DataLoader[Any] | Sequence[DataLoader[Any]])
Optimizers = Optimizer | Sequence[Optimizer]


def start(world: World) -> World:
    """The world of this process, from now on."""
    set_current(world, process_wide=True)
    watch_exit()
    leave_mark()
    return world


def _start_for(model: nn.Module, backend: str) -> World:
    """Chooses by the model's device: a GPU that the model is not on does not count."""
    on_cpu = all(parameter.is_cpu for parameter in model.parameters())
    return start(join(backend, DEFAULT_TIMEOUT_S, on_cpu=on_cpu))


# Models and optimizers come back as Any: they have what the user's have and more, and a script that
# gives them the same names again would not pass a type checker that knew their classes.
@overload
def as_distributed(
    model: nn.Module,
    optimizer: None = None,
    loader: None = None,
    *,
    strategy: DataParallelStrategy = ...,
    backend: str = ...,
    enabled: bool = ...,
    elastic: bool = ...,
    min_ranks: int = ...,
    max_ranks: int | None = ...,
    **options: Unpack[DataParallelOptions],
) -> Any: ...
@overload
def as_distributed(
    model: nn.Module,
    optimizer: Optimizers,
    loader: None = None,
    *,
    strategy: DataParallelStrategy = ...,
    backend: str = ...,
    enabled: bool = ...,
    elastic: bool = ...,
    min_ranks: int = ...,
    max_ranks: int | None = ...,
    **options: Unpack[DataParallelOptions],
) -> tuple[Any, Any]: ...
@overload
def as_distributed(
    model: nn.Module,
    optimizer: None = None,
    loader: Loader = ...,
    *,
    strategy: DataParallelStrategy = ...,
    backend: str = ...,
    enabled: bool = ...,
    elastic: bool = ...,
    min_ranks: int = ...,
    max_ranks: int | None = ...,
    **options: Unpack[DataParallelOptions],
) -> tuple[Any, Loader]: ...
@overload
def as_distributed(
    model: nn.Module,
    optimizer: Optimizers,
    loader: Loader,
    *,
    strategy: DataParallelStrategy = ...,
    backend: str = ...,
    enabled: bool = ...,
    elastic: bool = ...,
    min_ranks: int = ...,
    max_ranks: int | None = ...,
    **options: Unpack[DataParallelOptions],
) -> tuple[Any, Any, Loader]: ...
@overload
def as_distributed(
    model: nn.Module,
    optimizer: None = None,
    loader: None = None,
    *,
    strategy: Literal["tensor"],
    backend: str = ...,
    enabled: bool = ...,
    **options: Unpack[TensorOptions],
) -> Any: ...
@overload
def as_distributed(
    model: nn.Module,
    optimizer: Optimizers,
    loader: None = None,
    *,
    strategy: Literal["tensor"],
    backend: str = ...,
    enabled: bool = ...,
    **options: Unpack[TensorOptions],
) -> tuple[Any, Any]: ...
@overload
def as_distributed(
    model: nn.Module,
    optimizer: None = None,
    loader: Loader = ...,
    *,
    strategy: Literal["tensor"],
    backend: str = ...,
    enabled: bool = ...,
    **options: Unpack[TensorOptions],
) -> tuple[Any, Loader]: ...
@overload
def as_distributed(
    model: nn.Module,
    optimizer: Optimizers,
    loader: Loader,
    *,
    strategy: Literal["tensor"],
    backend: str = ...,
    enabled: bool = ...,
    **options: Unpack[TensorOptions],
) -> tuple[Any, Any, Loader]: ...
@overload
def as_distributed(
    model: nn.Module,
    optimizer: None = None,
    loader: None = None,
    *,
    strategy: Literal["pipeline"],
    backend: str = ...,
    enabled: bool = ...,
    **options: Unpack[PipelineOptions],
) -> Any: ...
@overload
def as_distributed(
    model: nn.Module,
    optimizer: Optimizers,
    loader: None = None,
    *,
    strategy: Literal["pipeline"],
    backend: str = ...,
    enabled: bool = ...,
    **options: Unpack[PipelineOptions],
) -> tuple[Any, Any]: ...
@overload
def as_distributed(
    model: nn.Module,
    optimizer: None = None,
    loader: Loader = ...,
    *,
    strategy: Literal["pipeline"],
    backend: str = ...,
    enabled: bool = ...,
    **options: Unpack[PipelineOptions],
) -> tuple[Any, Loader]: ...
@overload
def as_distributed(
    model: nn.Module,
    optimizer: Optimizers,
    loader: Loader,
    *,
    strategy: Literal["pipeline"],
    backend: str = ...,
    enabled: bool = ...,
    **options: Unpack[PipelineOptions],
) -> tuple[Any, Any, Loader]: ...
@overload
def as_distributed(
    model: nn.Module,
    optimizer: None = None,
    loader: None = None,
    *,
    strategy: Literal["hybrid"],
    backend: str = ...,
    enabled: bool = ...,
    elastic: bool = ...,
    min_ranks: int = ...,
    max_ranks: int | None = ...,
    **options: Unpack[HybridOptions],
) -> Any: ...
@overload
def as_distributed(
    model: nn.Module,
    optimizer: Optimizers,
    loader: None = None,
    *,
    strategy: Literal["hybrid"],
    backend: str = ...,
    enabled: bool = ...,
    elastic: bool = ...,
    min_ranks: int = ...,
    max_ranks: int | None = ...,
    **options: Unpack[HybridOptions],
) -> tuple[Any, Any]: ...
@overload
def as_distributed(
    model: nn.Module,
    optimizer: None = None,
    loader: Loader = ...,
    *,
    strategy: Literal["hybrid"],
    backend: str = ...,
    enabled: bool = ...,
    elastic: bool = ...,
    min_ranks: int = ...,
    max_ranks: int | None = ...,
    **options: Unpack[HybridOptions],
) -> tuple[Any, Loader]: ...
@overload
def as_distributed(
    model: nn.Module,
    optimizer: Optimizers,
    loader: Loader,
    *,
    strategy: Literal["hybrid"],
    backend: str = ...,
    enabled: bool = ...,
    elastic: bool = ...,
    min_ranks: int = ...,
    max_ranks: int | None = ...,
    **options: Unpack[HybridOptions],
) -> tuple[Any, Any, Loader]: ...
@overload
def as_distributed(
    model: nn.Module,
    optimizer: None = None,
    loader: None = None,
    *,
    strategy: Literal["local"],
    backend: str = ...,
    enabled: bool = ...,
    **options: Unpack[LocalOptions],
) -> Any: ...
@overload
def as_distributed(
    model: nn.Module,
    optimizer: Optimizers,
    loader: None = None,
    *,
    strategy: Literal["local"],
    backend: str = ...,
    enabled: bool = ...,
    **options: Unpack[LocalOptions],
) -> tuple[Any, Any]: ...
@overload
def as_distributed(
    model: nn.Module,
    optimizer: None = None,
    loader: Loader = ...,
    *,
    strategy: Literal["local"],
    backend: str = ...,
    enabled: bool = ...,
    **options: Unpack[LocalOptions],
) -> tuple[Any, Loader]: ...
@overload
def as_distributed(
    model: nn.Module,
    optimizer: Optimizers,
    loader: Loader,
    *,
    strategy: Literal["local"],
    backend: str = ...,
    enabled: bool = ...,
    **options: Unpack[LocalOptions],
) -> tuple[Any, Any, Loader]: ...
@overload
def as_distributed(
    model: nn.Module,
    optimizer: None = None,
    loader: None = None,
    *,
    strategy: Literal["async"],
    backend: str = ...,
    enabled: bool = ...,
    elastic: bool = ...,
    min_ranks: int = ...,
    max_ranks: int | None = ...,
    **options: Unpack[AsyncOptions],
) -> Any: ...
@overload
def as_distributed(
    model: nn.Module,
    optimizer: Optimizers,
    loader: None = None,
    *,
    strategy: Literal["async"],
    backend: str = ...,
    enabled: bool = ...,
    elastic: bool = ...,
    min_ranks: int = ...,
    max_ranks: int | None = ...,
    **options: Unpack[AsyncOptions],
) -> tuple[Any, Any]: ...
@overload
def as_distributed(
    model: nn.Module,
    optimizer: None = None,
    loader: Loader = ...,
    *,
    strategy: Literal["async"],
    backend: str = ...,
    enabled: bool = ...,
    elastic: bool = ...,
    min_ranks: int = ...,
    max_ranks: int | None = ...,
    **options: Unpack[AsyncOptions],
) -> tuple[Any, Loader]: ...
@overload
def as_distributed(
    model: nn.Module,
    optimizer: Optimizers,
    loader: Loader,
    *,
    strategy: Literal["async"],
    backend: str = ...,
    enabled: bool = ...,
    elastic: bool = ...,
    min_ranks: int = ...,
    max_ranks: int | None = ...,
    **options: Unpack[AsyncOptions],
) -> tuple[Any, Any, Loader]: ...
def as_distributed(
    model: nn.Module,
    optimizer: Optimizers | None = None,
    loader: Any = None,
    *,
    strategy: str = "auto",
    backend: str = "auto",
    enabled: bool = True,
    elastic: bool = False,
    min_ranks: int = 1,
    max_ranks: int | None = None,
    **options: Any,
) -> Any:
    """Turns a model, the optimizer that was built for it and its data into distributed ones.

    Starts communication where there is none yet. Wrapping twice with the same strategy returns
    what is there.

    Args:
        model: Any module.
        optimizer: A torch optimizer over the model's parameters, or a list of them.
        loader: A torch `DataLoader`, or a list of them. Its batches are those of all ranks
            together, and each rank gets its part; ranks that hold parts of one replica get the
            same. One that is divided already comes back as it is.
        strategy: "ddp", "zero1", "zero2", "zero3", "fsdp", "tensor", "pipeline", "hybrid", or
            "auto" to choose by size; for slow links and slow ranks "local" trains replicas apart
            and averages them now and then, and "async" updates parameters without barriers.
        backend: What to start communication with, if it has to be started.
        enabled: If false, everything comes back untouched.
        elastic: Whether ranks may come, go and die while training goes on, step by step inside of
            ``with optimizer.attempt():``; see `shoal.elastic.ElasticOptimizer`. For data-parallel
            strategies, "hybrid" (whole replicas come and go), and "async" without a loader.
        min_ranks: With fewer ranks an elastic run ends.
        max_ranks: More are not let in.
        options: For the model's class, for example ``activations`` (which are computed again in
            backward), ``sync_batchnorm`` or ``seed`` (for a model on the meta device); see
            `ShardedModel`. Those of each strategy are in `shoal.strategies.option_types`.

    Returns:
        The wrapped model; with others a tuple of it, the optimizer and the loader, as far as they
        were given (lists if lists were).

    Example:
        >>> model, optimizer, loader = shoal.as_distributed(
        ...     model, optimizer, loader, strategy="zero3"
        ... )
    """
    check_type("enabled", enabled, bool)
    if not enabled:
        return _as_given(model, optimizer, loader)
    check_arguments(model, optimizer, loader)
    world = find_current() or _start_for(model, backend)
    wrapped = wrap_model(model, strategy, world, options)
    if elastic:
        return _as_elastic(wrapped, optimizer, loader, min_ranks, max_ranks)
    stepped: Any = optimizer
    if isinstance(optimizer, Sequence):
        stepped = wrap_optimizers(optimizer, wrapped)
    elif optimizer is not None:
        stepped = wrap_optimizer(optimizer, wrapped)
    return _as_given(wrapped, stepped, None if loader is None else divide(loader, wrapped))


def _as_elastic(
    model: ShardedModel,
    optimizer: Optimizers | None,
    loader: Any,
    min_ranks: int,
    max_ranks: int | None,
) -> Any:
    if not isinstance(optimizer, Optimizer):
        raise ValueError(
            "elastic=True needs the optimizer, whose attempts are made again when a rank is lost; "
            f"one of them: got {'none' if optimizer is None else 'a list'}"
        )
    if isinstance(optimizer, ElasticOptimizer):
        stepped = optimizer
    else:
        stepped = ElasticOptimizer(optimizer, model, min_ranks, max_ranks)
    divided = None if loader is None else divide(loader, model)
    for each in [] if divided is None else divided if isinstance(divided, list) else [divided]:
        if not isinstance(each, DividedLoader):
            raise ValueError(
                "elastic=True divides a loader anew when ranks come or go, and this one has a "
                "sampler that divides already: pass the loader without it"
            )
        stepped.take_along(each)
    return _as_given(model, stepped, divided)


def _as_given(model: nn.Module, *others: Any) -> Any:
    given = [each for each in others if each is not None]
    return (model, *given) if given else model
