"""Random faults for a while: kills, kills in saves, calls that differ, kills that are survived.

    python tools/soak.py --seconds 600
    python tools/soak.py --campaign kills --seed 1234 --rounds 1    # as a failure tells you

Every round has a seed. What is drawn from it: backend, number of ranks, victim, fault, moment. Only
the moment is not exactly repeated, since ranks are real processes.
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import elastic_faults
import torch
from torch import nn

import shoal
from shoal.errors import MismatchError, PeerError
from shoal.launch.function.outcome import Outcome
from shoal.launch.function.run import run_outcomes

# A round that waits for the deadline of an operation is wrong, on a busy machine as well.
TIMEOUT_S = 90.0
LATEST_END_S = 45.0
FAULTS = ("SIGKILL", "SIGSTOP", "exception", "sys.exit", "os._exit")


class Wrong(Exception):
    """What should not have come out of a round."""


def kills(draw: random.Random) -> str:
    """A rank fails at a random moment: all others must name it, soon."""
    backend, ranks = draw.choice(["shm", "gloo"]), draw.randint(2, 4)
    victim, fault = draw.randrange(ranks), draw.choice(FAULTS)
    delay = draw.uniform(0.0, 0.1)
    begin = time.monotonic()
    outcomes = run_outcomes(
        work_until, (victim, fault, delay, draw.random()), ranks, backend, TIMEOUT_S
    )
    seconds = time.monotonic() - begin
    if seconds > LATEST_END_S:
        raise Wrong(
            f"{fault} over {backend} took {seconds:.1f} s: " + "; ".join(map(tell, outcomes))
        )
    for outcome in outcomes:
        error = outcome.error
        is_named = isinstance(error, PeerError) and error.rank == victim
        if outcome.rank != victim and not is_named:
            raise Wrong(f"rank {outcome.rank} does not name rank {victim}: {tell(outcome)}")
    return f"{fault} over {backend}: named by all"


def work_until(victim: int, fault: str, delay: float, seed: float) -> None:
    """Collectives of random sizes until this rank, or another, fails."""
    world, draw = shoal.world(), random.Random(seed)
    end = time.monotonic() + delay if world.rank == victim else float("inf")
    if world.rank == victim and fault.startswith("SIG"):
        number = getattr(signal, fault)
        threading.Timer(delay, os.kill, (os.getpid(), number)).start()
        end = float("inf")
    while True:
        if time.monotonic() > end:
            fail(fault)
        data = torch.ones(draw.choice([1, 1000, 1 << 18]))
        kind = draw.randrange(4)
        if kind == 0:
            world.all_reduce(data)
        elif kind == 1:
            world.all_gather(data)
        elif kind == 2:
            world.broadcast(data, root=draw.randrange(world.size))
        else:
            world.barrier()


def fail(fault: str) -> None:
    """Ends this rank, in one of the ways that need no signal."""
    if fault == "exception":
        raise ValueError("soak")
    if fault == "sys.exit":
        sys.exit(3)
    os._exit(3)


def saves(draw: random.Random) -> str:
    """A rank is killed in the middle of a save: the old checkpoint loads, or the new one."""
    backend, ranks = draw.choice(["shm", "gloo"]), draw.randint(2, 3)
    strategy = draw.choice(["ddp", "zero1", "zero3"])
    with tempfile.TemporaryDirectory() as folder:
        model = layer(1.0)
        shoal.save(folder, model, step=1)
        arguments = (folder, strategy, draw.randrange(ranks), draw.uniform(0.0, 0.15))
        run_outcomes(save_and_die, arguments, ranks, backend, TIMEOUT_S)
        shoal.load(folder, model)
        values = {value.item() for value in torch.cat([p.flatten() for p in model.parameters()])}
        if values not in ({1.0}, {2.0}):
            raise Wrong(f"the checkpoint holds {sorted(values)}")
        shoal.save(folder, model, step=3)  # and the folder goes on working
    return f"{strategy} over {backend}: {'old' if values == {1.0} else 'new'}"


def layer(value: float) -> nn.Module:
    """A model of a few hundred KiB whose parameters all have one value."""
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 64))
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model


def save_and_die(folder: str, strategy: str, victim: int, delay: float) -> None:
    """Saves, while a timer kills this rank if it is the victim."""
    world = shoal.world()
    model = shoal.as_distributed(layer(2.0), strategy=strategy)
    world.barrier()
    if world.rank == victim:
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
    shoal.save(folder, model, step=2)


CALLS: dict[str, Callable[[Any], Any]] = {
    "all_reduce of 4": lambda world: world.all_reduce(torch.ones(4)),
    "all_reduce of 5": lambda world: world.all_reduce(torch.ones(5)),
    "all_reduce of 2x2": lambda world: world.all_reduce(torch.ones(2, 2)),
    "all_reduce of float64": lambda world: world.all_reduce(torch.ones(4, dtype=torch.float64)),
    "all_reduce max": lambda world: world.all_reduce(torch.ones(4), op="max"),
    "all_reduce of 1 MiB": lambda world: world.all_reduce(torch.ones(1 << 18)),
    "all_gather": lambda world: world.all_gather(torch.ones(4)),
    "all_gather of int64": lambda world: world.all_gather(torch.ones(4, dtype=torch.int64)),
    "reduce_scatter": lambda world: world.reduce_scatter(torch.ones(4 * world.size)),
    "broadcast from 0": lambda world: world.broadcast(torch.ones(4), root=0),
    "broadcast from 1": lambda world: world.broadcast(torch.ones(4), root=1),
    "barrier": lambda world: world.barrier(),
}


def mismatches(draw: random.Random) -> str:
    """One rank calls something else: every rank gets an error that says so, soon."""
    backend, ranks = draw.choice(["shm", "gloo"]), draw.randint(2, 4)
    odd = draw.randrange(ranks)
    one, other = draw.sample(sorted(CALLS), 2)
    repeated = draw.choice([0, 0, 3])  # calls that agree, before: they are cached
    begin = time.monotonic()
    outcomes = run_outcomes(call_one, (odd, one, other, repeated, CALLS), ranks, backend, TIMEOUT_S)
    seconds = time.monotonic() - begin
    errors = [outcome.error for outcome in outcomes]
    if not all(isinstance(error, MismatchError | PeerError) for error in errors):
        raise Wrong(f"{one!r} and {other!r}: {tell_all(outcomes)}")
    if not any(isinstance(error, MismatchError) for error in errors):
        raise Wrong(f"{one!r} and {other!r} are no mismatch: {tell_all(outcomes)}")
    if seconds > LATEST_END_S:
        raise Wrong(f"it took {seconds:.1f} s")
    return f"{backend}: a mismatch on all ranks"


def call_one(odd: int, one: str, other: str, repeated: int, calls: dict[str, Any]) -> None:
    """Calls what all call, then what one rank does not."""
    world = shoal.world()
    for _ in range(repeated):
        calls[other](world)
    calls[one if world.rank == odd else other](world)


def tell(outcome: Outcome) -> str:
    """An outcome in a line."""
    if outcome.error is None:
        return f"rank {outcome.rank}: value {outcome.value!r}, exit code {outcome.exit_code}"
    return f"rank {outcome.rank}: {type(outcome.error).__name__}: {outcome.error}"


def tell_all(outcomes: Sequence[Outcome]) -> str:
    """All of them."""
    return "; ".join(map(tell, outcomes))


def elastic(draw: random.Random) -> str:
    """Ranks are killed in each phase of a training that goes on: it ends as one without faults."""
    backend, num_faults = draw.choice(elastic_faults.BACKENDS), 0
    for phase in elastic_faults.PHASES:
        num_faults += len(elastic_faults.play(draw, phase, backend))
    FAULTS_SURVIVED.update([backend] * num_faults)
    return f"{len(elastic_faults.PHASES)} phases over {backend}: as without a fault"


FAULTS_SURVIVED: collections.Counter[str] = collections.Counter()

CAMPAIGNS = {"kills": kills, "saves": saves, "mismatches": mismatches, "elastic": elastic}


def main() -> int:
    """Runs rounds of all campaigns in turns, prints the counts; 1 if any round went wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--rounds", type=int, default=1_000_000_000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    parser.add_argument("--campaign", choices=CAMPAIGNS, action="append")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    shoal.run(lambda: None, ranks=2)  # starts what later rounds find running
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    deadline = time.monotonic() + options.seconds
    for number in range(options.rounds):
        if time.monotonic() > deadline:
            break
        for name in options.campaign or CAMPAIGNS:
            counts[name, play(name, options.seed + number)] += 1
    for (name, ending), count in sorted(counts.items()):
        print(f"{count:6}  {name:10}  {ending}")
    for backend, count in sorted(FAULTS_SURVIVED.items()):
        print(f"{count:6}  ranks lost over {backend}, and replaced")
    wrong = sum(count for (_, ending), count in counts.items() if ending == "WRONG")
    print(f"{sum(counts.values())} rounds, {wrong} wrong")
    return 1 if wrong else 0


def play(name: str, seed: int) -> str:
    """How one round ended, in a few words."""
    try:
        return CAMPAIGNS[name](random.Random(f"{name} {seed}"))
    except Exception as error:
        print(
            f"WRONG: {type(error).__name__}: {error}\n"
            f"  again: python tools/soak.py --campaign {name} --seed {seed} --rounds 1",
            flush=True,
        )
        return "WRONG"


if __name__ == "__main__":
    sys.exit(main())
