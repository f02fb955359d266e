"""The usual names: of layers that belong together, and of numbers that attention keeps."""

from __future__ import annotations

# Columns, and the rows that may follow them; relative to the module that has them.
Pattern = tuple[tuple[str, ...], tuple[str, ...]]

FEED_FORWARD: tuple[Pattern, ...] = (
    (("gate_proj", "up_proj"), ("down_proj",)),
    (("gate_up_proj",), ("down_proj",)),
    (("up_proj",), ("down_proj",)),
    (("gate", "up"), ("down",)),
    (("w1", "w3"), ("w2",)),
    (("fc1",), ("fc2",)),
    (("c_fc",), ("c_proj",)),
    (("wi_0", "wi_1"), ("wo",)),
    (("wi",), ("wo",)),
    (("linear1",), ("linear2",)),
    (("lin1",), ("lin2",)),
    (("fc_in",), ("fc_out",)),
    (("dense_h_to_4h",), ("dense_4h_to_h",)),
    (("intermediate.dense",), ("output.dense",)),
)

ATTENTION: tuple[Pattern, ...] = (
    (("q_proj", "k_proj", "v_proj"), ("o_proj", "out_proj", "dense", "c_proj", "proj")),
    (("self.query", "self.key", "self.value"), ("output.dense",)),
    (("attention.query", "attention.key", "attention.value"), ("output.dense",)),
    (("query", "key", "value"), ("out", "output", "proj", "out_proj", "dense")),
    (("q", "k", "v"), ("o", "out", "proj")),
    (("wq", "wk", "wv"), ("wo",)),
    (("to_q", "to_k", "to_v"), ("to_out", "to_out.0")),
    (("q_lin", "k_lin", "v_lin"), ("out_lin",)),
    (("c_attn",), ("c_proj",)),
    (("qkv",), ("proj", "out_proj", "out")),
    (("qkv_proj",), ("o_proj", "out_proj")),
    (("Wqkv",), ("out_proj", "Wo")),
    (("query_key_value",), ("dense",)),
    (("in_proj",), ("out_proj",)),
)

HEAD_COUNTS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "heads", "nhead", "h")
KEY_HEAD_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads")
HEAD_SIZES = (
    "head_dim", "attention_head_size", "key_value_proj_dim", "dim_head", "head_size", "d_k",
    "dim_per_head",
)  # fmt: skip
WIDTHS = (
    "embed_dim", "split_size", "inner_dim", "all_head_size", "hidden_size", "hidden_dim", "n_embd",
    "d_model", "width", "dim", "kv_dim", "embed_size", "size", "channels",
)  # fmt: skip

# The last layer of a language model, if it has as many outputs as an embedding has rows.
OUTPUTS = (
    "lm_head", "head", "output", "output_projection", "embed_out", "out", "decoder", "unembed",
    "to_logits", "logits", "generator", "proj_out",
)  # fmt: skip
