"""Variables that every rank starts with, however it is started: threads, and long copies.

What a user exported is kept.
"""

from __future__ import annotations

from collections.abc import Mapping

from shoal.system.libc import num_cores

_COPIES = "glibc.cpu.x86_non_temporal_threshold"
# Copies of this length or more write past the cache. By default that begins at three quarters of
# the last cache, as if no other rank used it: below that, two ranks that copied 8 MiB at once took
# 1.5 ms instead of 0.8 on the machine where it was measured.
_LONG_BYTES = 1 << 20


def tunables(env: Mapping[str, str]) -> dict[str, str]:
    """The variable that has ranks copy long tensors fast, unless the user has chosen a length.

    Other processors than x86 and other libraries than glibc ignore it.
    """
    chosen = env.get("GLIBC_TUNABLES", "")
    if _COPIES in chosen:
        return {}
    return {"GLIBC_TUNABLES": ":".join(filter(None, [chosen, f"{_COPIES}={_LONG_BYTES}"]))}


def rank_settings(ranks: int, env: Mapping[str, str]) -> dict[str, str]:
    """For each of `ranks` on this host: an equal share of the cores, and `tunables`."""
    threads = env.get("OMP_NUM_THREADS") or str(max(1, num_cores() // ranks))
    return {"OMP_NUM_THREADS": threads, **tunables(env)}


def threads_of(env: Mapping[str, str]) -> int | None:
    """What a rank's variables say, for libraries that had read them before they were set."""
    first = env.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) > 0 else None
