"""A user who has nothing to do with the run: a process of another uid, without any capability."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

STRANGER = 65534
SOURCE = str(Path(__file__).resolve().parents[2] / "src")

as_root = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="to play another user one must be root"),
]

# Calls TCP ports of this host so many times, and tells how many calls were taken. Says nothing,
# half of something, garbage, or what Gloo and shoal say first. Some hang up, some reset, one in
# twelve stays until the test ends it. Gives up on ports that take no call for so many seconds;
# with 0 it does not wait for them.
CROWD = """
import select, socket, struct, sys
count, seconds, ports = int(sys.argv[1]), float(sys.argv[2]), list(map(int, sys.argv[3:]))
words = [b"", b"GET / HTTP/1.0\\r\\n\\r\\n", b"\\xff" * 4096, b"ab", struct.pack("<Q", 77),
         b"shoal\\0\\0\\1" + struct.pack("<2I", 1, 0) + bytes(32), b"shoal\\0\\0\\1"]
taken, kept = 0, []

def call(number):
    sock = socket.socket()
    sock.setblocking(False)
    sock.connect_ex(("127.0.0.1", ports[number % len(ports)]))
    return sock

def await_all(socks):
    poll = select.poll()
    for sock in socks:
        poll.register(sock, select.POLLOUT)
    answered = set()
    while len(answered) < len(socks):
        found = poll.poll(1000 * seconds)
        for fd, _ in found:
            answered.add(fd)
            poll.unregister(fd)
        if not found:
            return seconds == 0
    return True

for begin in range(0, count, 10):
    numbers = range(begin, min(begin + 10, count))
    socks = [call(number) for number in numbers]
    if not await_all(socks):
        break
    for number, sock in zip(numbers, socks):
        try:
            sock.send(words[number % len(words)])
            taken += 1
        except OSError:
            pass
        if number % 12 == 0:
            kept.append(sock)
            continue
        if number % 2:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()
print(taken, flush=True)
sys.stdin.read()
"""


def start_stranger(body: str, *arguments: str) -> subprocess.Popen[str]:
    """Runs Python as another user, without a library of ours, until the test ends it."""
    return subprocess.Popen(
        ["/usr/bin/env", "-i", _python(), "-I", "-c", textwrap.dedent(body), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        user=STRANGER,
        group=STRANGER,
        extra_groups=[],
        cwd="/",
    )


def run_stranger(body: str, *arguments: str, timeout: float = 50) -> str:
    """What a stranger printed, once it has ended."""
    process = start_stranger(body, *arguments)
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, err
    return out


def end(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


@contextlib.contextmanager
def recorder(place: tuple[str, int] | None) -> Iterator[tuple[int, bytearray]]:
    """A port in front of ``place``, and what who calls there says first; for one connection."""
    overheard = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def relay() -> None:
            guest, _ = listener.accept()
            target = socket.create_connection(place, 20)
            with guest, target:
                back = threading.Thread(target=_pump, args=(target, guest, None))
                back.start()
                _pump(guest, target, overheard)
                back.join()

        thread = threading.Thread(target=relay)
        thread.start()
        yield listener.getsockname()[1], overheard
        thread.join()


def _pump(source: socket.socket, target: socket.socket, kept: bytearray | None) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(4096):
            if kept is not None:
                kept += data
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


def _python() -> str:
    """One that another user may run: ours may lie in root's home."""
    for path in ("/usr/bin/python3", sys.executable):
        done = subprocess.run(
            [path, "-I", "-c", ""], user=STRANGER, group=STRANGER, cwd="/", check=False,
            capture_output=True,
        )  # fmt: skip
        if done.returncode == 0:
            return path
    pytest.skip("no Python that another user may run")
