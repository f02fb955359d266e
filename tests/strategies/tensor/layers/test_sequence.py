"""Sequence-parallel stacks: what they are made of, what they save, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.errors import ShoalError
from strategies.models import has_transformers, random_numbers
from strategies.tensor.tasks import (
    BUILDERS,
    GPT,
    HEADS,
    WIDTH,
    Attention,
    Block,
    FeedForward,
    JointGate,
)

OPTIONS = {"strategy": "tensor", "sequence_parallel": True}


def run(fn: Any, ranks: int = 3) -> list[Any]:
    return shoal.run(fn, ranks, "memory", timeout=40)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            Block(Attention(WIDTH, HEADS, HEADS // 2), FeedForward(WIDTH, 9)) for _ in range(3)
        )
        self.order = [0, 1, 2]

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.blocks[index](x)
        return x


def test_blocks_have_some_positions_between_regions() -> None:
    def check() -> list[tuple[int, ...]]:
        torch.manual_seed(0)
        plain, module = Blocks().double(), Blocks().double()
        module.load_state_dict(plain.state_dict())
        model = shoal.as_distributed(module, **OPTIONS)
        seen: list[tuple[int, ...]] = []
        for name in ("norm_1", "norm_2"):
            part = model.blocks[1].get_submodule(name)
            part.register_forward_hook(lambda _, inputs, output: seen.append((*output.shape,)))
        x = random_numbers(0, 2, 8, WIDTH)
        found, expected = model(x), plain(x)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        found.square().mean().backward()
        expected.square().mean().backward()
        gradients = dict(model.full_gradients())
        for name, parameter in plain.named_parameters():
            gradient = gradients[name]
            torch.testing.assert_close(gradient, parameter.grad, rtol=0, atol=1e-12, msg=name)
        return seen

    assert run(check) == [[(2, length, WIDTH)] * 2 for length in (3, 3, 2)]


@pytest.mark.parametrize("kind", [FeedForward, JointGate])
def test_blocks_that_are_regions_themselves(kind: Any) -> None:
    """Positions were gathered before they were cut, and gradients of a norm summed twice."""

    def outcome(is_split: bool) -> tuple[Tensor, Tensor | None, dict[str, Tensor | None]]:
        torch.manual_seed(0)
        module: Any = nn.Sequential(*(kind(WIDTH, 9) for _ in range(2))).double()
        x = random_numbers(0, 2, 7, WIDTH).requires_grad_()
        model = shoal.as_distributed(module, **OPTIONS) if is_split else module
        outputs = model(x)
        outputs.square().mean().backward()
        if is_split:
            return outputs.detach(), x.grad, dict(model.full_gradients())
        return outputs.detach(), x.grad, {n: p.grad for n, p in module.named_parameters()}

    for found in run(lambda: outcome(is_split=True)):
        torch.testing.assert_close(found, outcome(is_split=False), rtol=0, atol=1e-12)


def test_fewer_positions_than_ranks() -> None:
    def check() -> None:
        torch.manual_seed(0)
        plain, module = Blocks().double(), Blocks().double()
        module.load_state_dict(plain.state_dict())
        model = shoal.as_distributed(module, **OPTIONS)
        x = random_numbers(0, 2, 2, WIDTH)
        torch.testing.assert_close(model(x), plain(x), rtol=0, atol=1e-12)

    run(check)


def test_a_model_without_a_stack() -> None:
    def check() -> None:
        with pytest.raises(ValueError, match=r"needs an nn.ModuleList or nn.Sequential of blocks"):
            shoal.as_distributed(FeedForward(WIDTH, 9), **OPTIONS)

    run(check, 2)


def test_blocks_that_look_at_several_positions_elsewhere() -> None:
    class Mixing(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + x.mean(1, keepdim=True)

    def check() -> None:
        module = nn.Sequential(Mixing(Attention(WIDTH, HEADS, HEADS), FeedForward(WIDTH, 9)))
        with pytest.raises(ShoalError, match="0 gives something else where each rank has some"):
            shoal.as_distributed(module, **OPTIONS)
        with pytest.raises(ValueError, match="the plan has none"):
            shoal.as_distributed(GPT(), **OPTIONS)  # with a block that is computed whole

    run(check, 2)


def test_blocks_that_cannot_be_tried() -> None:
    def check() -> None:
        decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, HEADS, 9), 1)
        with pytest.raises(ShoalError, match=r"layers.0 cannot: forward needs memory"):
            shoal.as_distributed(decoder, **OPTIONS)

    run(check, 2)


@pytest.mark.skipif(not has_transformers(), reason="needs transformers")
def test_a_residual_sum_inside_of_attention() -> None:
    def check() -> None:
        with pytest.raises(ShoalError, match="Leave sequence_parallel off"):
            shoal.as_distributed(BUILDERS["bert"](), **OPTIONS)

    run(check, 2)


def test_blocks_out_of_order() -> None:
    def check() -> None:
        model = shoal.as_distributed(Blocks().double(), **OPTIONS)
        model.order = [0, 2, 1]
        with pytest.raises(ShoalError, match="called one after the other; a Block got 6 positions"):
            model(random_numbers(0, 2, 6, WIDTH))

    run(check)


def test_hidden_states_of_other_shapes() -> None:
    def check() -> None:
        model = shoal.as_distributed(Blocks().double(), **OPTIONS)
        with pytest.raises(ShoalError, match="three dimensions"):
            model(random_numbers(0, 6, WIDTH))

    run(check, 2)
