"""The front door: start communication, find it again, run a function on many ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shoal.checkpoint import load as load
from shoal.checkpoint import save as save
from shoal.comm.world import World, current, find_current
from shoal.comm.world_state import DEFAULT_TIMEOUT_S
from shoal.errors import PeerError, ShoalError
from shoal.launch.function.interrupts import ending_quietly
from shoal.launch.function.outcome import Outcome
from shoal.launch.function.run import run_outcomes
from shoal.launch.joining.join import check_name, choose_for_cpu, join
from shoal.meeting.elastic_options import Elastic
from shoal.sampling import sampler as sampler
from shoal.strategies.option_types import Strategy
from shoal.system.limits import advice, explained
from shoal.system.rank_names import name_spans
from shoal.system.tracebacks import hide_own_frames, says
from shoal.verification import Experiment, Report, verify_experiment
from shoal.wrapping import as_distributed as as_distributed
from shoal.wrapping import start


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
    with explained():
        return start(join(backend, timeout))


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
    elastic: Elastic | None = None,
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
        elastic: Lets ranks come and go: one whose function raises is lost, and the others go on,
            as `shoal.elastic.ElasticOptimizer` does. Results are those of the ranks at the end. Not
            over MPI.

    Example:
        >>> import shoal
        >>> def greet(name):
        ...     return f"{name} from rank {shoal.world().rank}"
        >>> shoal.run(greet, ranks=2, backend="memory", args=("hello",))
        ['hello from rank 0', 'hello from rank 1']
    """
    check_name(backend)
    _check_call(fn, ranks, args)
    name = _choose(ranks) if backend == "auto" else backend
    with explained(), ending_quietly():
        outcomes = run_outcomes(fn, tuple(args), ranks, name, timeout, elastic)
    failures = [outcome for outcome in outcomes if outcome.failed]
    if failures:
        raise _first_error(failures)
    return [outcome.value for outcome in outcomes]


def _check_call(fn: object, ranks: object, args: object) -> None:
    if not callable(fn):
        raise TypeError(f"shoal.run needs a function to call on every rank; got {fn!r}")
    if not isinstance(ranks, int) or isinstance(ranks, bool):
        raise TypeError(f"ranks must be a whole number; got {ranks!r}")
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1; got {ranks}")
    if not isinstance(args, Sequence) or isinstance(args, str | bytes):
        raise TypeError(
            f"args must be a tuple or a list of the function's arguments, such as args=({args!r},);"
            f" got {args!r}"
        )


def _choose(ranks: int) -> str:
    import torch

    if torch.cuda.is_available() and torch.cuda.device_count() >= ranks:
        return "nccl"
    return choose_for_cpu(is_one_host=True)


def _first_error(failures: Sequence[Outcome]) -> BaseException:
    """The first failing rank's exception, with its rank and traceback as notes.

    A rank that only passes on another's failure comes after those that failed by themselves.
    """
    first = min(
        failures,
        key=lambda each: (each.is_echo or isinstance(each.error, PeerError), each.failed_at),
    )
    error = first.error or PeerError(first.rank, _ending(first))
    if not isinstance(error, Exception):  # SystemExit and the like would end the caller
        how = f"it ended by {error!r} before the end of the function"
        error = PeerError(first.rank, how)
    if error is not first.error and (waiting := _waiting(first.rank, failures)):
        error.add_note(waiting)
    if text := advice(error):
        error.add_note(text)
    if first.traceback:
        alike = [each.rank for each in failures if says(each.traceback) == says(first.traceback)]
        text = hide_own_frames(first.traceback)
        error.add_note(f"raised on {name_spans(alike)}; its own traceback:\n{text}")
    return error


def _waiting(rank: int, failures: Sequence[Outcome]) -> str:
    """What others were doing when a rank went; the first of those that were told of it."""
    for each in failures:
        if isinstance(each.error, PeerError) and each.error.rank == rank and each.error.context:
            context = each.error.context.partition("\n")[0]
            return f"  while rank {each.rank} waited for it in {context}"
    return ""


def _ending(outcome: Outcome) -> str:
    code = outcome.exit_code
    if outcome.fate:
        return outcome.fate
    if code is None:
        return f"it ended without a word. {outcome.traceback}"
    how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
    return f"its process {how} before it returned"


def verify(
    build: Callable[[], Any],
    strategy: Strategy = "ddp",
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
