"""Hosts whose loopback is odd: ranks work, or the user is told in his own words, at once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SHOAL = str(Path(sys.executable).with_name("shoal"))
DEADLINE_S = 150  # a start of Python and torch, and far less than ranks wait for each other

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
    pytest.mark.skipif(shutil.which("ip") is None, reason="network namespaces need iproute2"),
]

# What is done to the loopback of a new namespace, which is down at first.
KINDS = {
    "IPv6 only": ["link set lo up", "addr del 127.0.0.1/8 dev lo"],
    "IPv4 only": ["link set lo up", "-6 addr flush dev lo"],
    "down": [],
    "down again": ["link set lo up", "link set lo down"],
    "without an address": ["link set lo up", "addr flush dev lo"],
}
WORKING = ("IPv6 only", "IPv4 only")

RUN = """
import shoal, sys, torch

def total():
    return shoal.world().all_reduce(torch.ones(2)).tolist()

for backend in ("shm", "gloo"):
    try:
        print(backend, shoal.run(total, ranks=2, backend=backend, timeout=600), flush=True)
    except shoal.ShoalError as error:
        print(backend, type(error).__name__, error, flush=True)
"""

SCRIPT = """
import shoal, torch
with shoal.init("gloo") as world:
    print("TOTAL", world.all_reduce(torch.ones(2)).tolist())
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


@pytest.fixture
def namespace() -> Iterator[str]:
    name = f"shoal{os.getpid()}odd"
    try:
        ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces cannot be made here: {error.stderr.decode().strip()}")
    try:
        yield name
    finally:
        ip("netns", "del", name)


def kinds(*usual: str) -> list[object]:
    return [pytest.param(each, marks=[] if each in usual else pytest.mark.full) for each in KINDS]


@pytest.fixture
def kind(request: pytest.FixtureRequest, namespace: str) -> str:
    for words in KINDS[request.param]:
        ip("-n", namespace, *words.split())
    return str(request.param)


def execute(namespace: str, *words: str, **variables: str) -> str:
    """What a command there said; it must not have waited for a rank's timeout."""
    done = subprocess.run(
        ["ip", "netns", "exec", namespace, *words],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        timeout=DEADLINE_S, env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
    )  # fmt: skip
    return done.stdout


def check(kind: str, text: str, good: str) -> None:
    if kind in WORKING:
        assert good in text
    else:
        assert "backend='gloo' needs the loopback interface" in text
        assert "ip link set lo up" in text
        assert "enforce fail" not in text


@pytest.mark.parametrize("kind", kinds("IPv6 only", "down again"), indirect=True)
def test_run(kind: str, namespace: str, tmp_path: Path) -> None:
    path = tmp_path / "run.py"
    path.write_text(RUN)
    found = execute(namespace, sys.executable, str(path))
    shm, _, gloo = found.partition("\n")
    assert shm == "shm [[2.0, 2.0], [2.0, 2.0]]"
    check(kind, gloo, "gloo [[2.0, 2.0], [2.0, 2.0]]")


@pytest.mark.parametrize("kind", kinds("down"), indirect=True)
def test_launch(kind: str, namespace: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    found = execute(namespace, SHOAL, "launch", "-n", "2", "--backend", "gloo", str(path))
    check(kind, found, "TOTAL [2.0, 2.0]")


def test_a_host_whose_name_does_not_resolve(namespace: str, tmp_path: Path) -> None:
    ip("-n", namespace, "link", "set", "lo", "up")
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    renamed = f"hostname nosuch.invalid && exec {SHOAL} launch -n 2 {path}"
    found = execute(namespace, "unshare", "-u", "sh", "-c", renamed)
    assert found.count("TOTAL [2.0, 2.0]") == 2, found


@pytest.mark.parametrize("node", [pytest.param("0", marks=pytest.mark.full), "1"])
def test_a_master_whose_name_does_not_resolve(node: str, namespace: str, tmp_path: Path) -> None:
    ip("-n", namespace, "link", "set", "lo", "up")
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    found = execute(
        namespace, SHOAL, "launch", "-n", "1", "--nodes", "2", "--node-rank", node,
        "--master", "nosuch.invalid:29511", str(path),
    )  # fmt: skip
    assert "its name does not resolve (tcp:nosuch.invalid:29511" in found
    assert "--master" in found
