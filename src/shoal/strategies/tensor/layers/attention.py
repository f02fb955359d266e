"""`nn.MultiheadAttention` of which each rank has some heads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.comm import differentiable as collective
from shoal.strategies.tensor.layers.dropout import attention_weights, drop
from shoal.strategies.tensor.layers.linear import product
from shoal.strategies.tensor.plan.tensor_plan import Cut
from shoal.strategies.tensor.region import RegionEntry, TensorGroup
from shoal.torch_internals.modules import additive_mask, has_one_projection


class HeadAttention(nn.MultiheadAttention):
    """Each rank attends with its heads; their results are summed by the output projection.

    It takes what `nn.MultiheadAttention` takes, except for nested tensors, and returns the same
    on every rank: attention weights of all heads included, if they are wanted.
    """

    _group: TensorGroup
    _entry: RegionEntry
    _heads: Cut

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """See `torch.nn.MultiheadAttention.forward`."""
        self._group.check()
        if query.is_nested:
            raise ValueError("attention that is split by heads does not take nested tensors")
        if is_causal and attn_mask is None:
            raise RuntimeError("need attn_mask if is_causal is given: it is a hint only")
        if self._entry.sequence_dim is not None:
            self._entry.present(query)
        is_batched = query.dim() == 3
        guard = self._group.guard
        with guard.own_forward(self._first_weight, query):
            projected = self._projected(query, key, value)
        q, k, v = (self._by_batch(part, is_batched) for part in projected)
        if key_padding_mask is not None and not is_batched:
            key_padding_mask = key_padding_mask.unsqueeze(0)
        mask = self._mask(q, k.shape[1], key_padding_mask, attn_mask)
        with guard.own_forward(self._first_weight, k):
            k, v, mask = self._extended(k, v, mask)
        weights, mixed = self._attend(q, k, v, mask, need_weights)
        # Positions come first, as torch has them: what is dropped later depends on the layout.
        outputs = self._entry.leave(product(self.out_proj, self._group, mixed), 0)
        if self.out_proj.bias is not None:
            outputs = outputs + self.out_proj.bias.to(outputs.dtype)  # as autocast would
        if not is_batched:
            outputs = outputs.squeeze(1)
        elif self.batch_first:
            outputs = outputs.transpose(0, 1)
        return outputs, self._shown(weights, average_attn_weights, is_batched)

    @property
    def _first_weight(self) -> Tensor:
        return self.in_proj_weight if has_one_projection(self) else self.q_proj_weight

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        joined_bias: Tensor | None = self.in_proj_bias
        biases = (None,) * 3 if joined_bias is None else joined_bias.chunk(3)
        weights: Sequence[Tensor]
        if not has_one_projection(self):
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        elif query is key and key is value:
            joined = F.linear(self._entry(query), self.in_proj_weight, self.in_proj_bias)
            return joined.chunk(3, -1)
        else:
            weights = self.in_proj_weight.chunk(3)
        inputs = (query, key, value)
        return tuple(
            F.linear(self._entry(input), weight, bias)
            for input, weight, bias in zip(inputs, weights, biases, strict=True)
        )

    def _by_batch(self, tensor: Tensor, is_batched: bool) -> Tensor:
        """As batch, positions, features."""
        if not is_batched:
            return tensor.unsqueeze(0)
        return tensor if self.batch_first else tensor.transpose(0, 1)

    def _mask(
        self, query: Tensor, num_keys: int, padding: Tensor | None, attn_mask: Tensor | None
    ) -> Tensor | None:
        """Both masks as numbers to be added, for this rank's heads."""
        padding, attn_mask = (
            additive_mask(mask, name, query.dtype)
            for name, mask in (("key_padding_mask", padding), ("attn_mask", attn_mask))
        )
        if attn_mask is not None and attn_mask.dim() == 3:
            by_head = attn_mask.view(-1, self._heads.size, *attn_mask.shape[1:])
            ((first, stop),) = self._heads.runs(self._group.backend.rank, self._group.backend.size)
            attn_mask = by_head[:, first:stop]
        if padding is None:
            return attn_mask
        padding = padding.view(-1, 1, 1, num_keys)
        return padding if attn_mask is None else attn_mask + padding

    def _extended(
        self, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """With the keys and values that the layer itself has, which every query may attend to."""
        batch = len(key)
        extra: list[tuple[Tensor, Tensor]] = []
        if self.bias_k is not None and self.bias_v is not None:
            extra.append((self.bias_k.expand(batch, 1, -1), self.bias_v.expand(batch, 1, -1)))
        if self.add_zero_attn:
            zeros = key.new_zeros(batch, 1, key.shape[-1])
            extra.append((zeros, zeros))
        for more_keys, more_values in extra:
            key = torch.cat([key, more_keys], 1)
            value = torch.cat([value, more_values], 1)
            mask = None if mask is None else F.pad(mask, (0, 1))
        return key, value, mask

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, need_weights: bool
    ) -> tuple[Tensor | None, Tensor]:
        q, k, v = (
            tensor.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for tensor in (query, key, value)
        )
        rate = self.dropout if self.training else 0.0
        if not need_weights and rate == 0:
            mixed = F.scaled_dot_product_attention(q, k, v, mask)
            return None, mixed.permute(2, 0, 1, 3).flatten(2)
        weights = attention_weights(q, k, mask)
        if rate:
            weights = drop(weights, 1, self._heads, self._group.backend, rate)
        return weights if need_weights else None, (weights @ v).permute(2, 0, 1, 3).flatten(2)

    def _shown(self, weights: Tensor | None, is_average: bool, is_batched: bool) -> Tensor | None:
        if weights is None:
            return None
        if is_average:
            total = collective.reduce(weights.sum(1), self._group.backend)
            shown = total / self._heads.size
        else:
            shown = collective.join(weights, self._group.backend, 1)
        return shown if is_batched else shown.squeeze(0)


def make_attention(
    attention: nn.MultiheadAttention, group: TensorGroup, heads: Cut, entry: RegionEntry
) -> None:
    """Turns attention, whose weights are split already, into one that is parallel by heads."""
    attention.out_proj.in_features = attention.head_dim * heads.length(
        group.backend.rank, group.backend.size
    )
    attention.__class__ = HeadAttention
    vars(attention).update(_group=group, _entry=entry, _heads=heads)
