"""The forkserver's own process: imports once, then forks a child per request.

Everything that is slow to import is imported before the first fork. The server runs no torch
operation and has one thread only, because a fork copies no other: a child of a process with an
OpenMP pool would wait for threads that do not exist.

It lives exactly as long as its caller, and its children exactly as long as both: when the caller
is gone the server kills them, when the server is gone the kernel does, and when the caller drops
its handle of one child (the read end of the status pipe), that child is killed too.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

from shoal.launch.function.forkserver import child_main
from shoal.launch.function.forkserver.request import (
    LOAD_COMPILER,
    SIGNAL,
    SPAWN,
    STATUS,
    Descriptors,
    Packet,
    receive_packet,
)
from shoal.torch_internals.compiler_module import COMPILER

# What a rank needs anyway. What is missing here is reported by the child that needs it.
PRELOADED = ("torch", "numpy.random", "cloudpickle", "shoal.api", "shoal.launch.function.worker")


@dataclass(frozen=True)
class _RunningChild:
    pid: int
    status: int


class Server:
    """Waits for requests, deaths of children and the end of the caller, all in one poll."""

    def __init__(self, control: socket.socket, caller: int) -> None:
        self._control = control
        self._children: dict[int, _RunningChild] = {}
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll.register(self._wake_read, select.POLLIN)
        self._caller = self._watch_caller(caller)

    def run(self) -> None:
        """Serves until the caller is gone, then kills what is left."""
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        while self._serve_once():
            pass
        self._kill_all()

    def _serve_once(self) -> bool:
        """Handles what one poll brings; False once the caller is gone."""
        ready = {fd for fd, _ in self._poll.poll()}
        # Dropped handles first: later steps close and reuse the numbers of descriptors.
        self._kill_dropped(ready)
        if self._wake_read in ready:
            self._reap()
        if self._caller in ready:
            return False
        return self._control.fileno() not in ready or self._answer()

    def _watch_caller(self, caller: int) -> int:
        """A descriptor that becomes readable when the caller ends, or -1 without pidfds.

        The socket tells the same, except while a process that the caller forked holds a copy.
        """
        try:
            fd = os.pidfd_open(caller)
        except OSError:
            return -1
        self._poll.register(fd, select.POLLIN)
        return fd

    def _answer(self) -> bool:
        """Does what the next packet asks for; False when there will be no more."""
        try:
            packet = receive_packet(self._control)
        except ConnectionError:
            return False
        if packet is None:
            return False
        if packet.kind == SPAWN and packet.descriptors is not None:
            self._spawn(packet.serial, packet.descriptors)
        elif packet.kind == SIGNAL:
            self._signal(packet)
        elif packet.kind == LOAD_COMPILER:
            _preload([COMPILER])
        return True

    def _spawn(self, serial: int, descriptors: Descriptors) -> None:
        server = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            pid = -(error.errno or 1)
        if pid == 0:
            self._leave_to_child(descriptors.status)
            child_main.run(descriptors, server)
        for fd in descriptors[1:]:
            os.close(fd)
        _tell(descriptors.status, pid)
        if pid < 0:
            os.close(descriptors.status)
            return
        self._children[serial] = _RunningChild(pid, descriptors.status)
        self._poll.register(descriptors.status, 0)  # no event but the end of its reader

    def _leave_to_child(self, status: int) -> None:
        signal.set_wakeup_fd(-1)
        self._control.close()
        statuses = [child.status for child in self._children.values()]
        for fd in (self._wake_read, self._wake_write, self._caller, status, *statuses):
            if fd >= 0:
                os.close(fd)

    def _signal(self, packet: Packet) -> None:
        """Signals a child that is still ours: its pid cannot have gone to another process."""
        child = self._children.get(packet.serial)
        if child is not None:
            os.kill(child.pid, packet.signal)

    def _kill_dropped(self, ready: set[int]) -> None:
        for child in self._children.values():
            if child.status in ready:
                self._poll.unregister(child.status)
                os.kill(child.pid, signal.SIGKILL)

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wake_read, 4096):
                pass
        serials = {child.pid: serial for serial, child in self._children.items()}
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if found[0] in serials:
                    self._report_exit(self._children.pop(serials[found[0]]), found[1])

    def _report_exit(self, child: _RunningChild, wait_status: int) -> None:
        with contextlib.suppress(KeyError):
            self._poll.unregister(child.status)
        _tell(child.status, os.waitstatus_to_exitcode(wait_status))
        os.close(child.status)

    def _kill_all(self) -> None:
        for child in self._children.values():
            os.kill(child.pid, signal.SIGKILL)
        for child in self._children.values():
            os.waitpid(child.pid, 0)


def serve(control_fd: int, caller: int, preload: Iterable[str]) -> None:
    """The server's main function; `control_fd` is its end of the caller's socket pair."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the caller to act on
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    server = Server(socket.socket(fileno=control_fd), caller)
    os.set_inheritable(control_fd, False)
    _preload([*PRELOADED, *preload])
    server.run()
    os._exit(0)


def _preload(names: Iterable[str]) -> None:
    """Imports what children need, and keeps the collector from touching (copying) its pages."""
    for name in names:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    _disarm_finalizers()
    gc.collect()
    gc.disable()
    gc.freeze()


def _disarm_finalizers() -> None:
    """Keeps children from taking torch's operator libraries apart at exit, which costs 30 ms."""
    registry: Iterable[weakref.finalize[..., object]] = getattr(weakref.finalize, "_registry", ())
    for finalizer in registry:
        finalizer.atexit = False


def _tell(status: int, number: int) -> None:
    """Writes to a status pipe, which always has room; a reader that is gone does not matter."""
    with contextlib.suppress(BrokenPipeError):
        os.write(status, STATUS.pack(number))
