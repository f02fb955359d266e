"""An elastic run that is joined from another host: network namespaces joined by a cable."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from launch.elastic.test_elastic_launch import SCRIPT, at_step, counted, end_of
from launch.script.test_two_hosts import ADDRESSES, CABLE, SHOAL, hosts, ip, pytestmark

__all__ = ["hosts", "pytestmark"]


@pytest.fixture
def start(hosts, monkeypatch, tmp_path):
    """Starts a launcher on one of the two hosts."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("SHOAL_TOKEN", "a secret of this test")
    monkeypatch.setenv("HOLD", str(tmp_path / "hold"))
    (tmp_path / "hold").touch()
    started = []

    def start(host, *words):
        process = subprocess.Popen(
            ["ip", "netns", "exec", hosts[host], SHOAL, "launch", *words, SCRIPT, "5", "2", *DEEDS],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


DEEDS = ("0@2=wait", "1@2=wait", "2@3=wait")
PLACE = f"{ADDRESSES[0]}:29519"


def test_a_worker_of_another_host_joins_and_is_lost(start, tmp_path):
    process = start(0, "--elastic", "--min", "2", "--master", PLACE)
    at_step(process, 2)
    joiner = start(1, "--join", PLACE)
    ((_, pid),) = at_step(joiner, 1).values()
    os.kill(pid, signal.SIGKILL)
    assert end_of(joiner)[0] == 128 + signal.SIGKILL
    (tmp_path / "hold").unlink()
    code, out, err = end_of(process)
    assert code == 0, err
    assert counted(out) == ["0 2", "1 2"]
    assert "worker 2 joins as rank 2" in err
    assert "worker 2 (rank 2): killed by SIGKILL; nobody took its place" in err


def test_one_that_is_cut_off_ends_and_the_others_go_on(start, hosts, tmp_path, monkeypatch):
    monkeypatch.setenv("SHOAL_SILENCE_S", "6")
    process = start(0, "--elastic", "--min", "2", "--master", PLACE)
    at_step(process, 2)
    joiner = start(1, "--join", PLACE)
    at_step(joiner, 1)
    ip("-n", hosts[0], "link", "set", CABLE[0], "down")
    try:
        (tmp_path / "hold").unlink()
        code, _, err = end_of(joiner)
        assert code == 128 + signal.SIGKILL
        assert "worker 2: cut off from the run's launcher, and killed" in err
        code, out, err = end_of(process)
        assert code == 0, err
        assert counted(out) == ["0 2", "1 2"]
        assert "worker 2 (rank 2): its launcher has been silent for 6 s" in err
    finally:
        ip("-n", hosts[0], "link", "set", CABLE[0], "up")
