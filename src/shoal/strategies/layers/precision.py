"""Mixed precision: computing with sixteen bits, with masters that keep more."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from shoal.torch_internals.modules import BatchNorm
from shoal.torch_internals.trees import tree_leaves, tree_map

_NAMES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "half": torch.float16,
}
_WIDE = (torch.float32, torch.float64)


def parse_precision(precision: str | torch.dtype | None) -> torch.dtype | None:
    """What ``mixed_precision=`` names: "bf16", "fp16", a dtype, or None."""
    if precision is None:
        return None
    dtype = precision if isinstance(precision, torch.dtype) else _NAMES.get(str(precision).lower())
    if dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"mixed_precision must be 'bf16', 'fp16' or None; got {precision!r}")
    return dtype


class Precision:
    """What a module computes with; inputs are narrowed to it and outputs widened again.

    BatchNorm keeps its parameters as they are: its kernels take narrow inputs, but want their
    statistics and weights wide.
    """

    def __init__(self, module: nn.Module, compute_dtype: torch.dtype | None) -> None:
        """``compute_dtype``: None for the parameters' own."""
        self._dtype = compute_dtype
        self.is_mixed = compute_dtype is not None
        layers = [layer for layer in module.modules() if isinstance(layer, BatchNorm)]
        self._exempt = {id(p) for layer in layers for p in layer.parameters()}

    def dtype_of(self, parameter: nn.Parameter) -> torch.dtype | None:
        """What a parameter is computed with; None for its own."""
        if self._dtype is None or id(parameter) in self._exempt:
            return None
        is_wide = parameter.dtype in _WIDE
        return self._dtype if is_wide else None

    def install(self, module: nn.Module) -> list[Any]:
        """Narrows what parts with narrow parameters are given, too.

        On the way to them a wide buffer or constant may have made activations wide again.
        """
        if self._dtype is None:
            return []
        parts = [
            part
            for part in module.modules()
            if any(self.dtype_of(p) is not None for p in part.parameters(recurse=False))
        ]
        return [part.register_forward_pre_hook(self._narrow, with_kwargs=True) for part in parts]

    def _narrow(self, part: nn.Module, args: Any, kwargs: Any) -> Any:
        is_wide = any(
            isinstance(leaf, Tensor) and leaf.dtype in _WIDE for leaf in tree_leaves((args, kwargs))
        )
        return self.narrowed((args, kwargs)) if is_wide else None

    def narrowed(self, inputs: Any) -> Any:
        """Floating-point inputs in the narrow dtype; None if there is nothing to do."""
        return None if self._dtype is None else _converted(inputs, None, self._dtype)

    def widened(self, output: Any) -> Any:
        """Outputs in float32 again, so that losses are computed with enough digits."""
        return output if self._dtype is None else _converted(output, self._dtype, torch.float32)


def _converted(value: Any, only: torch.dtype | None, dtype: torch.dtype) -> Any:
    def convert(leaf: Any) -> Any:
        if is_dataclass(leaf) and not isinstance(leaf, type):
            named = {field.name: getattr(leaf, field.name) for field in fields(leaf) if field.init}
            return replace(leaf, **_converted(named, only, dtype))
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            return leaf
        return leaf.to(dtype) if only is None or leaf.dtype is only else leaf

    return tree_map(convert, value)
