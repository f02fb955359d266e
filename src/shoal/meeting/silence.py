"""How long somebody on another host may be silent until it counts as dead.

A host that vanishes closes no connection. So whoever must be known to live says something now and
then: ranks to each other, and launchers to the holder of an elastic run.
"""

from __future__ import annotations

import os

from shoal.errors import ShoalError

SILENCE_S = 10.0
SILENCE_VARIABLE = "SHOAL_SILENCE_S"


def silence_s() -> float:
    """What the user has set, or the default."""
    text = os.environ.get(SILENCE_VARIABLE)
    try:
        found = SILENCE_S if text is None else float(text)
    except ValueError:
        found = 0.0
    if not found > 0:
        raise ShoalError(f"{SILENCE_VARIABLE} must be a number of seconds above 0, not {text!r}")
    return found
