"""One process that computes with narrow parameters, as ranks in mixed precision do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from shoal.strategies.layers.precision import Precision
from shoal.torch_internals.modules import with_parameters


class MixedPrecisionModel:
    """A model that can be called with its parameters and inputs in a narrower dtype."""

    def __init__(self, model: nn.Module, compute_dtype: torch.dtype | None) -> None:
        """``compute_dtype``: None for the model as it is."""
        self._model, self._dtype = model, compute_dtype
        self._precision = Precision(model, compute_dtype)
        self._precision.install(model)

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Around forward and backward: backward may call parts of the model again."""
        if self._dtype is None:
            yield
            return
        narrow = {
            name: parameter.to(self._precision.dtype_of(parameter) or parameter.dtype)
            for name, parameter in self._model.named_parameters()
        }
        with with_parameters(self._model, narrow):
            yield

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model, inside of `computing`."""
        if self._dtype is not None:
            args, kwargs = self._precision.narrowed((args, kwargs))
        return self._precision.widened(self._model(*args, **kwargs))
