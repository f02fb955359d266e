"""The state of torch's, CUDA's, numpy's and Python's generators, rank by rank.

[Note: random numbers at another number of ranks]
A checkpoint has the generators of each rank that wrote it. Rank r takes those of rank r; where
there were fewer ranks, it takes those of rank r modulo their number and seeds them anew from their
own numbers and r, so that no two ranks draw the same.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch

from shoal.checkpoint.format.values import raw_bytes


def capture() -> dict[str, Any]:
    """This rank's generators, as plain values and tensors."""
    algorithm, keys, place, has_gauss, gauss = np.random.get_state(legacy=True)
    version, numbers, next_gauss = random.getstate()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {
        "torch": torch.get_rng_state(),
        "cuda": list(cuda),
        "numpy": [algorithm, torch.from_numpy(keys.astype(np.int64)), place, has_gauss, gauss],  # type: ignore[union-attr]
        "python": [version, torch.tensor(numbers), next_gauss],
    }


def check(state: Any) -> None:
    """Raises if it is not what `capture` gives: nothing is half restored.

    Raises:
        ValueError: If it is not.
    """
    try:
        torch.Generator().set_state(state["torch"])
        np.random.RandomState().set_state(_numpy(state))
        random.Random().setstate(_python(state))
        if not all(isinstance(each, torch.Tensor) for each in state["cuda"]):
            raise ValueError("no tensors")
        if _goes_to_cuda(state):
            for each in state["cuda"]:
                torch.Generator("cuda").set_state(each)
    except (RuntimeError, OverflowError, TypeError, ValueError, KeyError) as error:
        raise ValueError(f"these are no states of random generators: {error}") from None


def restore(state: Any, num_saved: int, rank: int) -> None:
    """Gives this rank the generators of rank ``rank`` modulo ``num_saved``.

    See [Note: random numbers at another number of ranks].
    """
    torch.set_rng_state(state["torch"])
    if _goes_to_cuda(state):
        torch.cuda.set_rng_state_all(state["cuda"])
    np.random.set_state(_numpy(state))
    random.setstate(_python(state))
    if rank >= num_saved:
        _seed(hashlib.sha256(raw_bytes(state["torch"]) + rank.to_bytes(8, "little")).digest())


def _goes_to_cuda(state: Any) -> bool:
    """Whether there is a state for each GPU here."""
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return num_devices > 0 and len(state["cuda"]) == num_devices


def _numpy(state: Any) -> Any:
    algorithm, keys, place, has_gauss, gauss = state["numpy"]
    return algorithm, keys.numpy().astype(np.uint32), place, has_gauss, gauss


def _python(state: Any) -> Any:
    version, numbers, next_gauss = state["python"]
    return version, tuple(numbers.tolist()), next_gauss


def _seed(digest: bytes) -> None:
    torch.manual_seed(int.from_bytes(digest[:7], "little"))
    np.random.seed(int.from_bytes(digest[8:12], "little"))
    random.seed(digest)
