"""A launch across two hosts: network namespaces joined by a cable, made and removed here."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SHOAL = str(Path(sys.executable).with_name("shoal"))
DEADLINE_S = 150
# A network of our own inside the namespaces; nothing outside them is reached.
ADDRESSES = ("10.231.77.1", "10.231.77.2")
NAMES = (f"shoal{os.getpid()}a", f"shoal{os.getpid()}b")
CABLE = (f"sh{os.getpid()}a"[-15:], f"sh{os.getpid()}b"[-15:])

SCRIPT = """
import atexit, os, signal, subprocess, sys, time
import torch
import shoal

atexit.register(lambda: print("ENDED", time.time(), flush=True))

with shoal.init() as world:
    assert world.backend.name == "gloo", world.backend.name
    total = world.all_reduce(torch.tensor([world.rank + 1.0])).item()
    rows = world.all_gather(torch.full((world.rank + 1, 2), float(world.rank)))
    print("RESULT", world.rank, world.size, total, rows.shape[0], flush=True)
    world.barrier()
    if "kill" in sys.argv and world.rank == world.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if "cut" in sys.argv and world.rank == 0:
        subprocess.run(["ip", "link", "set", sys.argv[2], "down"], check=True)
    if "mismatch" in sys.argv:
        world.all_reduce(torch.ones(2 + (world.rank == 1)))
    for _ in range(3):  # of the first, all may have been on their way when the cable was cut
        world.barrier()
"""

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
    pytest.mark.skipif(shutil.which("ip") is None, reason="network namespaces need iproute2"),
]


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


@pytest.fixture(scope="module")
def hosts():
    try:
        for name in NAMES:
            ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces cannot be made here: {error.stderr.decode().strip()}")
    try:
        ip("link", "add", CABLE[0], "type", "veth", "peer", "name", CABLE[1])
        for name, end, address in zip(NAMES, CABLE, ADDRESSES, strict=True):
            ip("link", "set", end, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield NAMES
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "del", name], check=False, timeout=20)


def launch(hosts, script, *arguments, ranks=1):
    """Runs so many ranks on each host; returns exit codes and outputs by host."""
    processes = [
        subprocess.Popen(
            [
                *("ip", "netns", "exec", name, SHOAL, "launch", "-n", str(ranks), "--nodes", "2"),
                *("--node-rank", str(node), "--master", f"{ADDRESSES[0]}:29517"),
                *(str(script), *arguments),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "SHOAL_SILENCE_S": "10"},
            start_new_session=True,
        )
        for node, name in enumerate(hosts)
    ]
    try:
        outputs = [process.communicate(timeout=DEADLINE_S)[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return [process.returncode for process in processes], outputs


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_two_hosts_find_each_other(hosts, script):
    codes, outputs = launch(hosts, script, ranks=2)
    assert codes == [0, 0], outputs
    lines = [line for output in outputs for line in output.splitlines() if "RESULT" in line]
    found = sorted(line.partition("RESULT ")[2] for line in lines)
    assert found == [f"{rank} 4 10.0 10" for rank in range(4)]


def test_a_rank_killed_on_one_host_is_named_on_the_other(hosts, script):
    codes, outputs = launch(hosts, script, "kill")
    assert all(codes), outputs
    assert "rank 1 failed" in outputs[0]


@pytest.mark.full
def test_a_mismatch_between_hosts_is_an_error_on_both(hosts, script):
    codes, outputs = launch(hosts, script, "mismatch")
    assert all(codes), outputs
    assert all("MismatchError" in output for output in outputs), outputs


def test_launchers_end_with_their_ranks_when_the_cable_is_cut(hosts, script):
    try:
        codes, outputs = launch(hosts, script, "cut", CABLE[0])
    finally:
        ip("-n", hosts[0], "link", "set", CABLE[0], "up")
    ended = time.time()
    assert all(codes), outputs
    assert all("PeerError" in output for output in outputs), outputs
    last = max(float(word) for output in outputs for word in re.findall(r"ENDED (\S+)", output))
    assert ended - last < 30.0
