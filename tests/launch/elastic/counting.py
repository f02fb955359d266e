"""A script for elastic launches: ranks count together, and do deeds at their steps.

counting.py STEPS SIZE [WORKER@STEP=DEED ...]: to so many steps, and until there are so many ranks.
If STEPS is 0 they go on until the file HOLD is gone. The worker SLOW sleeps in each step.
Deeds: KILL, TERM and STOP are sent to itself; `raise` raises.
`wait` at a step: nobody goes on before the file HOLD is gone, or the world is another one.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

import shoal
from shoal.comm.control.membership import RunComplete
from shoal.errors import LaunchError, MembershipChanged

NUMBER = os.environ.get("SHOAL_PERSON", "alone")
SLOW = os.environ.get("SLOW", "")
HOLD = Path(os.environ.get("HOLD", "/nowhere"))


def do(deed: str, world: Any) -> None:
    if deed == "raise":
        raise ValueError("the loss is nan")
    if deed == "wait":
        print("at", world.rank, os.getpid(), flush=True)
        while HOLD.exists() and not world.membership.wants_change():
            time.sleep(0.01)
    elif deed:
        os.kill(os.getpid(), getattr(signal, f"SIG{deed}"))


def regroup(membership: Any) -> None:
    try:
        membership.regroup()
    except LaunchError as error:
        if membership.is_leaving or isinstance(error, RunComplete):
            sys.exit(0)
        raise


def count(steps: int, size: int, deeds: dict[str, str]) -> None:
    world, step = shoal.world(), 0
    membership: Any = world.membership
    if membership.generation == 0:
        print("waits to be a member", flush=True)
        regroup(membership)
    while True:
        try:
            step = max(world.all_gather_object(step))
            if (steps or not world.agree(HOLD.exists())) and step >= steps and world.size >= size:
                break
            if NUMBER == SLOW:
                time.sleep(0.2)
            do(deeds.get(f"{NUMBER}@{step}", ""), world)
            total = world.all_reduce(torch.full((300,), float(step)))[7].item()
            assert total == step * world.size
            step += 1
            if world.agree(membership.wants_change()):
                regroup(membership)
        except MembershipChanged:
            regroup(membership)
    print("counted", world.rank, world.size, membership.generation, flush=True)


if __name__ == "__main__":
    with shoal.init(timeout=60):
        steps, size, *deeds = sys.argv[1:]
        count(int(steps), int(size), dict(deed.split("=") for deed in deeds))
