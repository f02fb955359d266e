"""Collectives that gradients pass through, against one process that computes the same.

The losses of all ranks together are one scalar, a function of all ranks' inputs. One process
with all inputs lets autograd find its gradients; each rank must find those of its own input.
"""

from __future__ import annotations

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

import shoal
from conformance import shares
from pools import Team
from shoal.comm import differentiable as d

DIMS = [0, 1, -1]


def weights(shape, rank):
    """What each rank's loss multiplies its result with."""
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def inputs(shapes):
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def on_rank(name, shapes, options, is_common):
    """This rank's result and the gradient of its input."""
    backend = shoal.world().backend
    mine = inputs(shapes)[backend.rank].requires_grad_()
    before = mine.detach().clone()
    result = getattr(d, name)(mine, backend, **options)
    weight = weights(result.shape, 0 if is_common else backend.rank)
    (result.sin() * weight).sum().backward()
    assert torch.equal(mine.detach(), before)
    return result.detach(), mine.grad


def in_one_process(results, leaves, is_common):
    """Losses of all ranks, summed; one of them where all compute the same."""
    losses = [
        (result.sin() * weights(result.shape, 0 if is_common else rank)).sum()
        for rank, result in enumerate(results)
    ]
    (losses[0] if is_common else sum(losses)).backward()
    return [(result.detach(), leaf.grad) for result, leaf in zip(results, leaves, strict=True)]


def check(team, name, shapes, expected, *, is_common=False, **options):
    leaves = [value.requires_grad_() for value in inputs(shapes)]
    reference = in_one_process(expected(leaves), leaves, is_common)
    found = team.run(on_rank, name, shapes, options, is_common)
    for (result, gradient), (wanted, wanted_gradient) in zip(found, reference, strict=True):
        torch.testing.assert_close(result, wanted)
        torch.testing.assert_close(gradient, wanted_gradient)


def shape_along(dim, length):
    return (length, 3) if dim == 0 else (3, length)


def test_reduce(several: Team) -> None:
    """Every rank's loss sees the sum; together they are one loss, so it counts once."""
    shapes = [(3, 2)] * several.size
    check(several, "reduce", shapes, lambda xs: [sum(xs)] * len(xs), is_common=True)


@pytest.mark.parametrize("dim", DIMS)
def test_gather(several: Team, dim) -> None:
    shapes = [shape_along(dim, 1 + rank % 3) for rank in range(several.size)]
    check(several, "gather", shapes, lambda xs: [torch.cat(xs, dim)] * len(xs), dim=dim)


@pytest.mark.parametrize("dim", DIMS)
def test_join(several: Team, dim) -> None:
    shapes = [shape_along(dim, rank % 3) for rank in range(several.size)]
    expected = lambda xs: [torch.cat(xs, dim)] * len(xs)  # noqa: E731
    check(several, "join", shapes, expected, is_common=True, dim=dim)


@pytest.mark.parametrize("length", [1, 4, 7])
@pytest.mark.parametrize("dim", DIMS)
def test_reduce_scatter(several: Team, dim, length) -> None:
    def expected(xs):
        return sum(xs).split(shares(length, len(xs)), dim)

    shapes = [shape_along(dim, length)] * several.size
    check(several, "reduce_scatter", shapes, expected, dim=dim)


def test_exchange(several: Team) -> None:
    size = several.size
    shapes = [(2 * size + rank, 2) for rank in range(size)]

    def expected(xs):
        parts = [x.split(shares(x.shape[0], size)) for x in xs]
        return [torch.cat([parts[sender][rank] for sender in range(size)]) for rank in range(size)]

    check(several, "exchange", shapes, expected)


def exchange_uneven():
    backend = shoal.world().backend
    size, rank = backend.size, backend.rank
    sizes = [(rank + peer) % 3 for peer in range(size)]
    rows = torch.full((sum(sizes), 2), float(rank), dtype=torch.float64, requires_grad=True)
    arrived = d.exchange(rows, backend, sizes)
    senders = torch.arange(size).repeat_interleave(
        torch.tensor([(s + rank) % 3 for s in range(size)])
    )
    assert torch.equal(arrived[:, 0].long(), senders)
    (arrived * (rank + 1)).sum().backward()
    receivers = torch.arange(size).repeat_interleave(torch.tensor(sizes))
    return torch.equal(rows.grad[:, 0].long(), receivers + 1)


def test_exchange_of_uneven_parts(several: Team) -> None:
    assert all(several.run(exchange_uneven))


def same_on_all_ranks(name, shape, dim):
    """`copy` and `split` take a value that is the same everywhere: one leaf in one process."""
    backend = shoal.world().backend
    value = inputs([shape])[0].requires_grad_()
    options = () if name == "copy" else (dim,)
    result = getattr(d, name)(value, backend, *options)
    (result.sin() * weights(result.shape, backend.rank)).sum().backward()
    return result.detach(), value.grad


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("name", ["copy", "split"])
def test_copy_and_split(several: Team, name, dim) -> None:
    shape = shape_along(dim, 7)
    leaf = inputs([shape])[0].requires_grad_()
    size = several.size
    parts = [leaf] * size if name == "copy" else leaf.split(shares(7, size), dim)
    loss = [(part.sin() * weights(part.shape, rank)).sum() for rank, part in enumerate(parts)]
    sum(loss).backward()
    for rank, (result, gradient) in enumerate(several.run(same_on_all_ranks, name, shape, dim)):
        torch.testing.assert_close(result, parts[rank].detach())
        torch.testing.assert_close(gradient, leaf.grad)


@hypothesis.given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple),
    dim=st.integers(-3, 2),
    name=st.sampled_from(["gather", "reduce_scatter"]),
)
def test_any_shape_and_dimension(shape, dim, name) -> None:
    hypothesis.assume(-len(shape) <= dim < len(shape))
    team = Team("memory", 3)

    def expected(xs):
        if name == "gather":
            return [torch.cat(xs, dim)] * len(xs)
        return sum(xs).split(shares(shape[dim], len(xs)), dim)

    check(team, name, [shape] * 3, expected, dim=dim)


def column_then_row():
    """Megatron's pair: the second half of a layer undoes the split of the first."""
    backend = shoal.world().backend
    x, first, second = (value.requires_grad_() for value in inputs([(5, 4), (8, 4), (4, 8)]))
    mine = first.detach().chunk(backend.size)[backend.rank].clone().requires_grad_()
    mine2 = second.detach().chunk(backend.size, 1)[backend.rank].clone().requires_grad_()
    hidden = torch.relu(d.copy(x, backend) @ mine.t())
    out = d.reduce(hidden @ mine2.t(), backend)
    out.square().sum().backward()
    return out.detach(), x.grad, mine.grad, mine2.grad


@pytest.mark.parametrize("backend", ["memory", "shm"])
def test_a_layer_split_over_ranks_equals_the_whole(backend) -> None:
    x, first, second = (value.requires_grad_() for value in inputs([(5, 4), (8, 4), (4, 8)]))
    whole = torch.relu(x @ first.t()) @ second.t()
    whole.square().sum().backward()
    for rank, (out, grad_x, grad_first, grad_second) in enumerate(
        Team(backend, 4).run(column_then_row)
    ):
        torch.testing.assert_close(out, whole.detach())
        torch.testing.assert_close(grad_x, x.grad)
        torch.testing.assert_close(grad_first, first.grad.chunk(4)[rank])
        torch.testing.assert_close(grad_second, second.grad.chunk(4, 1)[rank])


TWICE = {
    # Whether inputs and results are the same on all ranks, and all results from all inputs.
    "copy": (True, False, lambda xs: [xs[0]] * len(xs)),
    "reduce": (False, True, sum),
    "split": (True, False, lambda xs: xs[0].tensor_split(len(xs))),
    "join": (False, True, torch.cat),
    "gather": (False, False, lambda xs: [torch.cat(xs)] * len(xs)),
    "reduce_scatter": (False, False, lambda xs: sum(xs).tensor_split(len(xs))),
    "exchange": (False, False, lambda xs: torch.stack([*xs], 1).unbind()),
}
_SHAPES = {"split": (4, 2), "reduce_scatter": (4, 2)}  # of which ranks get different parts


def differentiate_twice(name):
    """The gradient of how steep a loss is that all ranks have in common."""
    backend = shoal.world().backend
    is_input_common, is_result_common, _ = TWICE[name]
    rank = 0 if is_input_common else backend.rank
    mine = inputs([_SHAPES.get(name, (3, 2))] * 3)[rank].requires_grad_()
    result = getattr(d, name)(mine, backend)
    weight = weights(result.shape, 0 if is_result_common else backend.rank)
    loss = (result.sin() * weight).sum()
    loss = loss if is_result_common else d.reduce(loss, backend)
    (slope,) = torch.autograd.grad(loss, mine, create_graph=True)
    penalty = slope.pow(2).sum()
    (penalty if is_input_common else d.reduce(penalty, backend)).backward()
    return mine.grad


@pytest.mark.parametrize("name", TWICE)
def test_gradients_of_gradients(name) -> None:
    is_input_common, is_result_common, expected = TWICE[name]
    leaves = [value.requires_grad_() for value in inputs([_SHAPES.get(name, (3, 2))] * 3)]
    used = leaves[:1] if is_input_common else leaves
    results = [expected(leaves)] if is_result_common else expected(leaves)
    loss = sum((each.sin() * weights(each.shape, rank)).sum() for rank, each in enumerate(results))
    slopes = torch.autograd.grad(loss, used, create_graph=True)
    sum(slope.pow(2).sum() for slope in slopes).backward()
    for rank, found in enumerate(Team("memory", 3).run(differentiate_twice, name)):
        torch.testing.assert_close(found, used[0 if is_input_common else rank].grad)


def differentiate_uneven_parts_twice():
    backend = shoal.world().backend
    mine = torch.arange(1.0, backend.rank + 2, requires_grad=True)
    (slope,) = torch.autograd.grad(d.join(mine, backend).pow(3).sum(), mine, create_graph=True)
    d.reduce(slope.sum(), backend).backward()
    return mine.grad


def test_gradients_of_gradients_of_uneven_parts() -> None:
    for rank, found in enumerate(Team("memory", 3).run(differentiate_uneven_parts_twice)):
        torch.testing.assert_close(found, 6 * torch.arange(1.0, rank + 2))


def leave_alone():
    backend = shoal.world().backend
    x = torch.ones(backend.size, 2)
    with torch.no_grad():
        results = [f(x, backend) for f in (d.copy, d.reduce, d.split, d.join, d.gather, d.exchange)]
    assert torch.equal(x, torch.ones(backend.size, 2))
    return [result.requires_grad for result in results]


def test_without_gradients(several: Team) -> None:
    assert several.run(leave_alone) == [[False] * 6] * several.size
