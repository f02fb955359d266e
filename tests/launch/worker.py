"""What children run in these tests: a module that a test writes where they can import it."""

SOURCE = """
import os, signal
from shoal.launch.function.call import decode_call
from shoal.launch.function.outcome import send_error, send_value

def main(channel, payload):
    try:
        fn, args = decode_call(payload)
        send_value(channel, fn(*args))
    except BaseException as error:
        send_error(channel, error)
        return 1
    return 0
"""
