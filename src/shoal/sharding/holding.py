"""What a rank holds of full tensors: the one form in which models and optimizers show their state.

Pure data: names are full names, and where the elements lie in the full tensor is an `Extent`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shoal.sharding.extent import Extent


@dataclass(frozen=True)
class Held:
    """Some elements of a full tensor in this rank's memory."""

    name: str  # the full name
    extent: Extent  # which elements
    memory: Tensor  # the elements, flat; writing to it changes what is held


@dataclass(frozen=True)
class HeldState:
    """An optimizer's state of some elements of a parameter."""

    name: str  # the parameter's full name
    extent: Extent  # which elements
    # What each of these elements has: flat, by the state's key.
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    # What all elements of the parameter share, such as the number of steps.
    shared: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class FullState:
    """What the state of one whole parameter consists of, without its values."""

    # Of what each element has, by the state's key.
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    shared: Mapping[str, Any] = field(default_factory=dict)  # what all elements share, with values
