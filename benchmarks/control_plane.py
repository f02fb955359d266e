"""What an exchange of headers over sockets takes: all pairs against rounds along a graph.

Ranks are processes of this host with a control plane of sockets between them, as between hosts.
Both ways are timed in turns at each size. On a host with fewer cores than ranks the work of all
ranks adds up, so the times say which way has less to do, not how long it takes between hosts.

    python benchmarks/control_plane.py [--quick] [--ranks 2 4 8] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from report import environment
from rich.console import Console
from rich.table import Table
from shoal.comm.bootstrap.store import StoreBootstrap, store_for_one_host

import shoal
from shoal.comm import Backend
from shoal.comm.control.patience import Patience
from shoal.comm.control.sockets import topology
from shoal.comm.control.sockets.sockets import SocketControl

SIZES = (2, 4, 8, 12, 16, 24, 32)
TIMEOUT_S = 120.0
HEADER = b"a header of the usual length: all_gather(float32[rows]) at train.py:42".ljust(160)
RESULTS = Path(__file__).parent / "results" / "control_plane.json"
WAYS = {"all pairs": sys.maxsize, "graph": 1}


def measure(repetitions: int, count: int) -> dict[str, Any]:
    """Called on every rank."""
    backend = shoal.world().backend
    controls, calls = {}, {}
    for way, largest in WAYS.items():
        topology.ALL_PAIRS_RANKS = largest
        controls[way] = control = connect(backend)
        calls[way] = exchanges(control, count)
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(repetitions + 1):
        for way, call in calls.items():
            backend.barrier()
            begin = time.perf_counter()
            call()
            times[way].append((time.perf_counter() - begin) / count)
    about = {
        way: {
            "connections": control.num_connections,
            "frames": control.num_sent.total() / (count * (repetitions + 1)),
            "median_s": statistics.median(times[way][1:]),
        }
        for way, control in controls.items()
    }
    backend.barrier()
    for control in controls.values():
        control.leave()
        control.close()
    return {"ranks": backend.size, **about}


def connect(backend: Backend) -> SocketControl:
    """A control plane as between hosts, though these ranks are on one."""
    if backend.rank == 0:
        store, port = store_for_one_host()
        backend.broadcast_object(port)
    else:
        store = dist.TCPStore("127.0.0.1", backend.broadcast_object(), is_master=False)
    control = SocketControl.connect(StoreBootstrap(store, backend.rank, backend.size, TIMEOUT_S))
    backend.barrier()  # the store ends with its first rank's reference to it
    return control


def exchanges(control: SocketControl, count: int) -> Callable[[], None]:
    """As many exchanges of one header, one after the other."""
    ranks = range(control.size)
    channel = control.channel(0, ranks)
    number = 0

    def run() -> None:
        nonlocal number
        for _ in range(count):
            number += 1
            channel.exchange(
                number, HEADER, Patience(control, lambda: "the benchmark", ranks, TIMEOUT_S)
            )

    return run


def table(rows: list[dict[str, Any]]) -> Table:
    """One line for each size."""
    result = Table(title="An exchange of headers over sockets", title_justify="left")
    for name in ("ranks", *(f"{what}, {way}" for way in WAYS
                            for what in ("connections", "frames", "time"))):  # fmt: skip
        result.add_column(name, justify="right")
    for row in rows:
        cells = [str(row["ranks"])]
        for way in WAYS:
            about = row[way]
            cells += [str(about["connections"]), f"{about['frames']:.1f}"]
            cells += [f"{about['median_s'] * 1e6:.0f} us"]
        result.add_row(*cells)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few repetitions: does it run?")
    parser.add_argument("--ranks", type=int, nargs="+", default=SIZES, help="sizes of worlds")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where results go")
    options = parser.parse_args()
    repetitions, count = (3, 10) if options.quick else (15, 50)
    about = environment()
    rows = [shoal.run(measure, size, "shm", args=(repetitions, count))[0] for size in options.ranks]
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table(rows))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"environment": about, "results": rows}, indent=1) + "\n")
    console.print(f"written: {options.json}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
