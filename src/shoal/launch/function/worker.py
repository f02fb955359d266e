"""What a process that `shoal.run` started does: join the world, call the function, report."""

from __future__ import annotations

import os
import socket
import traceback

from shoal.comm.world import set_current
from shoal.launch.function.call import decode_call
from shoal.launch.function.outcome import send_error, send_value
from shoal.launch.joining.join import join, report_absence
from shoal.launch.joining.process_membership import end_membership


def main(channel: socket.socket, payload: bytes) -> int:
    """Runs the call on this rank and sends what became of it; returns the exit code."""
    timeout = float(os.environ["SHOAL_TIMEOUT"])
    try:
        fn, args = decode_call(payload)
        world = join(os.environ["SHOAL_BACKEND"], timeout)
    except BaseException as error:
        report_absence(os.environ["SHOAL_BACKEND"], error)
        send_error(channel, error)
        return 1
    set_current(world, process_wide=True)
    rank = os.getpid()
    try:
        value = fn(*args)
        if os.getpid() != rank:
            return 0
        world.shutdown()
        end_membership()
        send_value(channel, value)
    except BaseException as error:
        if os.getpid() != rank:  # a child that the user forked ends by itself
            raise
        # The others first: they may be waiting, and the report can be long. But the text before
        # that: who reports first counts as the first to fail, and they are quick to follow.
        text = "".join(traceback.format_exception(error))
        world.fail(error)
        send_error(channel, error, text)
        return 1
    finally:
        world.shutdown()
    return 0
