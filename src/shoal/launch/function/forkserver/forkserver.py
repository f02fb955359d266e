"""Processes that start in milliseconds, forked from a server that has torch imported.

Python's own forkserver runs the caller's `__main__` again in each child and takes environment,
directory and standard streams from the time the server started. This one calls a named function
with bytes, and takes all of them from the caller at each call. `server.py` is the other end.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Self

from shoal.errors import LaunchError
from shoal.launch.function.forkserver.child_main import flush
from shoal.launch.function.forkserver.request import (
    LOAD_COMPILER,
    SIGNAL,
    SPAWN,
    STATUS,
    Descriptors,
    Packet,
    Request,
    import_path,
    send_packet,
)
from shoal.launch.rank_settings import tunables
from shoal.system.memory_file import MemoryFile

# The first child waits for the server's imports: seconds on an idle machine, more on a busy one.
_START_TIMEOUT = 180.0
_CLOSE_TIMEOUT = 10.0

# Only `sys` is imported while the path still starts with the current directory, whose files might
# have the names of modules. `-m` would also load the server's module twice.
_BOOTSTRAP = """import sys
fd, caller, preload, *sys.path[:] = sys.argv[1:]
from shoal.launch.function.forkserver.server import serve
serve(int(fd), int(caller), preload.split())"""


class Child:
    """A running child: its pid, its channel and its end.

    `fileno()` becomes readable when the child has ended, so a child can be given to a selector.
    Closing the handle of a child that still runs kills it.

    Example:
        >>> with fork_server().spawn("package.module:function", b"payload", os.environ) as child:
        ...     child.channel.recv(100)
        ...     child.wait(10.0)
    """

    def __init__(
        self,
        channel: socket.socket,
        status: int,
        send_signal: Callable[[int], None],
        on_lost: Callable[[], LaunchError],
    ) -> None:
        """Wraps the caller's ends of channel and status pipe; `await_pid` completes it.

        ``on_lost`` is called when it shows that the server itself is gone, and says it in words.
        """
        self.channel = channel
        self.pid = 0
        self.exit_code: int | None = None
        self._status = open(status, "rb", buffering=0)  # noqa: SIM115 (closed by close)
        self._send_signal = send_signal
        self._on_lost = on_lost
        self._lost: LaunchError | None = None

    def await_pid(self, timeout: float) -> None:
        """Waits until the server has forked the child."""
        if not self._readable(timeout):
            raise LaunchError(f"the forkserver did not start a process within {timeout:g} s")
        pid = self._read_status()
        if pid is None:
            raise LaunchError(
                "the forkserver ended, or has no descriptors left, before it could start a "
                "process; what it wrote to standard error says why"
            )
        if pid < 0:
            raise OSError(-pid, f"the forkserver cannot fork: {os.strerror(-pid)}")
        self.pid = pid

    def fileno(self) -> int:
        """A descriptor that becomes readable when the child has ended."""
        return self._status.fileno()

    def wait(self, timeout: float | None = None) -> int | None:
        """The exit code, minus the signal's number if one ended it; None while it runs."""
        if self.exit_code is None and self._readable(timeout):
            code = self._read_status()
            # Without a server there is no code, but its children were killed with it.
            self.exit_code = -signal.SIGKILL if code is None else code
        return self.exit_code

    def lost(self) -> LaunchError | None:
        """What to say of a child that ended because its server did; None of any other."""
        return self._lost

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Sends a signal; nothing happens to a child that has ended."""
        if self.exit_code is None:
            self._send_signal(number)

    def close(self) -> None:
        """Gives the descriptors back, which kills a child that still runs."""
        self.channel.close()
        self._status.close()

    def _readable(self, timeout: float | None) -> bool:
        poll = select.poll()
        poll.register(self._status, select.POLLIN)
        return bool(poll.poll(None if timeout is None else max(0.0, timeout) * 1000))

    def _read_status(self) -> int | None:
        """The next number the server wrote, or None if there is no server any more."""
        data = self._status.read(STATUS.size)
        if not data:
            self._lost = self._on_lost()
            return None
        number: int = STATUS.unpack(data)[0]
        return number

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class ForkServer:
    """One server process and the socket to it; `fork_server()` gives the process's own.

    Any number of threads may spawn at once.

    Example:
        >>> server = ForkServer()
        >>> child = server.spawn("package.module:function", b"payload", os.environ)
        >>> child.wait()
        0
    """

    def __init__(self, preload: Iterable[str] = ()) -> None:
        """Starts the server, which imports (`preload` too) while the caller goes on."""
        if sys.platform != "linux":
            raise LaunchError(
                f"ranks as processes need Linux (memfd, prctl), and this is {sys.platform}; "
                'use backend="memory" here'
            )
        self._owner = os.getpid()
        self._serials = itertools.count(1)
        self._lost = threading.Event()
        self._has_compiler = False
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                self._process = _start(theirs.fileno(), preload)
        except BaseException:
            self._control.close()
            raise

    @property
    def alive(self) -> bool:
        """Whether this process may use the server: it runs, and no fork lies between.

        A process that was killed closes its descriptors before it can be waited for, so what they
        tell counts as well.
        """
        ours = self._owner == os.getpid()
        return ours and not self._lost.is_set() and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self._process.pid

    def spawn(
        self,
        entry: str,
        payload: bytes | MemoryFile,
        env: Mapping[str, str],
        *,
        streams: tuple[int, int, int] = (0, 1, 2),
    ) -> Child:
        """Starts a process that calls `entry(channel, payload)` and exits with what it returns.

        Args:
            entry: Where the function is, as `module:function`.
            payload: Any number of bytes; several children may share one file.
            env: The child's whole environment.
            streams: Descriptors of the caller that become the child's 0, 1 and 2.
        """
        if self._owner != os.getpid():
            raise LaunchError("this forkserver belongs to the process that forked this one")
        flush()
        serial = next(self._serials)
        with contextlib.ExitStack() as stack:
            child, theirs = self._connect(serial, stack)
            request = Request.of_caller(entry, env)
            fds = _descriptors(theirs, request, payload, streams, stack)
            self._send(Packet(SPAWN, serial, descriptors=fds))
        with _closing_on_error(child):
            child.await_pid(_START_TIMEOUT)
        return child

    def load_compiler(self) -> None:
        """Has the server import torch's compiler, once, while the caller goes on.

        torch needs it for any optimizer, and it takes a second: else of every child. A spawn that
        follows waits for it.
        """
        if not self._has_compiler:
            self._has_compiler = True
            self._send(Packet(LOAD_COMPILER, 0))

    def close(self) -> None:
        """Ends the server and with it every child; does nothing in a forked process."""
        self._control.close()
        if self._owner != os.getpid():
            self._process.returncode = 0  # not our child: keeps Popen from warning about it
            return
        try:
            self._process.wait(_CLOSE_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _connect(self, serial: int, stack: contextlib.ExitStack) -> tuple[Child, tuple[int, int]]:
        """The caller's handle, and the child's ends of the status pipe and the channel."""
        ours, theirs = socket.socketpair()
        stack.enter_context(theirs)
        with _closing_on_error(ours):
            read, write = os.pipe()
        stack.callback(os.close, write)
        child = Child(ours, read, lambda number: self._signal(serial, number), self._lose)
        stack.push(lambda kind, error, traceback: child.close() if kind else None)
        return child, (write, theirs.fileno())

    def _signal(self, serial: int, number: int) -> None:
        """Signals a child through the server, which alone knows whether the pid is still its."""
        with contextlib.suppress(LaunchError):  # a dead server's children are dead
            self._send(Packet(SIGNAL, serial, signal=number))

    def _lose(self) -> LaunchError:
        self._lost.set()
        return LaunchError(
            f"the fork server (pid {self.pid}), which starts the ranks, ended, and all its ranks "
            "with it. No rank is to blame: someone killed it, or the system did; look for 'out of "
            "memory' in dmesg. The next call starts another."
        )

    def _send(self, packet: Packet) -> None:
        try:
            send_packet(self._control, packet)
        except OSError as error:
            self._lost.set()
            raise LaunchError(f"the forkserver (pid {self.pid}) is gone: {error}") from error


def _start(control: int, preload: Iterable[str]) -> subprocess.Popen[bytes]:
    arguments = [str(control), str(os.getpid()), " ".join(preload), *import_path()]
    command = [sys.executable, "-c", _BOOTSTRAP, *arguments]
    # Thread counts are each child's own affair (OMP_NUM_THREADS at its start); here they would be
    # frozen into the libraries, and OpenBLAS would start threads on import, before the forks.
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    env |= {"OPENBLAS_NUM_THREADS": "1", **tunables(os.environ)}
    return subprocess.Popen(
        command,
        pass_fds=[control],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )


def _descriptors(
    theirs: tuple[int, int],
    request: Request,
    payload: bytes | MemoryFile,
    streams: tuple[int, int, int],
    stack: contextlib.ExitStack,
) -> Descriptors:
    """All that a child gets; the caller's copies are closed with `stack`."""
    if isinstance(payload, bytes):
        payload = stack.enter_context(MemoryFile(payload))
    header = stack.enter_context(MemoryFile(request.encode()))
    # A descriptor, because the directory may have been moved or removed since it became ours.
    cwd = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    stack.callback(os.close, cwd)
    open_streams = [_usable(fd, stack) for fd in streams]
    return Descriptors(*theirs, header.fileno(), payload.fileno(), cwd, *open_streams)


def _usable(fd: int, stack: contextlib.ExitStack) -> int:
    """The descriptor, or the null device in place of one that is closed (as in daemons)."""
    try:
        os.fstat(fd)
    except OSError:
        fd = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        stack.callback(os.close, fd)
    return fd


@contextlib.contextmanager
def _closing_on_error(resource: Child | socket.socket) -> Iterator[None]:
    try:
        yield
    except BaseException:
        resource.close()
        raise


_lock = threading.Lock()
_current: ForkServer | None = None
_wanted: dict[str, None] = {}


def preload(*modules: str) -> None:
    """Has servers that start from now on import `modules`, so that no child has to.

    Only for modules that start no thread and run no torch operation when imported.
    """
    _wanted.update(dict.fromkeys(modules))


def fork_server() -> ForkServer:
    """This process's server, started on first use and again if it was lost."""
    global _current
    with _lock:
        if _current is not None and not _current.alive:
            _current.close()
            _current = None
        if _current is None:
            _current = ForkServer(_wanted)
        return _current


def shutdown() -> None:
    """Ends this process's server, if it has one; a later use starts another."""
    global _current
    with _lock:
        server, _current = _current, None
    if server is not None:
        server.close()


def _forget_in_fork() -> None:
    """Leaves the server to the parent: its socket must close with the parent's copy."""
    global _lock
    _lock = threading.Lock()  # another thread may have held it while this process was forked
    shutdown()


os.register_at_fork(after_in_child=_forget_in_fork)
atexit.register(shutdown)
