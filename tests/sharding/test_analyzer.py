"""Which parameters travel together."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shoal.sharding import ParameterAnalyzer

MIB = 1 << 20


def chain(*widths: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Layers on the meta device: no test here looks at values."""
    pairs = itertools.pairwise(widths)
    return nn.Sequential(*(nn.Linear(*pair, device="meta", dtype=dtype) for pair in pairs))


def names_of(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters()]


def test_a_thousand_small_layers_make_at_most_fifty_groups() -> None:
    analyzer = ParameterAnalyzer(chain(*[256] * 1001))
    assert len(analyzer.groups) <= 50
    assert analyzer.threshold_bytes == -(-analyzer.total_bytes // 48)


def test_a_small_model_is_one_group() -> None:
    (group,) = ParameterAnalyzer(chain(8, 8, 8)).groups
    assert group.names == ("0.weight", "0.bias", "1.weight", "1.bias")
    assert group.num_elements == 2 * 72
    assert group.num_bytes == 8 * 72


def test_a_group_closes_at_a_mebibyte() -> None:
    groups = ParameterAnalyzer(chain(*[256] * 13)).groups  # 257 KiB each, 3 MiB in all
    assert all(group.num_bytes >= MIB for group in groups[:-1])
    assert all(group.num_bytes < 2 * MIB for group in groups)
    assert [len(group.names) for group in groups] == [8, 8, 8]


def test_a_large_layer_is_its_own_group() -> None:
    groups = ParameterAnalyzer(chain(64, 64, 1024, 1024, 64, 64)).groups
    assert ("2.weight", "2.bias") in [group.names for group in groups]


@pytest.mark.parametrize("min_group_bytes", [0, 1000, 10**9])
def test_the_threshold_can_be_chosen(min_group_bytes: int) -> None:
    model = chain(*[16] * 101)
    analyzer = ParameterAnalyzer(model, min_group_bytes)
    expected = {0: 48, 1000: 48, 10**9: 1}[min_group_bytes]
    assert abs(len(analyzer.groups) - expected) <= 15
    assert len(analyzer.groups) <= 50


def test_a_negative_threshold_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be negative; got -1"):
        ParameterAnalyzer(chain(2, 2), -1)


def test_only_dtype_separates_neighbours() -> None:
    model = nn.Sequential(
        chain(8, 8), chain(8, 8, dtype=torch.float64), chain(8, 8), chain(8, 8, dtype=torch.float64)
    )
    model[2].requires_grad_(False)
    groups = ParameterAnalyzer(model).groups
    assert [group.dtype for group in groups] == [torch.float32, torch.float64]
    assert groups[0].names == ("0.0.weight", "0.0.bias", "2.0.weight", "2.0.bias")


def test_dtypes_within_one_module_are_separated() -> None:
    model = nn.Module()
    model.a = nn.Parameter(torch.zeros(3))
    model.b = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    model.c = nn.Parameter(torch.zeros(3))
    assert [group.names for group in ParameterAnalyzer(model).groups] == [("a", "c"), ("b",)]


def tied(width: int, layers: int) -> nn.Module:
    model = nn.Module()
    model.embedding = nn.Linear(width, 100, bias=False, device="meta")
    model.body = chain(*[width] * (layers + 1))
    model.head = nn.Linear(width, 100, bias=False, device="meta")
    model.head.weight = model.embedding.weight
    return model


def test_a_tied_parameter_occurs_once() -> None:
    model = tied(16, 4)
    names = [name for group in ParameterAnalyzer(model).groups for name in group.names]
    assert names == names_of(model)
    assert "head.weight" not in names


def test_a_parameter_of_several_groups_has_its_own() -> None:
    groups = [group.names for group in ParameterAnalyzer(tied(64, 40), 40_000).groups]
    assert ("embedding.weight",) in groups


def test_the_order_is_that_of_registration() -> None:
    model = tied(64, 40)
    groups = ParameterAnalyzer(model, 40_000).groups
    names = [name for group in groups for name in group.names]
    assert names == names_of(model)


def test_a_model_without_parameters_has_no_groups() -> None:
    analyzer = ParameterAnalyzer(nn.ReLU())
    assert analyzer.groups == []
    assert "0 groups" in str(analyzer)


def test_it_prints_as_a_table() -> None:
    text = str(ParameterAnalyzer(chain(64, 64, 1024, 1024, 64)))
    lines = text.splitlines()
    assert lines[0].startswith(f"{len(lines) - 1} groups, ")
    assert "closed at 1.00 MiB" in lines[0]
    assert any("4.00 MiB" in line and "2.weight ... 2.bias" in line for line in lines[1:])
    assert all("float32" in line and "parameters" in line for line in lines[1:])


@given(
    widths=st.lists(st.integers(1, 300), min_size=2, max_size=60),
    min_group_bytes=st.integers(0, 100_000),
)
def test_every_parameter_is_in_one_group(widths: list[int], min_group_bytes: int) -> None:
    model = chain(*widths)
    by_name = dict(model.named_parameters())
    order = list(by_name)
    analyzer = ParameterAnalyzer(model, min_group_bytes)
    names = [name for group in analyzer.groups for name in group.names]
    assert sorted(names) == sorted(order)
    assert analyzer.total_bytes == sum(p.nbytes for p in model.parameters())
    assert len(analyzer.groups) <= 48 + 1
    firsts = [order.index(group.names[0]) for group in analyzer.groups]
    assert firsts == sorted(firsts)
    for group in analyzer.groups:
        assert [order.index(name) for name in group.names] == sorted(map(order.index, group.names))
        assert all(by_name[n] is p for n, p in zip(group.names, group.parameters, strict=True))


@given(
    widths=st.lists(st.integers(1, 300), min_size=2, max_size=60),
    min_group_bytes=st.integers(0, 100_000),
)
def test_groups_are_about_as_large_as_the_threshold(
    widths: list[int], min_group_bytes: int
) -> None:
    analyzer = ParameterAnalyzer(chain(*widths), min_group_bytes)
    threshold = analyzer.threshold_bytes
    for group in analyzer.groups:
        is_single = len({name.rpartition(".")[0] for name in group.names}) == 1
        assert is_single or group.num_bytes <= 1.5 * threshold
    assert len([g for g in analyzer.groups if 2 * g.num_bytes < threshold]) <= 1


class Nested(nn.Module):
    """Has something before and behind what is inside of it."""

    def __init__(self, depth: int, before: int, behind: int) -> None:
        super().__init__()
        self.before = nn.Linear(before, 1, bias=False)
        if depth > 1:
            self.inside = Nested(depth - 1, before, behind)
        self.behind = nn.Linear(behind, 1, bias=False)


@pytest.mark.parametrize(("blocks", "layers"), [(96, 10), (76, 13), (64, 16), (50, 20), (33, 31)])
def test_a_thousand_layers_in_blocks_are_at_most_fifty_groups(blocks: int, layers: int) -> None:
    """Blocks of 0.63 of a group's size would be 76 groups, if each had one of its own."""
    parts = [nn.Sequential(*(nn.Linear(256, 256, device="meta") for _ in range(layers)))]
    parts += [copy.deepcopy(parts[0]) for _ in range(blocks - 1)]
    analyzer = ParameterAnalyzer(nn.Sequential(*parts))
    assert 24 <= len(analyzer.groups) <= 50
    for group in analyzer.groups:
        assert group.num_bytes <= 2 * analyzer.total_bytes / 48


def test_large_blocks_have_a_group_each() -> None:
    """Two blocks in one group would be twice the memory, to save messages that cost nothing."""
    blocks = [nn.Linear(4096, 4096, device="meta") for _ in range(70)]
    assert len(ParameterAnalyzer(nn.Sequential(*blocks)).groups) == 70


@given(
    depth=st.integers(1, 30),
    before=st.integers(1, 150),
    behind=st.integers(1, 150),
    min_group_bytes=st.integers(0, 2000),
)
def test_nested_modules_make_no_larger_groups(
    depth: int, before: int, behind: int, min_group_bytes: int
) -> None:
    analyzer = ParameterAnalyzer(Nested(depth, before, behind), min_group_bytes)
    for group in analyzer.groups:
        assert len(group.names) == 1 or group.num_bytes <= 1.5 * analyzer.threshold_bytes


def test_modules_of_several_others_are_looked_at_once() -> None:
    shared: nn.Module = nn.Linear(10, 10)
    for _ in range(40):  # 2 to the 40th ways lead to it
        shared = nn.ModuleList([nn.Sequential(shared), nn.Sequential(shared, nn.Linear(9, 9))])
    assert len(ParameterAnalyzer(shared, 0).groups) >= 20


class Deep(nn.Module):
    """Uses its norms, which are registered first, before and after a layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)


@pytest.mark.parametrize("embedding", [1, 3, 10, 40, 400])
@pytest.mark.parametrize("layers", [3, 12, 40, 48, 60, 96])
def test_blocks_are_not_torn_apart(layers: int, embedding: int) -> None:
    """A group with parts of two blocks is gathered for both, and kept from one to the other."""
    blocks = nn.Sequential(*(Deep(16) for _ in range(layers)))
    model = nn.Sequential(nn.Embedding(16 * embedding, 16), blocks, nn.LayerNorm(16))
    analyzer = ParameterAnalyzer(model, 0)
    block_bytes = sum(parameter.nbytes for parameter in blocks[0].parameters())
    for number in range(layers):
        prefix = f"1.{number}."
        own = [g for g in analyzer.groups if any(name.startswith(prefix) for name in g.names)]
        if block_bytes <= analyzer.threshold_bytes:
            assert len(own) == 1
        for group in own:  # norms of blocks whose layers are too large may share one
            is_shared = any(
                name.startswith("1.") and not name.startswith(prefix) for name in group.names
            )
            has_layer = any(
                name.startswith((f"{prefix}up", f"{prefix}down")) for name in group.names
            )
            assert not (is_shared and has_layer) or block_bytes <= analyzer.threshold_bytes


@given(widths=st.lists(st.integers(1, 64), min_size=2, max_size=200))
def test_equal_models_give_equal_groups(widths: list[int]) -> None:
    first, second = (ParameterAnalyzer(chain(*widths), 0).groups for _ in range(2))
    assert [group.names for group in first] == [group.names for group in second]
