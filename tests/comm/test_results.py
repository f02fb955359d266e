"""Results of collectives: in place or new, exact, equal on all ranks, or refused."""

from __future__ import annotations

import pytest
import torch

import shoal
from pools import Team
from shoal.comm import ReduceOp
from shoal.errors import MismatchError


def _raised(call):
    """The exception of a call that must fail on this rank."""
    try:
        call()
    except Exception as error:
        return error
    return None


# Arithmetic -----------------------------------------------------------------------------


def reduce_normals(op, dtype, numel):
    backend = shoal.world().backend
    inputs = [
        torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)
        for rank in range(backend.size)
    ]
    result = backend.all_reduce(inputs[backend.rank].clone(), op)
    parts = backend.all_gather(backend.reduce_scatter(inputs[backend.rank].clone(), op))
    wide = torch.stack(inputs).double()
    exact = wide.prod(0) if op == "product" else wide.sum(0)
    exact = exact / backend.size if op == "average" else exact
    magnitude = wide.abs().sum(0).clamp(min=1)
    error = ((result.double() - exact).abs() / magnitude).max().item()
    raw = result.view(torch.uint8).numpy().tobytes()
    return raw, error, torch.allclose(result, parts, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", ["sum", "average", "product"])
@pytest.mark.parametrize("numel", [1009, 300007])
def test_every_rank_gets_the_same_bits(several: Team, op, dtype, numel) -> None:
    results = several.run(reduce_normals, op, dtype, numel)
    assert len({raw for raw, _, _ in results}) == 1
    # One rounding of the result, not one for each rank: sums of 16 bits are kept in 32.
    assert all(error <= several.size * torch.finfo(dtype).eps for _, error, _ in results)
    assert all(is_close for _, _, is_close in results)


def sum_of_ones(dtype):
    backend = shoal.world().backend
    tensor = torch.full((3,), float(backend.size), dtype=dtype)
    average = backend.all_reduce(tensor.clone(), "average").tolist()
    members = [backend.all_reduce(tensor.clone(), op).tolist() for op in ("avg", "mean")]
    return average, members, backend.all_reduce(tensor.clone(), ReduceOp.SUM).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_average_divides_once(team: Team, dtype) -> None:
    size = float(team.size)
    for average, members, total in team.run(sum_of_ones, dtype):
        assert average == [size] * 3
        assert members == [[size] * 3] * 2
        assert total == [size * size] * 3


def sixteen_bit_sum(dtype, value):
    backend = shoal.world().backend
    tensor = torch.full((5,), value, dtype=dtype)
    return backend.all_reduce(tensor, "average").tolist()


@pytest.mark.parametrize("size", [2, 3, 8])
def test_an_average_of_large_sixteen_bit_values_does_not_overflow(size) -> None:
    results = Team("memory", size).run(sixteen_bit_sum, torch.float16, 60000.0)
    assert results == [[torch.tensor(60000.0).half().item()] * 5] * size


def count_rows(length):
    backend = shoal.world().backend
    tensor = torch.arange(float(length))
    root = tensor if backend.rank == 0 else None
    parts = (
        backend.reduce_scatter(tensor.clone(), "max"),
        backend.scatter(root),
        backend.all_to_all(torch.full((length,), float(backend.rank))),
    )
    return [part.tolist() for part in parts]


@pytest.mark.parametrize("length", [0, 1, 7, 11])
def test_the_remainder_goes_to_the_first_ranks_and_nothing_is_padded(several, length) -> None:
    size = several.size
    sizes = [length // size + (rank < length % size) for rank in range(size)]
    for rank, (reduced, scattered, exchanged) in enumerate(several.run(count_rows, length)):
        start = sum(sizes[:rank])
        mine = [float(row) for row in range(start, start + sizes[rank])]
        assert reduced == mine
        assert scattered == mine
        assert exchanged == [float(sender) for sender in range(size) for _ in range(sizes[rank])]


# What is not in place leaves its input alone, however that is made ----------------------


def expanded_inputs():
    backend = shoal.world().backend
    size, row = backend.size, torch.arange(3.0) + backend.rank
    tensor = row.expand(size, 3)
    gathered = backend.all_gather(tensor)
    reduced = backend.reduce_scatter(tensor)
    exchanged = backend.all_to_all(tensor)
    received = backend.broadcast(tensor if backend.rank == 0 else None)
    assert torch.equal(tensor, row.expand(size, 3))
    return gathered, reduced, exchanged, received


def test_expanded_inputs(several: Team) -> None:
    size = several.size
    rows = [torch.arange(3.0) + rank for rank in range(size)]
    for gathered, reduced, exchanged, received in several.run(expanded_inputs):
        assert torch.equal(gathered, torch.cat([row.expand(size, 3) for row in rows]))
        assert torch.equal(reduced, sum(rows).view(1, 3))
        assert torch.equal(exchanged, torch.stack(rows))
        assert torch.equal(received, rows[0].expand(size, 3))


def all_with(make, mode):
    """Each collective on tensors of some making; whether results are right."""
    backend = shoal.world().backend
    size = backend.size
    with mode():
        tensor = make(2 * size)
        before = tensor.detach().clone()
        out = make(2 * size * size)
        assert backend.all_gather(tensor, out=out) is out
        assert torch.equal(out.detach(), torch.cat([before] * size))
        assert torch.equal(backend.reduce_scatter(tensor), 2.0 * before[:2] / 2 * size)
        assert torch.equal(tensor.detach(), before)
        assert backend.all_reduce(tensor) is tensor
        assert torch.equal(tensor.detach(), before * size)
        strided = make(4 * size).view(-1, 2)[:, 0]
        assert backend.all_reduce(strided) is strided
        assert torch.equal(strided.detach(), torch.full((2 * size,), 3.0 * size))
        assert torch.equal(backend.broadcast(tensor, root=size - 1).detach(), before * size)
    return True


def plain(numel):
    return torch.full((numel,), 3.0)


def with_gradient(numel):
    return torch.full((numel,), 3.0, requires_grad=True)


def made_for_inference(numel):
    with torch.inference_mode():
        return torch.full((numel,), 3.0)


@pytest.mark.parametrize(
    ("make", "mode"),
    [
        (with_gradient, torch.enable_grad),
        (with_gradient, torch.no_grad),
        (plain, torch.no_grad),
        (plain, torch.inference_mode),
        (made_for_inference, torch.inference_mode),
    ],
    ids=["leaf", "leaf-no_grad", "no_grad", "inference_mode", "inference-tensor"],
)
def test_tensors_with_gradients_and_without(several: Team, make, mode) -> None:
    assert all(several.run(all_with, make, mode))


def reduce_a_leaf():
    backend = shoal.world().backend
    leaf = torch.ones(3, requires_grad=True)
    result = backend.all_reduce(leaf)
    gathered = backend.all_gather(leaf)
    (result * 2).sum().backward()
    return leaf.is_leaf, result.requires_grad, gathered.requires_grad, leaf.grad.tolist()


def test_collectives_are_invisible_to_autograd(several: Team) -> None:
    assert several.run(reduce_a_leaf) == [(True, True, False, [2.0] * 3)] * several.size


def result_of_new_tensors():
    backend = shoal.world().backend
    whole = torch.zeros(backend.size, 2, dtype=torch.int32)
    results = [
        backend.all_gather(torch.zeros(1, 2, dtype=torch.int32)),
        backend.reduce_scatter(whole),
        backend.all_to_all(whole),
        backend.scatter(whole if backend.rank == 0 else None),
        backend.broadcast(whole if backend.rank == 0 else None),
    ]
    backend.barrier()
    memory = {result.untyped_storage().data_ptr() for result in results}
    for result in results[:4]:
        result.fill_(backend.rank + 1)  # nobody else sees this
    backend.barrier()
    owned = all(bool((result == backend.rank + 1).all()) for result in results[:4])
    return len(memory), owned, bool((whole == 0).all())


def test_results_are_the_callers_own(several: Team) -> None:
    results = several.run(result_of_new_tensors)
    assert all(owned and is_untouched for _, owned, is_untouched in results)
    assert all(num_storages == 5 for num_storages, _, _ in results)


def in_their_own_place(rows):
    """A shard inside its buffer, as sharded training has it."""
    backend = shoal.world().backend
    size, rank = backend.size, backend.rank
    for buffer in (torch.empty(size * rows), backend.empty(size * rows)):
        own = buffer[rank * rows : (rank + 1) * rows]
        own.fill_(rank)
        assert backend.all_gather(own, out=buffer) is buffer
        everybody = torch.arange(float(size)).repeat_interleave(rows)
        assert torch.equal(buffer, everybody), "all_gather"
        assert backend.reduce_scatter(buffer, out=own) is own
        assert torch.equal(own, torch.full((rows,), float(rank * size))), "reduce_scatter"
        buffer.copy_(everybody)
        root = buffer if rank == 0 else None
        part = backend.scatter(root, out=own)
        assert torch.equal(part, torch.full((rows,), float(rank))), "scatter"
        backend.gather(own, out=buffer if rank == 0 else None)
        assert torch.equal(buffer, everybody), "gather"
    return True


@pytest.mark.parametrize("rows", [3, 200_003])
def test_results_may_lie_in_their_own_place(several: Team, rows) -> None:
    assert all(several.run(in_their_own_place, rows))


def in_another_place():
    """Elsewhere, one would be read while the other is written."""
    backend = shoal.world().backend
    size = backend.size
    buffer = torch.zeros(2 * size + 2)
    whole, shifted = buffer[: 2 * size], buffer[2 * backend.rank + 1 :][:2]
    calls = [
        lambda: backend.all_gather(shifted, out=whole),
        lambda: backend.reduce_scatter(whole, out=shifted),
        lambda: backend.all_to_all(whole, out=whole),
        lambda: backend.all_to_all(whole, out=buffer[1 : 2 * size + 1]),
    ]
    errors = [_raised(call) for call in calls]
    backend.barrier()
    assert not buffer.any()
    return [type(error) for error in errors]


def test_results_elsewhere_in_the_input_are_refused(several: Team) -> None:
    expected = [MismatchError, ValueError, ValueError, ValueError]
    assert several.run(in_another_place) == [expected] * several.size


# What is refused ------------------------------------------------------------------------


def try_wrong_outs():
    backend = shoal.world().backend
    size, tensor = backend.size, torch.ones(backend.size, 2)
    whole = torch.empty(size * size, 2)
    calls = [
        lambda: backend.all_gather(tensor, out=torch.empty(size * size, 3)),
        lambda: backend.all_gather(tensor, out=whole.double()),
        lambda: backend.reduce_scatter(tensor, out=torch.empty(2, 2)),
        lambda: backend.reduce_scatter(tensor, out=torch.empty(1, 3)),
        lambda: backend.all_to_all(tensor, out=torch.empty(size, 1)),
        lambda: backend.reduce_scatter(tensor, sizes=[1] * (size + 1)),
        lambda: backend.reduce_scatter(tensor, sizes=[size + 1] + [0] * (size - 2) + [-1]),
        lambda: backend.all_to_all(tensor, sizes=[2] * size),
        lambda: backend.all_reduce(tensor, "median"),
        lambda: backend.broadcast(tensor, root=size),
        lambda: backend.reduce(tensor, root=-1),
        lambda: backend.send(tensor, size),
        lambda: backend.send(tensor, backend.rank),
        lambda: backend.recv(src=backend.rank),
        lambda: backend.send(tensor, (backend.rank + 1) % size, tag=-1),
    ]
    errors = [_raised(call) for call in calls]
    backend.barrier()  # and all of them can go on
    return [f"{type(error).__name__}: {error}" for error in errors]


def test_a_wrong_argument_is_a_value_error(several: Team) -> None:
    for errors in several.run(try_wrong_outs):
        assert all(error.startswith("ValueError: ") for error in errors), errors
        assert "got float32[" in errors[0]
        assert "median" in errors[8]


def try_outs_of_wrong_length(rank, rows):
    """One rank gives a result too short or too long: all must hear of it, nothing may move."""
    backend = shoal.world().backend
    size, is_it = backend.size, backend.rank == rank
    errors = []
    for call in (backend.all_gather, backend.all_to_all):
        out = torch.full((size + rows if is_it else size,), 7.0)
        per_rank = 1 if call == backend.all_gather else size
        errors.append(_raised(lambda call=call, out=out, n=per_rank: call(torch.ones(n), out=out)))
        assert bool((out == 7).all())
    backend.barrier()
    return errors


@pytest.mark.parametrize("rows", [-1, 1])
def test_an_out_of_wrong_length_is_an_error_on_all_ranks(several: Team, rows) -> None:
    for errors in several.run(try_outs_of_wrong_length, several.size - 1, rows):
        assert all(isinstance(error, MismatchError) for error in errors), errors
        assert all("out" in str(error) for error in errors)


def try_odd_dtypes():
    backend = shoal.world().backend
    pairs = [
        (torch.int64, "average"),
        (torch.uint8, "average"),
        (torch.bool, "sum"),
        (torch.bool, "average"),
        (torch.complex64, "max"),
        (torch.float8_e4m3fn, "sum"),
        (torch.uint16, "sum"),
    ]
    errors = []
    for dtype, op in pairs:
        tensor = torch.ones(4).to(dtype)
        for call in (backend.all_reduce, backend.reduce, backend.reduce_scatter):
            errors.append(_raised(lambda c=call, t=tensor, o=op: c(t, o)))
    return [type(error).__name__ for error in errors]


def test_reductions_without_a_meaning_are_type_errors(team: Team) -> None:
    assert team.run(try_odd_dtypes) == [["TypeError"] * 21] * team.size


def conjugated():
    backend = shoal.world().backend
    tensor = torch.full((40000,), 1 + 2j).conj()
    gathered = backend.all_gather(tensor)
    own = backend.empty(40000, torch.complex64).fill_(1 + 2j).conj()
    assert backend.all_reduce(own) is own
    return set(gathered.tolist()), set(own.tolist())


def test_conjugate_views(several: Team) -> None:
    results = several.run(conjugated)
    assert results == [({1 - 2j}, {several.size * (1 - 2j)})] * several.size
