"""Layers that are split: each rank holds a part of every large layer of a small GPT.

shoal launch -n 2 examples/tensor.py
shoal launch -n 4 examples/tensor.py --tensor 2 --zero 1
shoal launch -n 2 examples/tensor.py --sequence-parallel
shoal verify examples/tensor.py:build -n 2 --strategy tensor
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal

WIDTH, HEADS, VOCABULARY, LENGTH = 32, 4, 40, 12


class GPT(nn.Module):
    """An ordinary model; nothing in it knows of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        block = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, 0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of what comes next, at every position."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        x = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        return self.head(self.blocks(x, mask, is_causal=True))


def make_batch(step: int, items: int = 16) -> tuple[Tensor, Tensor]:
    """Sequences that count in steps of one to three; what comes next is the target."""
    generator = torch.Generator().manual_seed(step)
    first = torch.randint(0, VOCABULARY, (items, 1), generator=generator)
    stride = torch.randint(1, 4, (items, 1), generator=generator)
    text = (first + stride * torch.arange(LENGTH + 1)) % VOCABULARY
    return text[:, :-1], text[:, 1:]


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build() -> tuple:
    """For `shoal.verify`: what to train, on global batches."""
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, [make_batch(step) for step in range(5)], loss_fn


def train(steps: int = 150, **options) -> tuple[float, float]:
    """Returns the last loss, and the share of the parameters that this rank holds."""
    torch.manual_seed(0)
    model, optimizer, _, _ = build()
    total = sum(parameter.numel() for parameter in model.parameters())

    model, optimizer = shoal.as_distributed(model, optimizer, strategy="tensor", **options)

    if shoal.world().rank == 0:
        print(model.plan)
    data = model.data_group  # the ranks of one tensor group take the same rows
    for step in range(steps):
        tokens, targets = (rows.chunk(data.size)[data.rank] for rows in make_batch(step))
        loss = model.train_step(tokens, targets, loss_fn)
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    return loss.item(), sum(parameter.numel() for parameter in model.parameters()) / total


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tensor", type=int, help="how many ranks share each layer (all)")
    parser.add_argument("--zero", type=int, default=0, help="what is sharded over the others")
    parser.add_argument("--sequence-parallel", action="store_true")
    options = vars(parser.parse_args())
    with shoal.init(timeout=60) as world:
        loss, share = train(**options)
        if world.rank == 0:
            print(f"loss {loss:.3f}; each rank holds {100 * share:.0f} % of the parameters")


if __name__ == "__main__":
    main()
