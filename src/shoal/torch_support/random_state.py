"""The random generators that all threads of a process share: kept, restored, sent and saved."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor


class RandomState:
    """A copy of torch's, numpy's and Python's generators.

    Example:
        >>> state = RandomState.capture()
        >>> first = torch.rand(1)
        >>> state.restore()
        >>> torch.equal(first, torch.rand(1))
        True
    """

    def __init__(
        self, torch_cpu: Tensor, torch_cuda: Sequence[Tensor] | None, numpy: Any, python: Any
    ) -> None:
        """Use `capture`.

        No states of GPUs leave CUDA's generators alone. None means that CUDA was not in use, so
        that restoring makes them what its first use would have found.
        """
        self._torch_cpu, self._torch_cuda = torch_cpu, torch_cuda
        self._numpy, self._python = numpy, python

    @classmethod
    def capture(cls, *, with_cuda: bool = True) -> RandomState:
        """The generators as they are now; without CUDA's, those are not restored either."""
        cuda: Sequence[Tensor] | None = []
        if with_cuda:
            cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
        return cls(torch.get_rng_state(), cuda, np.random.get_state(), random.getstate())

    def restore(self) -> None:
        """Puts the generators back to the captured state."""
        torch.set_rng_state(self._torch_cpu)
        if self._torch_cuda:
            torch.cuda.set_rng_state_all(self._torch_cuda)
        elif self._torch_cuda is None and torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(torch.initial_seed())
        np.random.set_state(self._numpy)
        random.setstate(self._python)

    def to_plain(self) -> dict[str, Any]:
        """The state as plain values and tensors, which can be sent and saved."""
        algorithm, keys, index, has_gauss, gauss = self._numpy
        version, numbers, next_gauss = self._python
        return {
            "torch": self._torch_cpu,
            "cuda": list(self._torch_cuda or ()),
            "numpy": [algorithm, torch.from_numpy(keys.astype(np.int64)), index, has_gauss, gauss],
            "python": [version, torch.tensor(numbers), next_gauss],
        }

    @classmethod
    def from_plain(cls, state: Any) -> RandomState:
        """The inverse of `to_plain`; CUDA's only where there is a state for each GPU here.

        Every generator is tried with its state, so that `restore` cannot fail half-way.

        Raises:
            ValueError: If this is no state of random generators.
        """
        try:
            algorithm, keys, index, has_gauss, gauss = state["numpy"]
            numpy = algorithm, keys.numpy().astype(np.uint32), index, has_gauss, gauss
            version, numbers, next_gauss = state["python"]
            python = version, tuple(numbers.tolist()), next_gauss
            torch.Generator().set_state(state["torch"])
            np.random.RandomState().set_state(numpy)
            random.Random().setstate(python)
            return cls(state["torch"], _states_for_gpus(state["cuda"]), numpy, python)
        except (RuntimeError, OverflowError, TypeError, ValueError, KeyError, AttributeError) as e:
            raise ValueError(f"these are no states of random generators: {e}") from None

    def restore_branch(self, number: int) -> None:
        """Gives the generators a state that follows from this one, another for each number."""
        self.restore()
        data = self._torch_cpu.numpy().tobytes() + number.to_bytes(8, "little")
        digest = hashlib.sha256(data).digest()
        torch.manual_seed(int.from_bytes(digest[:7], "little"))
        np.random.seed(int.from_bytes(digest[8:12], "little"))
        random.seed(digest)


def _states_for_gpus(states: Sequence[Tensor]) -> list[Tensor]:
    if not all(isinstance(each, Tensor) for each in states):
        raise ValueError("no tensors")
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if len(states) != num_devices:
        return []
    for each in states:
        torch.Generator("cuda").set_state(each)
    return list(states)


class RandomStream:
    """Generators of torch, numpy and Python that nothing else in the process draws from.

    Example:
        >>> stream = RandomStream(seed=0)
        >>> with stream.drawing():
        ...     mask = torch.rand(3)
    """

    def __init__(self, seed: int) -> None:
        """The same seed gives the same numbers, in any process."""
        outside = RandomState.capture()
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        self._state = RandomState.capture()
        outside.restore()

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Inside, the generators of the process are these."""
        outside = RandomState.capture()
        self._state.restore()
        try:
            yield
        finally:
            self._state = RandomState.capture()
            outside.restore()


def torch_states(device: torch.device | None = None) -> list[Tensor]:
    """The states of torch's generators alone: the CPU's, and a GPU's or, by default, all GPUs'."""
    if device is None:
        on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    else:
        on_gpus = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), *on_gpus]


def set_torch_states(states: Sequence[Tensor], device: torch.device) -> None:
    """Takes over what `torch_states` gave for a device, perhaps another rank's."""
    torch.set_rng_state(states[0].cpu())
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1].cpu(), device)
