"""A tensor behind a frame: what the frame says of it, and memory for it on the other side.

Frames between hosts are proven; the digest in one proves the bytes that follow it.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Any

import torch
from torch import Tensor

from shoal.meeting.wire import WireError

READY = {"ready": True}
"""The answer to a request that has values: now they may come."""


def description(tensor: Tensor, memory: memoryview, *, is_one_host: bool) -> dict[str, Any]:
    """What a frame says of the values that follow it."""
    said: dict[str, Any] = {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "device": tensor.device.type,
        "bytes": len(memory),
    }
    if not is_one_host:
        said["digest"] = hashlib.sha256(memory).hexdigest()
    return said


def room_for(said: dict[str, Any]) -> Tensor:
    """Memory for values that were announced, flat."""
    dtype = getattr(torch, str(said["dtype"]), None)
    if not isinstance(dtype, torch.dtype):
        raise WireError(f"it lends a tensor of a dtype that there is not: {said['dtype']!r}")
    with torch.inference_mode(mode=False):
        room = torch.empty(torch.Size(said["shape"]).numel(), dtype=dtype, device="cpu")
    if room.nbytes != said["bytes"]:
        raise WireError("it announces a tensor of another size than it has")
    return room


def check_digest(said: dict[str, Any], memory: memoryview, *, is_one_host: bool) -> None:
    """Raises if values between hosts are not those that were announced."""
    if is_one_host:
        return
    digest = hashlib.sha256(memory).hexdigest()
    if not hmac.compare_digest(digest, str(said.get("digest"))):
        raise WireError("values do not come from who began the conversation")
