"""A user of the same host who reads all that he may: the run's secret is nowhere in it."""

from __future__ import annotations

import base64
import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import leaks
import shoal
from meeting.strangers import as_root, run_stranger
from shoal.launch.function.forkserver.forkserver import fork_server
from shoal.meeting.server import MeetingServer

pytestmark = as_root
SHOAL = str(Path(sys.executable).with_name("shoal"))
DEADLINE_S = 120
# The clock of files is a little behind.
EARLIER_S = 1

# Reads what it may of these processes, of the host's sockets and of files that are not older than
# the run, and calls the sockets that have shoal's name. Prints all of it, as hex.
SPY = """
import os, socket, sys
begin, pids = float(sys.argv[1]), sys.argv[2].split(",")
names = ("environ", "cmdline", "maps", "smaps", "mem", "auxv", "stack", "status", "stat", "comm",
         "net/unix", "net/tcp", "net/tcp6", "mountinfo")

def show(what, data):
    print(what.encode(errors="replace").hex(), data.hex())

def read(path):
    try:
        with open(path, "rb") as file:
            show(path, file.read(1 << 22))
    except (OSError, ValueError):
        pass

def read_all(folder):
    for place, _, files in os.walk(folder, onerror=None):
        for name in files:
            path = os.path.join(place, name)
            try:
                is_new = os.stat(path).st_mtime >= begin and os.path.isfile(path)
            except OSError:
                continue
            if is_new:
                show("a name", path.encode(errors="replace"))
                read(path)

for pid in pids:
    for name in names:
        read(f"/proc/{pid}/{name}")
    for folder in ("fd", "map_files", "task", "cwd", "root"):
        try:
            for name in os.listdir(f"/proc/{pid}/{folder}"):
                path = f"/proc/{pid}/{folder}/{name}"
                if folder in ("fd", "map_files"):
                    show("a link", os.readlink(path).encode())
                    read(path)
                elif folder == "task":
                    read(f"{path}/environ")
                    read(f"{path}/comm")
        except OSError:
            pass
for folder in ("/tmp", "/dev/shm", "/run", "/var/tmp"):
    read_all(folder)
for line in open("/proc/net/unix").read().splitlines():
    name = line.split()[-1]
    if "shoal" in name:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(5)
            try:
                sock.connect("\\0" + name[1:] if name[0] == "@" else name)
                show("called", name.encode())
                sock.send(b"\\2\\0\\0\\0{}")
                show("heard", sock.recv(4096))
            except OSError:
                pass
"""


def spied(begin: float, pids: list[int]) -> list[tuple[bytes, bytes]]:
    said = run_stranger(SPY, str(begin), ",".join(map(str, pids)), timeout=DEADLINE_S)
    rows = [line.partition(" ") for line in said.splitlines()]
    return [(bytes.fromhex(what), bytes.fromhex(data)) for what, _, data in rows]


def check(found: list[tuple[bytes, bytes]], hidden: list[bytes], shown: list[bytes]) -> None:
    """``shown`` is what a spy does find: else it has not looked."""
    everything = b"\n".join(what + b" " + data for what, data in found)
    for word in shown:
        assert word in everything
    assert hidden
    for secret in hidden:
        assert len(secret) >= 16
        for form in (secret, secret.hex().encode(), base64.b64encode(secret).rstrip(b"=")):
            assert form not in everything
            assert form.upper() not in everything
    assert b"called" in dict(found), "no socket of shoal's was there to be called"
    heard = [data for what, data in found if what == b"heard"]
    assert not any(heard), heard


@contextlib.contextmanager
def planted() -> Iterator[bytes]:
    """A file that anybody may read."""
    word = secrets.token_hex(16).encode()
    with tempfile.NamedTemporaryFile(dir="/tmp", prefix="shoal-test-") as file:
        file.write(word)
        file.flush()
        os.chmod(file.name, 0o644)
        yield word


SCRIPT = """
import os, sys, time
import shoal
from shoal.comm.bootstrap import bootstrap
from shoal.meeting.handshake import TOKEN_VARIABLE

known, make = [], bootstrap.world_secret
def world_secret(secret, generation):
    known.extend([secret, make(secret, generation)])
    return known[-1]
bootstrap.world_secret = world_secret

with shoal.init("gloo") as world:
    folder = sys.argv[2]
    with open(f"{folder}/draft-{world.rank}", "w") as file:
        file.write(" ".join([str(os.getpid()), *(each.hex() for each in known)]))
    os.rename(f"{folder}/draft-{world.rank}", f"{folder}/secret-{world.rank}")
    while not os.path.exists(f"{folder}/go"):
        time.sleep(0.01)
    world.barrier()
"""


def test_of_a_launch(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    begin, word = time.time() - EARLIER_S, secrets.token_hex(16)
    command = [SHOAL, "launch", "-n", "2", str(tmp_path / "train.py"), word, str(tmp_path)]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "SHOAL_TOKEN": secrets.token_hex(32)}
    with planted() as in_file, subprocess.Popen(command, env=variables) as launcher:
        try:
            said = [_read(tmp_path / f"secret-{rank}").split() for rank in range(2)]
            found = spied(begin, [launcher.pid, *(int(each[0]) for each in said)])
            (tmp_path / "go").touch()
            assert launcher.wait(DEADLINE_S) == 0
        finally:
            launcher.kill()
    hidden = [bytes.fromhex(each) for each in said[0][1:]]
    assert len(hidden) == 2
    hidden.append(variables["SHOAL_TOKEN"].encode())
    check(found, hidden, [word.encode(), in_file])


def _read(path: Path) -> str:
    deadline = time.monotonic() + DEADLINE_S
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.01)
    return path.read_text()


def wait_for_spy(folder: str) -> None:
    world = shoal.world()
    secret: Any = world.backend._control.secret  # type: ignore[attr-defined]
    draft = Path(folder) / f"draft-{world.rank}"
    draft.write_text(f"{os.getpid()} {os.getppid()} {secret.hex()}")
    draft.rename(Path(folder) / f"secret-{world.rank}")
    _read(Path(folder) / "go")
    world.barrier()


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_of_a_run(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent, which holds the server, the fork server, and the ranks."""
    fork_server()
    leaks.baseline()
    servers: list[MeetingServer] = []
    begin, make = time.time() - EARLIER_S, MeetingServer.on_one_host

    def keep(*arguments: Any) -> MeetingServer:
        servers.append(make(*arguments))
        return servers[-1]

    monkeypatch.setattr(MeetingServer, "on_one_host", keep)
    found: list[tuple[bytes, bytes]] = []
    hidden: list[bytes] = []

    def spy() -> None:
        said = [_read(tmp_path / f"secret-{rank}").split() for rank in range(2)]
        pids = {os.getpid(), *(int(pid) for each in said for pid in each[:2])}
        hidden.extend(bytes.fromhex(each[2]) for each in said)
        found.extend(spied(begin, sorted(pids)))
        (tmp_path / "go").write_text("")

    with planted() as in_file, ThreadPoolExecutor(1) as pool:
        spying = pool.submit(spy)
        shoal.run(wait_for_spy, 2, backend, args=(str(tmp_path),), timeout=DEADLINE_S)
        spying.result()
    hidden += [bytes.fromhex(server._nonce) for server in servers]
    assert len(hidden) == 3
    check(found, hidden, [in_file, b"python"])
