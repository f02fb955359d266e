"""All three axes at once: layers split, cut into stages, on several batches.

shoal launch -n 4 examples/hybrid.py --tensor 2 --pipeline 2
shoal launch -n 8 examples/hybrid.py --tensor 2 --pipeline 2 --zero 1
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
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, batch_first=True)
            for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of what comes next, at every position."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x, mask, is_causal=True)
        return self.head(x)


def make_batch(step: int, items: int = 16) -> tuple[Tensor, Tensor]:
    """Sequences that count in steps of one to three; what comes next is the target."""
    generator = torch.Generator().manual_seed(step)
    first = torch.randint(0, VOCABULARY, (items, 1), generator=generator)
    stride = torch.randint(1, 4, (items, 1), generator=generator)
    text = (first + stride * torch.arange(LENGTH + 1)) % VOCABULARY
    return text[:, :-1], text[:, 1:]


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(steps: int = 60, **axes: int) -> tuple[float, float]:
    """Returns the last loss, and the share of the parameters that this rank holds."""
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    total = sum(parameter.numel() for parameter in model.parameters())

    model, optimizer = shoal.as_distributed(
        model, optimizer, strategy="hybrid", micro_batches=4, **axes
    )

    if shoal.world().rank == 0:
        print(model.mesh, model.plan, model.describe(), sep="\n")
    data = model.data_group  # the ranks of one replica take the same rows
    for step in range(steps):
        tokens, targets = (rows.chunk(data.size)[data.rank] for rows in make_batch(step))
        loss = model.train_step(tokens, targets, loss_fn)
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    return loss.item(), sum(parameter.numel() for parameter in model.parameters()) / total


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tensor", type=int, default=1, help="how many ranks share each layer")
    parser.add_argument("--pipeline", type=int, default=1, help="how many stages")
    parser.add_argument("--zero", type=int, default=0, help="what is sharded over the others")
    options = vars(parser.parse_args())
    with shoal.init(timeout=60) as world:
        loss, share = train(**options)
        if world.rank == 0:
            print(f"loss {loss:.3f}; this rank holds {100 * share:.0f} % of the parameters")


if __name__ == "__main__":
    main()
