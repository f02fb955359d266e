"""From layers to parameters: every rank's part of each, and whether all uses of one agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import Tensor, nn

from shoal.sharding.split import Split
from shoal.strategies.tensor.layers.linear import dim_of
from shoal.strategies.tensor.plan.cut import Cut
from shoal.strategies.tensor.plan.tensor_plan import Layer, SplitBlock, Style, TensorPlan, starred


def parameter_splits(
    module: nn.Module, layer: Layer, num_ranks: int
) -> dict[str, tuple[Split, ...]]:
    """Every rank's part of each of a layer's parameters that are split, by their own names."""
    if isinstance(module, nn.MultiheadAttention):
        return _attention_splits(module, num_ranks)
    weight: Tensor = module.weight  # type: ignore[assignment]
    if isinstance(module, nn.Embedding):
        dim = 0 if layer.style is Style.VOCABULARY else 1
        return {"weight": layer.cut.splits(weight.shape, dim, num_ranks)}
    is_column = layer.style is Style.COLUMN
    splits = {
        "weight": layer.cut.splits(weight.shape, dim_of(module, outputs=is_column), num_ranks)
    }
    bias: Tensor | None = module.bias  # type: ignore[assignment]
    if is_column and bias is not None:
        splits["bias"] = layer.cut.splits(bias.shape, 0, num_ranks)
    return splits


def _attention_splits(
    attention: nn.MultiheadAttention, num_ranks: int
) -> dict[str, tuple[Split, ...]]:
    width, size = attention.embed_dim, attention.head_dim
    one, three = Cut.of(width, size), Cut.of(3 * width, size, 3)
    by_name = {
        "in_proj_weight": (three, 0),
        "in_proj_bias": (three, 0),
        "q_proj_weight": (one, 0),
        "k_proj_weight": (one, 0),
        "v_proj_weight": (one, 0),
        "bias_k": (one, 2),
        "bias_v": (one, 2),
        "out_proj.weight": (one, 1),
    }
    own = dict(attention.named_parameters())
    return {
        name: cut.splits(own[name].shape, dim, num_ranks)
        for name, (cut, dim) in by_name.items()
        if name in own
    }


def all_splits(
    module: nn.Module, plan: TensorPlan
) -> Iterator[tuple[SplitBlock, str, tuple[Split, ...]]]:
    """The full name of every parameter that a plan splits, with every rank's part."""
    for block in plan.blocks:
        for layer in block.layers:
            part = module.get_submodule(layer.name)
            for key, splits in parameter_splits(part, layer, plan.num_ranks).items():
                yield block, join_names(layer.name, key), splits


def describe_rest(module: nn.Module, plan: TensorPlan) -> str:
    """How much of a model every rank has all of, and where most of that is."""
    split = {id(module.get_parameter(name)) for _, name, _ in all_splits(module, plan)}
    sizes: Counter[str] = Counter()
    for name, parameter in module.named_parameters():
        if id(parameter) not in split:
            sizes[starred(name)] += parameter.numel()
    total = sum(parameter.numel() for parameter in module.parameters())
    if not sizes.total():
        return ""
    largest = ", ".join(name for name, _ in sizes.most_common(3))
    return f"{sizes.total() / total:.1%} of {total} elements, most of it in {largest}"


def drop_contradictions(module: nn.Module, plan: TensorPlan) -> None:
    """Takes blocks out that share a parameter with modules that need it otherwise."""
    while (odd := find_contradiction(module, plan)) is not None:
        block, name = odd
        plan.blocks.remove(block)
        plan.notes[block.name] = f"stays whole: {name} is used elsewhere too, in another way"


def find_contradiction(module: nn.Module, plan: TensorPlan) -> tuple[SplitBlock, str] | None:
    """A block and its parameter that other modules have too and need otherwise."""
    owners: dict[int, set[tuple[int, str]]] = {}
    for part in module.modules():
        for key, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(id(parameter), set()).add((id(part), key))
    found: dict[int, list[tuple[SplitBlock, str, tuple[Split, ...]]]] = {}
    for block, name, splits in all_splits(module, plan):
        found.setdefault(id(module.get_parameter(name)), []).append((block, name, splits))
    for identity, uses in found.items():
        known = {_owner(module, name) for _, name, _ in uses}
        if owners[identity] != known or len({splits for _, _, splits in uses}) > 1:
            return uses[-1][0], uses[-1][1]
    return None


def _owner(module: nn.Module, name: str) -> tuple[int, str]:
    owner, _, key = name.rpartition(".")
    return id(module.get_submodule(owner)), key


def join_names(block: str, path: str) -> str:
    """A full name."""
    return ".".join(part for part in (block, path) if part)
