"""Dropout: the same on all ranks where activations are, each rank's part where they are split.

[Note: whole masks]
Ranks of a tensor group draw from the same random numbers: each forward in training begins with the
first rank's generator. Where activations are split, every rank draws the mask of the whole
activation and keeps its part. So generators stay alike, and masks are those of one process.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from shoal.comm import Backend
from shoal.strategies.tensor.plan.tensor_plan import Cut
from shoal.torch_internals.modules import Dropout


def whole_mask(like: Tensor, dim: int, cut: Cut, group: Backend, p: float) -> Tensor:
    """This rank's part of a mask for a tensor of which it has a part; see [Note: whole masks]."""
    shape = list(like.shape)
    shape[dim] = cut.size
    # Numbers are drawn in the order in which elements lie in memory.
    order = sorted(range(like.dim()), key=like.stride().__getitem__, reverse=True)
    mask = torch.empty([shape[each] for each in order], dtype=like.dtype, device=like.device)
    if like.is_cuda:  # torch's own kernel gives elements other numbers than `bernoulli_` does
        mask = torch.native_dropout(mask.fill_(1), p, True)[1].to(like.dtype)
    else:
        mask.bernoulli_(1 - p)
    mask = mask.permute([order.index(each) for each in range(like.dim())])
    runs = cut.runs(group.rank, group.size)
    return torch.cat([mask.narrow(dim, start, stop - start) for start, stop in runs], dim)


def drop(tensor: Tensor, dim: int, cut: Cut, group: Backend, p: float) -> Tensor:
    """Dropout of a tensor that is split along a dimension."""
    if p >= 1:
        return tensor * 0
    mask = whole_mask(tensor, dim, cut, group, p)
    return tensor * mask.div_(1 - p)


class SplitDropout(TorchFunctionMode):
    """Inside, functions that drop parts of split activations draw whole masks."""

    def __init__(
        self, group: Backend, is_inside: Callable[[], bool], width: Cut, heads: Cut | None
    ) -> None:
        """``is_inside`` says whether activations are split right now, by heads or by width."""
        super().__init__()
        self._group, self._is_inside = group, is_inside
        self._width, self._heads = width, heads

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_inside():
            if func in (F.dropout, torch.dropout):
                return self._dropout(func, *args, **kwargs)
            if func is F.scaled_dot_product_attention:
                return self._attention(*args, **kwargs)
        return func(*args, **kwargs)

    def _dropout(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        input, p, training = _dropout_arguments(*args, **kwargs)
        found = self._split_dim(input)
        if not training or p == 0 or found is None:
            return func(*args, **kwargs)
        return drop(input, *found, self._group, p)

    def _split_dim(self, tensor: Tensor) -> tuple[int, Cut] | None:
        """Along which dimension a tensor is split, if it is."""
        rank, size = self._group.rank, self._group.size
        if self._heads is not None and tensor.dim() == 4:
            if tensor.shape[1] == self._heads.length(rank, size):
                return 1, self._heads
        elif tensor.shape[-1] == self._width.length(rank, size):
            return tensor.dim() - 1, self._width
        return None

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if dropout_p == 0 or self._heads is None:
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal,
                scale=scale, enable_gqa=enable_gqa,
            )  # fmt: skip
        if enable_gqa:
            times = query.shape[1] // key.shape[1]
            key, value = (tensor.repeat_interleave(times, 1) for tensor in (key, value))
        if is_causal:
            shape = (query.shape[-2], key.shape[-2])
            attn_mask = torch.ones(shape, dtype=torch.bool, device=query.device).tril()
        weights = attention_weights(query, key, attn_mask, scale)
        return drop(weights, 1, self._heads, self._group, dropout_p) @ value


class Undropped(TorchFunctionMode):
    """Inside, nothing is dropped, and what would have been is noted.

    Attributes:
        shapes: Of what `SplitDropout` would have to cut; queries stand for attention's weights.
    """

    def __init__(self, is_inside: Callable[[], bool]) -> None:
        """``is_inside`` says whether activations are split right now."""
        super().__init__()
        self._is_inside = is_inside
        self.shapes: list[torch.Size] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (F.dropout, torch.dropout):
            input, p, training = _dropout_arguments(*args, **kwargs)
            self._note(input, p if training else 0.0)
            return input
        if func is F.scaled_dot_product_attention:
            given = inspect.signature(SplitDropout._attention).bind(None, *args, **kwargs).arguments
            self._note(given["query"], given.pop("dropout_p", 0.0))
            return func(**{name: value for name, value in given.items() if name != "self"})
        return func(*args, **kwargs)

    def _note(self, tensor: Tensor, rate: float) -> None:
        if rate and self._is_inside():
            self.shapes.append(tensor.shape)


def _dropout_arguments(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, **more: bool
) -> tuple[Tensor, float, bool]:
    """Of `torch.nn.functional.dropout`, and of torch's own, where the third is called ``train``."""
    return input, p, more.get("train", training)


class SequenceDropout(SplitDropout):
    """Inside, what is dropped of some positions is that part of what all would drop."""

    def __init__(self, group: Backend, is_inside: Callable[[], bool], dim: int, cut: Cut) -> None:
        """``dim``: the one that counts positions, shared out by ``cut``."""
        super().__init__(group, is_inside, cut, None)
        self._dim = dim

    def _split_dim(self, tensor: Tensor) -> tuple[int, Cut] | None:
        own = self._width.length(self._group.rank, self._group.size)
        is_split = tensor.dim() == 3 and tensor.shape[self._dim] == own
        return (self._dim, self._width) if is_split else None


def attention_weights(
    query: Tensor, key: Tensor, mask: Tensor | None, scale: float | None = None
) -> Tensor:
    """The softmax of attention; a mask is added, or says with booleans what takes part."""
    scores = query @ key.transpose(-2, -1) * (scale or 1 / math.sqrt(query.shape[-1]))
    if mask is not None and mask.dtype is torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask
    return scores.softmax(-1)


def during(module: nn.Module, make: Callable[[], TorchFunctionMode]) -> None:
    """Whenever a module is called, a mode is on."""
    modes: list[Any] = []

    def begin(*_: object) -> None:
        modes.append(make())
        modes[-1].__enter__()

    def end(*_: object) -> None:
        if modes:
            modes.pop().__exit__(None, None, None)

    module.register_forward_pre_hook(begin)
    module.register_forward_hook(end, always_call=True)


def has_rate(module: nn.Module) -> bool:
    """Whether a module has anything that looks like a rate of dropout above zero.

    A trial sees rates wherever they are written, but not those of calls unlike the ones it tries.
    """
    for part in module.modules():
        named = [value for name, value in vars(part).items() if "drop" in name]
        if any(isinstance(value, float) and value > 0 for value in named):
            return True
        if isinstance(part, Dropout) and part.p > 0:
            return True
    return False
