"""Small models that stand for what people train, each with its data and its loss.

Everything here is made from numbers, so every rank and every process makes the same.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

Batch = dict[str, Any]


def _nothing_changes(model: nn.Module, step: int) -> None:
    """What most models do between steps."""


@dataclass(frozen=True)
class Task:
    """A model, what it is trained on, and what its training can be compared with.

    Attributes:
        build: Makes the model, with weights that depend on torch's generator only.
        batch: The global batch of a step: tensors whose first dimension counts the items.
        loss: The mean loss over the items of a batch.
        before_step: Called on the model before each step.
        reference: "batch", or "split" if what a rank computes depends on its whole local batch.
        tolerance: How far parameters may be from one process on the whole batch.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    before_step: Callable[[nn.Module, int], None] = _nothing_changes
    reference: str = "batch"
    tolerance: float = 1e-10


def part(batch: Batch, index: int, count: int) -> Batch:
    """One of ``count`` parts of equal size."""

    def cut(leaf: Any) -> Any:
        return leaf.chunk(count)[index] if isinstance(leaf, Tensor) else leaf

    return tree_map(cut, batch)


def moved(tree: Any, device: str) -> Any:
    """The same with all tensors on a device."""
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, tree)


def random_numbers(step: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal numbers that depend on the step and the shape only."""
    generator = torch.Generator().manual_seed(1000 * step + len(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def random_tokens(step: int, vocabulary: int, *shape: int) -> Tensor:
    """Token numbers that depend on the step and the shape only."""
    generator = torch.Generator().manual_seed(1000 * step + 7)
    return torch.randint(0, vocabulary, shape, generator=generator)


# An MLP whose sizes are prime, so that no world size divides anything ---------------------


class OddMLP(nn.Module):
    def __init__(self, sizes: tuple[int, ...] = (7, 13, 11, 3)) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(inner, outer) for inner, outer in itertools.pairwise(sizes)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return self.layers[-1](x)


def regression(num_inputs: int, num_outputs: int) -> dict[str, Any]:
    """Data and loss of a task with numbers in and numbers out."""

    def batch(step: int, items: int) -> Batch:
        numbers = random_numbers(step, items, num_inputs + num_outputs)
        return {"x": numbers[:, :num_inputs], "y": numbers[:, num_inputs:]}

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.mse_loss(model(batch["x"]), batch["y"])

    return {"batch": batch, "loss": loss}


# A GPT with a tied head -------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.mix(x).unflatten(-1, (3, self.num_heads, -1)).movedim(-3, 0).transpose(-3, -2)
        q, k, v = heads.unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(-3, -2).flatten(-2))


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, num_heads)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """Token and position embeddings, blocks, and a head that is the token embedding again."""

    def __init__(self, vocabulary: int = 29, width: int = 10, layers: int = 2) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(8, width) * 0.1)
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, 2) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def text(vocabulary: int, length: int = 7) -> Callable[[int, int], Batch]:
    """Batches of tokens."""
    return lambda step, items: {"tokens": random_tokens(step, vocabulary, items, length)}


def next_token_loss(model: nn.Module, batch: Batch) -> Tensor:
    tokens = batch["tokens"]
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


# Convolutions with BatchNorm: statistics of the local batch --------------------------------


class ResidualBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.conv_2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm_1, self.norm_2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm_1(self.conv_1(x)))
        return F.relu(x + self.norm_2(self.conv_2(y)))


class ResNet(nn.Module):
    def __init__(self, channels: int = 5, blocks: int = 2) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, channels, 3, bias=False), nn.BatchNorm2d(channels))
        self.blocks = nn.Sequential(*(ResidualBlock(channels) for _ in range(blocks)))
        self.head = nn.Linear(channels, 3)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.blocks(F.relu(self.stem(image))).mean((-2, -1)))


def images(size: int) -> Callable[[int, int], Batch]:
    def batch(step: int, items: int) -> Batch:
        labels = random_tokens(step, 3, items)
        return {"image": random_numbers(step, items, 3, size, size), "label": labels}

    return batch


def label_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["image"]), batch["label"])


# torch's own transformer: an encoder and a decoder -----------------------------------------


class EncoderDecoder(nn.Module):
    def __init__(self, vocabulary: int = 17, width: int = 6) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(vocabulary, width), nn.Embedding(vocabulary, width)
        self.transformer = nn.Transformer(width, 2, 1, 1, 11, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.head(self.transformer(self.source(source), self.target(target)))


def translation(step: int, items: int) -> Batch:
    tokens = random_tokens(step, 17, items, 9)
    return {"source": tokens[:, :5], "target": tokens[:, 5:]}


def translation_loss(model: nn.Module, batch: Batch) -> Tensor:
    target = batch["target"]
    logits = model(batch["source"], target[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten())


# A frozen base with adapters, part of which is trained later ------------------------------


class Adapted(nn.Module):
    def __init__(self, width: int = 11, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(width, rank, bias=False) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(rank, width, bias=False) for _ in range(3))
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for base, down, up in zip(self.base, self.down, self.up, strict=True):
            x = torch.tanh(base(x) + up(down(x)))
        return x


def unfreeze_last_base(model: nn.Module, step: int) -> None:
    if step == 8:
        model.base[2].requires_grad_(True)


# Experts: which are used depends on the data, so ranks use different ones -------------------


class Experts(nn.Module):
    """Items name their expert; the last expert is nobody's."""

    def __init__(self, width: int = 5, num_experts: int = 4) -> None:
        super().__init__()
        self.entry = nn.Linear(width, width)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 7), nn.Tanh(), nn.Linear(7, width))
            for _ in range(num_experts)
        )
        self.exit = nn.Linear(width, 2)

    def forward(self, x: Tensor, route: Tensor) -> Tensor:
        x = torch.tanh(self.entry(x))
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            chosen = route == number
            if chosen.any():
                y = y.index_put((chosen.nonzero().squeeze(1),), expert(x[chosen]))
        return self.exit(x + y)


def routed(step: int, items: int) -> Batch:
    """Two neighbours share an expert; in every third step all items have the same."""
    numbers = random_numbers(step, items, 7)
    route = (torch.arange(items) // 2 + step) % 3
    return {"x": numbers[:, :5], "y": numbers[:, 5:], "route": route * (step % 3 > 0)}


def routed_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch["x"], batch["route"]), batch["y"])


# Parameters that no forward hook of their own module announces -----------------------------


class UsesAttention(nn.Module):
    """`nn.MultiheadAttention` never calls its output projection; it reads its weights."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        mixed, _ = self.attention(x, x, x, need_weights=False)
        return self.head(mixed.mean(1))


def sequences(step: int, items: int) -> Batch:
    return {"x": random_numbers(step, items, 4, 6), "y": random_numbers(step, items, 3)}


class Direct(nn.Module):
    """Parameters of its own beside children, and a child's weight used by the parent."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self.shift = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x) * self.scale)
        x = torch.tanh(F.linear(x, self.second.weight.T, self.second.bias))
        return self.second(x) * self.scale + self.shift


# Inputs and outputs that are not tensors ---------------------------------------------------


@dataclass
class Answer:
    value: Tensor
    hidden: dict[str, Tensor | None]


class Structures(nn.Module):
    """A dict with a missing entry goes in, a dataclass with a dict comes out."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.mask = nn.Linear(width, width)
        self.outer = nn.Linear(width, 3)

    def forward(self, inputs: dict[str, Tensor | None], *, factor: float | None = None) -> Answer:
        x = torch.tanh(self.inner(inputs["x"]))
        if inputs["mask"] is not None:
            x = x * torch.sigmoid(self.mask(inputs["mask"]))
        value = self.outer(x if factor is None else factor * x)
        return Answer(value, {"x": x, "nothing": None})


def structured(step: int, items: int) -> Batch:
    numbers = random_numbers(step, items, 13)
    mask = numbers[:, 5:10] if step % 2 else None
    return {"inputs": {"x": numbers[:, :5], "mask": mask}, "y": numbers[:, 10:]}


def structured_loss(model: nn.Module, batch: Batch) -> Tensor:
    answer = model(batch["inputs"], factor=None if batch["inputs"]["mask"] is None else 0.7)
    return F.mse_loss(answer.value, batch["y"]) + answer.hidden["x"].square().mean()


# Parameters of several dtypes --------------------------------------------------------------


class Dtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(5, 7, dtype=torch.float64)
        self.middle = nn.Linear(7, 7, dtype=torch.float32)
        self.exit = nn.Linear(7, 3, dtype=torch.float64)
        self.scale = nn.Parameter(torch.ones(7, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.entry(x)).float()
        return self.exit((torch.tanh(self.middle(x)) * self.scale).double())


# Parameters that take no part --------------------------------------------------------------


class Unused(nn.Module):
    """One layer is never used, another one only in some steps' batches."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.never = nn.Linear(width, width)
        self.sometimes = nn.Linear(width, width)
        self.last = nn.Linear(width, 3)

    def forward(self, x: Tensor, use: bool) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.last(x + self.sometimes(x) if use else x)


def sometimes_used(step: int, items: int) -> Batch:
    numbers = random_numbers(step, items, 10)
    return {"x": numbers[:, :7], "y": numbers[:, 7:], "use": step % 4 in (1, 2)}


def sometimes_used_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch["x"], batch["use"]), batch["y"])


class Twice(nn.Module):
    """One block is used at two places of the same forward."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
        self.between = nn.Linear(width, width)
        self.last = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.block(torch.tanh(self.between(self.block(x)))))


# Hugging Face, from configurations alone ---------------------------------------------------


def has_transformers() -> bool:
    """Whether the package is installed; importing it takes seconds."""
    return importlib.util.find_spec("transformers") is not None


@functools.cache
def _transformers() -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    transformers.logging.set_verbosity_error()
    return transformers


_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def build_gpt2() -> nn.Module:
    hf = _transformers()
    config = hf.GPT2Config(
        vocab_size=23, n_positions=8, n_embd=6, n_layer=1, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, **_IDS,
    )  # fmt: skip
    return hf.GPT2LMHeadModel(config)


def build_llama() -> nn.Module:
    hf = _transformers()
    config = hf.LlamaConfig(
        vocab_size=23, hidden_size=8, intermediate_size=11, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=8,
        use_cache=False, **_IDS,
    )  # fmt: skip
    return hf.LlamaForCausalLM(config)


def build_t5() -> nn.Module:
    hf = _transformers()
    config = hf.T5Config(
        vocab_size=23, d_model=6, d_kv=3, d_ff=11, num_layers=1, num_heads=2, dropout_rate=0.0,
        use_cache=False, decoder_start_token_id=0, pad_token_id=0, eos_token_id=2,
    )  # fmt: skip
    return hf.T5ForConditionalGeneration(config)


def build_bert() -> nn.Module:
    hf = _transformers()
    config = hf.BertConfig(
        vocab_size=23, hidden_size=6, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=11, max_position_embeddings=8, num_labels=3,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return hf.BertForSequenceClassification(config)


def build_vit() -> nn.Module:
    hf = _transformers()
    config = hf.ViTConfig(
        hidden_size=6, num_hidden_layers=1, num_attention_heads=2, intermediate_size=11,
        image_size=4, patch_size=2, num_labels=3,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return hf.ViTForImageClassification(config)


def own_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The loss that a Hugging Face model computes itself."""
    return model(**batch).loss


def causal_text(step: int, items: int) -> Batch:
    tokens = random_tokens(step, 20, items, 6) + 3
    return {"input_ids": tokens, "labels": tokens}


def labelled_text(step: int, items: int) -> Batch:
    tokens = random_tokens(step, 20, items, 6) + 3
    return {"input_ids": tokens, "labels": tokens[:, 0] % 3}


def labelled_images(step: int, items: int) -> Batch:
    labels = random_tokens(step, 3, items)
    return {"pixel_values": random_numbers(step, items, 3, 4, 4), "labels": labels}


def in_float64(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """The same model in double precision, so that rounding does not hide mistakes."""
    return lambda: build().double()


def _mse_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


OWN: dict[str, Task] = {
    "mlp": Task(in_float64(OddMLP), **regression(7, 3)),
    "gpt": Task(in_float64(GPT), text(29), next_token_loss),
    "resnet": Task(in_float64(ResNet), images(6), label_loss, reference="split"),
    "encoder_decoder": Task(in_float64(EncoderDecoder), translation, translation_loss),
    "adapter": Task(in_float64(Adapted), **regression(11, 11), before_step=unfreeze_last_base),
    "experts": Task(in_float64(Experts), routed, routed_loss),
    "attention": Task(in_float64(UsesAttention), sequences, _mse_loss),
    "direct": Task(in_float64(Direct), **regression(7, 7)),
    "structures": Task(in_float64(Structures), structured, structured_loss),
    "dtypes": Task(Dtypes, **regression(5, 3), tolerance=1e-5),
    "unused": Task(in_float64(Unused), sometimes_used, sometimes_used_loss),
    "twice": Task(in_float64(Twice), **regression(7, 3)),
}
# Some compute norms or the loss in float32 whatever the parameters are.
HUGGING_FACE: dict[str, Task] = {
    "gpt2": Task(in_float64(build_gpt2), causal_text, own_loss, tolerance=1e-5),
    "llama": Task(in_float64(build_llama), causal_text, own_loss, tolerance=1e-5),
    "t5": Task(in_float64(build_t5), causal_text, own_loss, tolerance=1e-5),
    "bert": Task(in_float64(build_bert), labelled_text, own_loss),
    "vit": Task(in_float64(build_vit), labelled_images, own_loss),
}
TASKS: dict[str, Task] = OWN | HUGGING_FACE
