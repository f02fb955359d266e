"""Models to cut, each with batches and a loss; all made from numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from strategies.models import GPT, random_numbers, random_tokens


@dataclass(frozen=True)
class Task:
    """A model, its batch of a step, and its loss."""

    build: Callable[[], nn.Module]
    batch: Callable[[int, int], tuple[Any, Any]]
    loss: Callable[[Any, Any], Tensor]
    tolerance: float = 1e-10


class UNet(nn.Module):
    """Skips from early to late layers, a dict out, an operation in place between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.downs = nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, 16), nn.Linear(16, 16)])
        self.ups = nn.ModuleList([nn.Linear(32, 16), nn.Linear(24, 8), nn.Linear(8, 4)])

    def forward(self, x):
        skips = []
        for down in self.downs:
            x = torch.tanh(down(x))
            skips.append(x)
        x = self.ups[0](torch.cat([x, skips[1]], -1))
        x = self.ups[1](torch.cat([x.relu(), skips[0]], -1))
        x += 1
        return {"y": self.ups[2](x), "hidden": skips, "nothing": None}


class Disorder(nn.Module):
    """Registered in another order than it is called, with a parameter that all blocks use."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.first = nn.Linear(8, 4), nn.Linear(4, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x).tanh() * self.scale
        return {"y": self.head(x), "hidden": [x]}


class Tuples(nn.Module):
    """Tuples, None, numbers and booleans go from block to block; masks come from the model."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, state, *, mask, times=1):
            x, count, nothing = state
            assert nothing is None
            y = self.layer(x).masked_fill(mask, 0.0) * times
            return x + y, count + 1, None

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Tuples.Block() for _ in range(5))

    def forward(self, x):
        mask = torch.zeros_like(x, dtype=torch.bool)
        mask[:, 0] = True
        state = (x, 0, None)
        for block in self.blocks:
            state = block(state, mask=mask, times=2)
        assert state[1] == 5
        return {"y": state[0], "hidden": []}


class Normed(nn.Module):
    """Convolutions and a parameter that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(3, 3)
        self.body = nn.Sequential(
            nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 4)
        )

    def forward(self, x):
        return {"y": self.body(x), "hidden": []}


def _numbers(step: int, items: int) -> tuple[Any, Any]:
    numbers = random_numbers(step, items, 8)
    return numbers[:, :4], numbers[:, 4:]


def _dict_loss(output, y):
    return F.mse_loss(output["y"], y) + sum(h.square().mean() for h in output["hidden"]) * 0.1


def _own(build) -> Task:
    return Task(lambda: build().double(), _numbers, _dict_loss)


def _tokens(step: int, items: int) -> tuple[Any, Any]:
    tokens = random_tokens(step, 29, items, 7)
    return tokens, tokens


def _text_loss(logits, tokens):
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def _sequence(step: int, items: int) -> tuple[Any, Any]:
    numbers = random_numbers(step, items, 5, 16)
    return numbers[..., :8], numbers[..., 8:]


def _encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(
        layer, 4, norm=nn.LayerNorm(8), enable_nested_tensor=False
    ).double()


# Hugging Face ---------------------------------------------------------------------------------

_SIZES = {
    "vocab_size": 29, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4,
    "num_attention_heads": 4, "max_position_embeddings": 16,
}  # fmt: skip
_GROUPED = {**_SIZES, "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 1}
_UNDROPPED = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _llama(**more):
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_GROUPED, **more)).double()


def _gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=29, n_embd=16, n_layer=4, n_head=4, n_positions=16, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return GPT2LMHeadModel(config).double()


def _gemma():
    from transformers import Gemma2Config, Gemma2ForCausalLM

    return Gemma2ForCausalLM(Gemma2Config(**_GROUPED, head_dim=4, sliding_window=4)).double()


def _bert():
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(BertConfig(**_SIZES, **_UNDROPPED)).double()


def _vit():
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {key: _SIZES[key] for key in _SIZES if "vocab" not in key and "max" not in key}
    config = ViTConfig(**sizes, **_UNDROPPED, image_size=8, patch_size=4)
    return ViTForImageClassification(config).double()


def _t5():
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=29, d_model=16, d_kv=4, d_ff=32, num_layers=3, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config).double()


def _labelled(step: int, items: int) -> tuple[Any, Any]:
    tokens = random_tokens(step, 29, items, 7)
    return {"input_ids": tokens, "labels": tokens}, tokens


def _masked(step: int, items: int) -> tuple[Any, Any]:
    tokens = random_tokens(step, 29, items, 7)
    return {"input_ids": tokens, "attention_mask": (tokens > 2).long()}, tokens[:, 0] % 2


def _images(step: int, items: int) -> tuple[Any, Any]:
    return random_numbers(step, items, 3, 8, 8), torch.arange(items) % 2


def _class_loss(output, targets):
    return F.cross_entropy(output.logits, targets)


# Their loss is computed in float32.
_HF = {"batch": _labelled, "loss": lambda output, _: output.loss, "tolerance": 1e-6}

TASKS = {
    "gpt": Task(lambda: GPT(layers=4).double(), _tokens, _text_loss),
    "encoder": Task(_encoder, _sequence, F.mse_loss),
    "unet": _own(UNet),
    "disorder": _own(Disorder),
    "tuples": _own(Tuples),
    "normed": _own(Normed),
    "llama": Task(_llama, **_HF),
    "llama-tied": Task(lambda: _llama(tie_word_embeddings=True), **_HF),
    "gpt2": Task(_gpt2, **_HF),
    "gemma2": Task(_gemma, **_HF),
    "t5": Task(_t5, **_HF),
    "bert": Task(_bert, _masked, _class_loss),
    "vit": Task(_vit, _images, _class_loss),
}
