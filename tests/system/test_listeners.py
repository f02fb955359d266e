"""Listeners of this process: found by descriptor, made deaf, made to hear again."""

from __future__ import annotations

import os
import socket
import sys

import pytest

from shoal.system import listeners

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")


@pytest.fixture(params=[(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")], ids=str)
def listener(request: pytest.FixtureRequest):
    family, host = request.param
    try:
        listener = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip(f"this host has no {host}")
    with listener:
        yield listener


def is_heard(listener: socket.socket, seconds: float = 0.2) -> bool:
    try:
        socket.create_connection(listener.getsockname()[:2], seconds).close()
    except TimeoutError:
        return False
    return True


def test_only_listeners_are_found(listener: socket.socket) -> None:
    found = listeners.tcp_listeners()
    assert (listener.fileno(), os.fstat(listener.fileno()).st_ino) in found
    with socket.socket() as silent, socket.socket(socket.AF_UNIX) as local:
        local.bind(f"\0shoal-test-{os.getpid()}")
        local.listen()
        assert listeners.tcp_listeners() == found
        assert silent.fileno() not in dict(found)


def test_a_deaf_listener_hears_again(listener: socket.socket) -> None:
    assert is_heard(listener, 10)
    assert listeners.hear_nobody(listener.fileno())
    assert not is_heard(listener)
    assert listeners.hear_all(listener.fileno())
    assert is_heard(listener, 10)


def test_who_is_connected_stays_connected(listener: socket.socket) -> None:
    with socket.create_connection(listener.getsockname()[:2], 10) as guest:
        host, _ = listener.accept()
        with host:
            assert listeners.num_callers(listener.fileno()) == 1
            assert listeners.hear_nobody(listener.fileno())
            guest.sendall(b"still here")
            host.settimeout(10)
            assert host.recv(100) == b"still here"
        assert listeners.num_callers(listener.fileno()) == 0


def test_a_descriptor_that_is_anothers_now_is_noticed() -> None:
    with socket.socket() as sock:
        fd, inode = sock.fileno(), os.fstat(sock.fileno()).st_ino
        assert listeners.is_still(fd, inode)
        assert not listeners.is_still(fd, inode + 1)
    assert not listeners.is_still(fd, inode)


def test_no_socket_is_a_listener_that_can_be_changed() -> None:
    with open(os.devnull) as file:
        assert not listeners.hear_nobody(file.fileno())
        assert not listeners.hear_all(file.fileno())
