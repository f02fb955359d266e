"""The front door: start communication, find it again, run a function on many ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from shoal.checkpoint import load as load
from shoal.checkpoint import save as save
from shoal.comm.backend import DEFAULT_TIMEOUT_S, Backend
from shoal.comm.world import World, current, find_current, set_current
from shoal.data import divide
from shoal.errors import PeerError, ShoalError
from shoal.launch.function.outcome import Outcome
from shoal.launch.function.run import run_outcomes
from shoal.launch.joining.join import check_name, choose_for_cpu, join, watch_exit
from shoal.optim.registry import wrap_model, wrap_optimizer, wrap_optimizers
from shoal.sampling import sampler as sampler
from shoal.strategies.options import check_type
from shoal.verification import Experiment, Report, verify_experiment

Loader = TypeVar("Loader", bound=DataLoader[Any] | Sequence[DataLoader[Any]])


def init(backend: str = "auto", timeout: float = DEFAULT_TIMEOUT_S) -> World:
    """Joins the world that this process was started for.

    Ranks are found from the variables of ``shoal launch``, torchrun, Open MPI, MPICH, Slurm or
    plain ``RANK`` and ``WORLD_SIZE``; without any this process is a world of its own.

    Args:
        backend: "memory", "shm", "gloo", "nccl", "mpi", or "auto" to choose.
        timeout: Seconds that an alive but late rank is waited for.

    Example:
        >>> import shoal, torch
        >>> with shoal.init() as world:
        ...     print(world.rank, world.all_reduce(torch.ones(1)))
        0 tensor([1.])
    """
    existing = find_current()
    if existing is not None:
        raise ShoalError(
            f"this process is already part of {existing!r}: use shoal.world(), "
            "or call its shutdown() first"
        )
    return _start(join(backend, timeout))


def _start(backend: Backend) -> World:
    world = World(backend)
    set_current(world, process_wide=True)
    watch_exit()
    return world


def _start_for(model: nn.Module, backend: str) -> World:
    """Chooses by the model's device: a GPU that the model is not on does not count."""
    on_cpu = all(parameter.is_cpu for parameter in model.parameters())
    return _start(join(backend, DEFAULT_TIMEOUT_S, on_cpu=on_cpu))


def world() -> World:
    """The current world; `shoal.init` or `shoal.run` made it.

    Example:
        >>> import shoal
        >>> shoal.run(lambda: shoal.world().rank, ranks=3, backend="memory")
        [0, 1, 2]
    """
    return current()


def run(
    fn: Callable[..., Any],
    ranks: int = 2,
    backend: str = "auto",
    args: Sequence[Any] = (),
    timeout: float = DEFAULT_TIMEOUT_S,
) -> list[Any]:
    """Calls ``fn(*args)`` on every rank and returns the results by rank.

    Ranks are threads that take turns for "memory" and processes for the others. Each rank has
    its own copy of ``fn`` and ``args``. If a rank fails, its exception is raised here, with the
    rank named and its traceback attached, once all others have been told and have ended.

    Args:
        fn: A function, lambda or closure, from a script, a notebook or a test.
        ranks: How many ranks.
        backend: "memory", "shm", "gloo", "nccl", "mpi", or "auto" to choose.
        args: Arguments for every rank.
        timeout: Seconds that an alive but late rank is waited for.

    Example:
        >>> import shoal
        >>> def greet(name):
        ...     return f"{name} from rank {shoal.world().rank}"
        >>> shoal.run(greet, ranks=2, backend="memory", args=("hello",))
        ['hello from rank 0', 'hello from rank 1']
    """
    check_name(backend)
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1; got {ranks}")
    name = _choose(ranks) if backend == "auto" else backend
    outcomes = run_outcomes(fn, tuple(args), ranks, name, timeout)
    failures = [outcome for outcome in outcomes if outcome.failed]
    if failures:
        raise _first_error(failures)
    return [outcome.value for outcome in outcomes]


def _choose(ranks: int) -> str:
    import torch

    if torch.cuda.is_available() and torch.cuda.device_count() >= ranks:
        return "nccl"
    return choose_for_cpu(is_one_host=True)


def _first_error(failures: Sequence[Outcome]) -> BaseException:
    """The first failing rank's exception, with its rank and traceback as notes.

    A rank that only passes on another's failure comes after those that failed by themselves.
    """
    first = min(failures, key=lambda each: (isinstance(each.error, PeerError), each.failed_at))
    error = first.error or PeerError(first.rank, _ending(first))
    if not isinstance(error, Exception):  # SystemExit and the like would end the caller
        error = PeerError(first.rank, f"it ended by {error!r}")
    error.add_note(f"raised on rank {first.rank}; its own traceback:\n{first.traceback}")
    return error


def _ending(outcome: Outcome) -> str:
    code = outcome.exit_code
    if code is None:
        return f"it ended without a word. {outcome.traceback}"
    how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
    return f"its process {how} before it returned"


# Models and optimizers come back as Any: they have what the user's have and more, and a script that
# gives them the same names again would not pass a type checker that knew their classes.
@overload
def as_distributed(
    model: nn.Module,
    optimizer: None = None,
    loader: None = None,
    *,
    strategy: str = ...,
    backend: str = ...,
    enabled: bool = ...,
    **options: Any,
) -> Any: ...
@overload
def as_distributed(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    loader: None = None,
    *,
    strategy: str = ...,
    backend: str = ...,
    enabled: bool = ...,
    **options: Any,
) -> tuple[Any, Any]: ...
@overload
def as_distributed(
    model: nn.Module,
    optimizer: None = None,
    loader: Loader = ...,
    *,
    strategy: str = ...,
    backend: str = ...,
    enabled: bool = ...,
    **options: Any,
) -> tuple[Any, Loader]: ...
@overload
def as_distributed(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    loader: Loader,
    *,
    strategy: str = ...,
    backend: str = ...,
    enabled: bool = ...,
    **options: Any,
) -> tuple[Any, Any, Loader]: ...
def as_distributed(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    loader: Any = None,
    *,
    strategy: str = "auto",
    backend: str = "auto",
    enabled: bool = True,
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
            "auto" to choose by size.
        backend: What to start communication with, if it has to be started.
        enabled: If false, everything comes back untouched.
        options: For the model's class, for example ``min_group_bytes``, ``sync_batchnorm`` or
            ``seed`` (for a model on the meta device); see `ShardedModel`.

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
    world = find_current() or _start_for(model, backend)
    wrapped = wrap_model(model, strategy, world, options)
    stepped: Any = optimizer
    if isinstance(optimizer, Sequence):
        stepped = wrap_optimizers(optimizer, wrapped)
    elif optimizer is not None:
        stepped = wrap_optimizer(optimizer, wrapped)
    return _as_given(wrapped, stepped, None if loader is None else divide(loader, wrapped))


def _as_given(model: nn.Module, *others: Any) -> Any:
    given = [each for each in others if each is not None]
    return (model, *given) if given else model


def verify(
    build: Callable[[], Any],
    strategy: str = "ddp",
    ranks: int = 2,
    backend: str = "memory",
    steps: int = 5,
    reference: str = "batch",
    tolerance: float | None = None,
    weight: Callable[[Any, Any], Any] | None = None,
    **options: Any,
) -> Report:
    """Trains one process and many ranks on the same global batches, and compares every step.

    Losses, gradients and parameters must agree within the tolerance, and the ranks among
    themselves to the bit. Each rank gets its contiguous rows of every tensor of a batch.

    Args:
        build: Returns ``(model, optimizer, batches, loss_fn)``, the same each time it is called;
            random numbers are seeded for it. ``batches`` gives pairs of inputs and targets for all
            ranks together; ``optimizer`` may be a list.
        strategy: As for `as_distributed`.
        ranks: How many ranks.
        backend: What they communicate over; "memory" needs no processes.
        steps: How many steps; batches are used again if there are fewer.
        reference: "batch" is one process on the whole batch; "split" one that replays the ranks'
            local batches and averages in rank order, for what depends on how a batch is divided
            (BatchNorm, dropout) or amplifies rounding (Muon, Adafactor, mixed precision).
        tolerance: What an element may be off by, relative to one plus its size. By default 1e-5
            in float32, 1e-10 in float64 and 1e-2 in 16 bits.
        weight: ``weight(inputs, targets)`` is how much a rank's rows count, as for ``train_step``;
            for losses that are means over tokens.
        options: As for `as_distributed`.

    Returns:
        A report that says equal, or what differs first, by how much, and the likely cause.

    Example:
        >>> report = shoal.verify(build, strategy="zero3", ranks=4)
        >>> print(report)
        >>> report.raise_if_different()
    """
    how = (strategy, ranks, backend, steps, reference, tolerance, weight, options)
    return verify_experiment(Experiment(build, as_distributed, *how), run)
