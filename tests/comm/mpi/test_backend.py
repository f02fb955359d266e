"""What is special to MPI: two libraries, ranks that only `mpiexec` starts, and how they end."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from shoal.comm.mpi import backend as mpi
from shoal.comm.mpi.bootstrap import MPIBootstrap
from shoal.errors import BackendUnavailableError
from shoal.launch.mpi import mpiexec

MPICH = Path(sys.executable).parent.parent / "mpich"
DEADLINE_S = 90
# From a rank's last line to the end of mpiexec, on a machine that has other things to do.
QUICK_S = 15

# Hydra kills the other ranks when one dies by a signal, often even when told not to. So where one
# is to die, the ranks are children of what hydra started.
SHIM = """
import subprocess, sys
subprocess.call([sys.executable, *sys.argv[1:]], close_fds=False, start_new_session=True)
"""

REPORT = """
import json, os, sys, time
import torch
import shoal
from shoal.errors import PeerError

report = {}

def write_report(rank):
    report["end"] = time.time()
    with open(f"{sys.argv[1]}/{rank}.json", "w") as file:
        json.dump(report, file)
"""

COLLECTIVES = (
    REPORT
    + """
from shoal.comm.mpi import backend as mpi
from shoal.comm.mpi.bootstrap import MPIBootstrap

def checks(backend):
    rank, size = backend.rank, backend.size
    numbers = torch.arange(10_001) % 7
    def mine(dtype):
        return (numbers + rank).to(dtype)
    def total(dtype):
        return (size * numbers + sum(range(size))).to(dtype)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8):
        whole = backend.all_reduce(mine(dtype))
        assert torch.equal(whole, total(dtype)), dtype
        part = backend.reduce_scatter(mine(dtype))
        assert torch.equal(backend.all_gather(part), whole), dtype
        kept = mine(dtype)
        backend.reduce(kept, root=1)
        assert torch.equal(kept, whole if rank == 1 else mine(dtype)), dtype
    nan = torch.tensor([float("nan") if rank == 0 else 1.0])
    assert backend.all_reduce(nan, "max").isnan().all()
    uneven = backend.all_gather(torch.full((rank, 2), rank, dtype=torch.bfloat16))
    assert uneven[:, 0].tolist() == [r for r in range(size) for _ in range(r)]
    rows = backend.gather(torch.full((rank,), rank), root=size - 1)
    assert rank < size - 1 or rows.tolist() == [r for r in range(size) for _ in range(r)]
    for root in range(size):
        given = mine(torch.float64) if rank == root else None
        assert backend.broadcast(given, root=root).sum() == (numbers + root).sum()
    pending = backend.send(torch.full((70_000,), rank), (rank + 1) % size, tag=5, async_op=True)
    assert (backend.recv(src=(rank - 1) % size, tag=5) == (rank - 1) % size).all()
    pending.wait()

with shoal.init(timeout=60) as world:
    assert world.backend.name == "mpi"
    checks(world.backend)
    pair = world.split(world.rank // 2)
    if pair.size == 2:
        checks(pair)
# Everything large is cut into slices, windows and several messages; sizes to match the tensors.
mpi._SMALL_BYTES, mpi._WINDOW_BYTES, mpi._LONGEST_BYTES = 1000, 4096, 1500
with shoal.init(timeout=60) as world:
    checks(world.backend)
world.shutdown()
write_report(world.rank)
"""
)

FAILURES = (
    REPORT
    + """
try:
    with shoal.init(timeout=60) as world:
        if world.rank == 2:
            raise ValueError("boom")
        world.barrier()
except (PeerError, ValueError) as error:
    report["raised"] = str(error)

with shoal.init(timeout=60) as world:
    world.barrier()
    if world.rank == 1:
        os.kill(os.getpid(), 9)
    begin = time.monotonic()
    try:
        world.all_reduce(torch.ones(1 << 20))
    except PeerError as error:
        report["killed"] = [error.rank, error.reason, time.monotonic() - begin]
write_report(world.rank)
"""
)


def _open_mpi(is_deadly):
    prefix, variables = mpiexec.command(3)
    return [*prefix, sys.executable], variables


def _mpich(is_deadly):
    options = ["-launcher", "fork", "-bind-to", "none", "-disable-auto-cleanup", "-n", "3"]
    command = [str(MPICH / "bin" / "mpiexec"), *options, sys.executable]
    variables = {"MPI4PY_LIBMPI": str(MPICH / "lib" / "libmpi.so.12")}
    return [*command, "-c", SHIM] if is_deadly else command, variables


_needs_mpich = pytest.mark.skipif(not MPICH.exists(), reason="no MPICH: run make setup")
WITH_MPICH = pytest.param(_mpich, id="mpich", marks=_needs_mpich)


@pytest.fixture
def start(request, tmp_path):
    """Runs a script on three ranks; returns the reports by rank, and the finished mpiexec."""

    def run(text, *, is_deadly=False):
        script = tmp_path / "script.py"
        script.write_text(text)
        command, variables = request.param(is_deadly)
        done = subprocess.run(
            [*command, str(script), str(tmp_path)],
            env={**_environment(), **variables},
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        end = time.time()
        found = {
            int(path.stem): json.loads(path.read_text()) for path in tmp_path.glob("[0-9].json")
        }
        last = max((report["end"] for report in found.values()), default=end)
        assert end - last < QUICK_S, done.stderr
        return found, done

    return run


def _environment():
    """The test's own environment without what another launcher may have left in it."""
    prefixes = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "OMPI_", "PMI", "SHOAL_")
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(prefixes) or name == "SHOAL_TEST_RUN"
    }
    return {**kept, "OMP_NUM_THREADS": "1"}


@pytest.mark.mpi
@pytest.mark.parametrize(
    "start", [pytest.param(_open_mpi, id="openmpi"), WITH_MPICH], indirect=True
)
def test_collectives_and_worlds_one_after_the_other(start):
    found, done = start(COLLECTIVES)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(found) == [0, 1, 2]


# What becomes of ranks of Open MPI is told by the tests of faults.
@pytest.mark.mpi
@pytest.mark.parametrize(
    "start",
    [pytest.param(_open_mpi, id="openmpi", marks=pytest.mark.full), WITH_MPICH],
    indirect=True,
)
def test_a_rank_that_raises_and_one_that_is_killed(start):
    found, done = start(FAILURES, is_deadly=True)
    assert sorted(found) == [0, 2], done.stdout + done.stderr
    assert found[2]["raised"] == "boom"
    assert "rank 2 failed: ValueError: boom" in found[0]["raised"]
    for rank in (0, 2):
        culprit, reason, seconds = found[rank]["killed"]
        assert culprit == 1
        assert "died without an exception" in reason
        assert seconds < 30


def test_without_mpi4py_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BackendUnavailableError, match=r'pip install "shoal\[mpi\]"'):
        MPIBootstrap(timeout=1.0)


def test_ranks_that_mpiexec_did_not_start_are_refused():
    alone, place = SimpleNamespace(rank=0, size=1), SimpleNamespace(rank=1, size=2)
    with pytest.raises(BackendUnavailableError, match="rank 1 of 2, but to MPI it is rank 0 of 1"):
        mpi._check_position(alone, place)
