"""Processes that are stopped are found, and those that go on are not."""

from __future__ import annotations

import os
import signal
import subprocess

from shoal.system.stopped import StoppedProcesses


def test_a_stopped_process_is_found_until_it_goes_on() -> None:
    with subprocess.Popen(["sleep", "1000"]) as process:
        try:
            found, patient = StoppedProcesses(moment=0.0), StoppedProcesses(moment=1000.0)
            assert found.among([process.pid]) == set()
            process.send_signal(signal.SIGSTOP)
            os.waitpid(process.pid, os.WUNTRACED)  # until the stop is there
            assert found.among([process.pid]) == {process.pid}
            assert patient.among([process.pid]) == set()
            process.send_signal(signal.SIGCONT)
            os.waitpid(process.pid, os.WCONTINUED)
            assert found.among([process.pid]) == set()
        finally:
            process.kill()


def test_a_process_that_is_gone_is_not_stopped() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    assert StoppedProcesses(moment=0.0).among([process.pid]) == set()
