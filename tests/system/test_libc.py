"""What the C library is asked for does what it says."""

import ctypes
import os
import signal
import subprocess
import sys

import pytest

from shoal.system import libc

CHILD = """
import os, subprocess, sys, time
from shoal.system import libc
parent = subprocess.Popen(
    [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(1000)"],
    preexec_fn=libc.killed_with(os.getpid()),
)
print(parent.pid, flush=True)
time.sleep(1000)
"""


def test_a_process_dies_with_its_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(next(line for line in parent.stdout if line.strip().isdecimal()))
    fd = os.pidfd_open(pid)
    try:
        parent.send_signal(signal.SIGKILL)
        parent.communicate()  # until the child, which has the same stdout, is gone
    finally:
        os.close(fd)


def test_memory_of_a_process_is_read() -> None:
    source = ctypes.create_string_buffer(b"seven", 5)
    target = ctypes.create_string_buffer(5)
    addresses = ctypes.addressof(source), ctypes.addressof(target)
    try:
        libc.read_process_memory(os.getpid(), *addresses, 5)
    except OSError:
        pytest.skip("the system forbids it")
    assert target.raw == b"seven"


def test_memory_that_is_not_there_is_an_error() -> None:
    target = ctypes.create_string_buffer(5)
    with pytest.raises(OSError, match=f"memory of process {os.getpid()}"):
        libc.read_process_memory(os.getpid(), 8, ctypes.addressof(target), 5)
