"""An exception as a reason that other ranks can show."""

from __future__ import annotations

from shoal.errors import PeerError
from shoal.system.site import error_site


def describe(error: BaseException) -> str:
    """Type, text and place of an exception; of a `PeerError` what it passes on."""
    if isinstance(error, PeerError):
        return error.reason
    return f"{type(error).__name__}: {error} ({error_site(error.__traceback__)})"
