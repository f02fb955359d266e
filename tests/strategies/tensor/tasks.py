"""Models with enough heads to share out, each with its data and its loss."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from strategies.models import (
    OWN,
    Batch,
    Task,
    _transformers,
    causal_text,
    in_float64,
    labelled_images,
    labelled_text,
    own_loss,
    random_numbers,
    random_tokens,
)

WIDTH, HEADS, VOCABULARY = 24, 6, 29

# One's own GPT, with the names that people use -------------------------------------------------


class Attention(nn.Module):
    """Grouped queries; views by the size of a head."""

    def __init__(self, width: int, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        self.head_dim = width // num_heads
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, num_kv_heads * self.head_dim)
        self.v_proj = nn.Linear(width, num_kv_heads * self.head_dim)
        self.q_norm = nn.LayerNorm(self.head_dim)  # of each head, with one weight for all
        self.o_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], -1, self.head_dim)
        q = self.q_norm(self.q_proj(x).view(shape)).transpose(1, 2)
        k, v = (part(x).view(shape).transpose(1, 2) for part in (self.k_proj, self.v_proj))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class FusedAttention(nn.Module):
    """Queries, keys and values from one layer; counts of heads and widths in attributes."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.n_head, self.n_embd = num_heads, width
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.c_attn(x).split(self.n_embd, dim=-1)
        shape = (*x.shape[:-1], self.n_head, self.n_embd // self.n_head)
        q, k, v = (part.view(shape).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(mixed.transpose(1, 2).reshape(*x.shape[:-1], self.n_embd))


class StubbornAttention(FusedAttention):
    """Takes its widths from the input, so it cannot work on some heads."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.c_attn(x).split(width, dim=-1)
        q, k, v = (
            part.view(batch, length, self.n_head, width // self.n_head).transpose(1, 2)
            for part in parts
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(mixed.transpose(1, 2).reshape(batch, length, width))


class FeedForward(nn.Module):
    """A gate, and a learned scalar inside."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(width, hidden), nn.Linear(width, hidden)
        self.down_proj = nn.Linear(hidden, width)
        self.slope = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        gate = F.prelu(self.gate_proj(x), self.slope)
        return self.down_proj(gate * self.up_proj(x))


class JointGate(nn.Module):
    """Gate and values from one layer, cut apart: not every cut of the weight will do."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc1, self.fc2 = nn.Linear(width, 2 * hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        gate, values = self.fc1(self.norm(x)).chunk(2, -1)
        return self.fc2(torch.tanh(gate) * values)


class NormedInside(nn.Module):
    """A norm over all hidden features: these two layers cannot be split together."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)
        nn.init.zeros_(self.fc2.weight)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.fc1(x))
        return self.fc2(F.layer_norm(hidden, hidden.shape[-1:]))


class Block(nn.Module):
    def __init__(self, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp = attention, mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """Blocks of several kinds between an embedding and a head that is the embedding again."""

    def __init__(self, *, is_tied: bool = True) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH, padding_idx=3)
        self.positions = nn.Embedding(8, WIDTH)
        self.blocks = nn.ModuleList(
            [
                Block(Attention(WIDTH, HEADS, HEADS // 2), FeedForward(WIDTH, 35)),
                Block(FusedAttention(WIDTH, HEADS), JointGate(WIDTH, 13)),
                Block(StubbornAttention(WIDTH, HEADS), NormedInside(WIDTH, 17)),
            ]
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=not is_tied)
        if is_tied:
            self.lm_head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(
            torch.arange(tokens.shape[1], device=tokens.device)
        )
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.norm(x))


def _text(step: int, items: int) -> Batch:
    return {"tokens": random_tokens(step, VOCABULARY, items, 7)}


def text_loss(model: nn.Module, batch: Batch) -> Tensor:
    tokens = batch["tokens"]
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


# torch's own ----------------------------------------------------------------------------------


class Encoder(nn.Module):
    """`nn.TransformerEncoder` with a mask of padding."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 19, dropout=dropout, activation="gelu", batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        return self.head(self.encoder(x, src_key_padding_mask=padding).mean(1))


def padded(step: int, items: int) -> Batch:
    lengths = 2 + (torch.arange(items) + step) % 4
    return {
        "x": random_numbers(step, items, 5, WIDTH),
        "padding": torch.arange(5)[None] >= lengths[:, None],
        "y": random_numbers(step, items, 3),
    }


def padded_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch["x"], batch["padding"]), batch["y"])


class Translator(nn.Module):
    """`nn.Transformer`: sequences first, norms first, a causal mask, attention with odd ends."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = (nn.Embedding(VOCABULARY, WIDTH) for _ in range(2))
        self.transformer = nn.Transformer(WIDTH, HEADS, 1, 2, 19, dropout=0.0, norm_first=True)
        self.extra = nn.MultiheadAttention(
            WIDTH, HEADS, kdim=5, vdim=7, add_bias_kv=True, add_zero_attn=True
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor, side: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(
            target.shape[1], device=target.device, dtype=torch.float64
        )
        embedded = self.source(source.T), self.target(target.T)
        x = self.transformer(*embedded, tgt_mask=mask, tgt_is_causal=True)
        more, weights = self.extra(x, side[..., :5], side[..., 5:])
        return self.head((x + more).transpose(0, 1)) + weights.mean()


def translation(step: int, items: int) -> Batch:
    tokens = random_tokens(step, VOCABULARY, items, 9)
    # The second dimension counts the items, so it is turned round in the loss.
    side = random_numbers(step, items, 4, 12)
    return {"source": tokens[:, :5], "target": tokens[:, 5:], "side": side}


def translation_loss(model: nn.Module, batch: Batch) -> Tensor:
    target = batch["target"]
    logits = model(batch["source"], target[:, :-1], batch["side"].transpose(0, 1))
    return F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten())


# Hugging Face ------------------------------------------------------------------------------------

_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_DECODER = {
    "vocab_size": 23, "hidden_size": 16, "intermediate_size": 21, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 8,
    "use_cache": False, **_IDS,
}  # fmt: skip
_ENCODER = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 21,
    "num_labels": 3, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


def _hugging_face(name: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        package = _transformers()
        return getattr(package, name)(getattr(package, config)(**settings))

    return build


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "llama": _hugging_face("LlamaForCausalLM", "LlamaConfig", **_DECODER),
    "qwen3": _hugging_face("Qwen3ForCausalLM", "Qwen3Config", **_DECODER, head_dim=4),
    "gemma2": _hugging_face(
        "Gemma2ForCausalLM", "Gemma2Config", **_DECODER, head_dim=4, tie_word_embeddings=True
    ),
    "gpt2": _hugging_face(
        "GPT2LMHeadModel", "GPT2Config", vocab_size=23, n_positions=8, n_embd=16, n_layer=2,
        n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, **_IDS,
    ),
    "t5": _hugging_face(
        "T5ForConditionalGeneration", "T5Config", vocab_size=23, d_model=16, d_kv=3, d_ff=21,
        num_layers=2, num_heads=4, dropout_rate=0.0, use_cache=False, decoder_start_token_id=0,
        pad_token_id=0, eos_token_id=2,
    ),
    "neox": _hugging_face(
        "GPTNeoXForCausalLM", "GPTNeoXConfig", vocab_size=23, hidden_size=16, intermediate_size=21,
        num_hidden_layers=1, num_attention_heads=4, max_position_embeddings=8, use_cache=False,
        attention_dropout=0.0, hidden_dropout=0.0, **_IDS,
    ),
    "bert": _hugging_face(
        "BertForSequenceClassification", "BertConfig", vocab_size=23, max_position_embeddings=8,
        **_ENCODER,
    ),
    "vit": _hugging_face(
        "ViTForImageClassification", "ViTConfig", image_size=4, patch_size=2, **_ENCODER
    ),
}  # fmt: skip
_DATA = {"bert": labelled_text, "vit": labelled_images}

TASKS: dict[str, Task] = {
    "gpt": Task(in_float64(GPT), _text, text_loss),
    "untied": Task(in_float64(functools.partial(GPT, is_tied=False)), _text, text_loss),
    "encoder": Task(in_float64(Encoder), padded, padded_loss),
    "translator": Task(in_float64(Translator), translation, translation_loss),
    **{name: OWN[name] for name in ("mlp", "resnet", "adapter", "unused", "twice", "direct")},
    # Some compute norms or the loss in float32 whatever the parameters are.
    **{
        name: Task(in_float64(build), _DATA.get(name, causal_text), own_loss, tolerance=1e-5)
        for name, build in BUILDERS.items()
    },
}
HUGGING_FACE = tuple(BUILDERS)
