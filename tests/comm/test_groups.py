"""Groups of ranks: made by color or by name, nested, overlapping, at work at the same time."""

from __future__ import annotations

import pytest
import torch

import shoal
from pools import Team
from shoal.comm import Mesh
from shoal.errors import MismatchError


def split_by_parity():
    backend = shoal.world().backend
    group = backend.split(backend.rank % 2)
    tensor = torch.tensor([float(backend.rank)])
    total = group.all_reduce(tensor)
    return group.rank, group.size, group.ranks, total.item(), repr(group)


def test_split_by_color(team: Team) -> None:
    for rank, (place, size, ranks, total, text) in enumerate(team.run(split_by_parity)):
        members = [peer for peer in range(team.size) if peer % 2 == rank % 2]
        assert ranks == tuple(members)
        assert (place, size) == (members.index(rank), len(members))
        assert total == sum(members)
        assert f"rank {place} of {size}" in text


def split_with_none():
    backend = shoal.world().backend
    group = backend.split(None if backend.rank == 0 else 5)
    again = backend.split("a text is a color too")
    total = None if group is None else group.all_reduce(torch.ones(1)).item()
    return total, again.all_reduce(torch.ones(1)).item()


def test_a_rank_without_a_color_is_in_no_group(several: Team) -> None:
    size = several.size
    expected = [(None, size), *[(size - 1, size)] * (size - 1)]
    assert several.run(split_with_none) == expected


def name_members():
    backend = shoal.world().backend
    group = backend.subgroup([backend.size - 1, 0, 0])
    try:
        backend.subgroup([0, backend.size])
    except ValueError as error:
        out_of_range = str(error)
    try:
        backend.subgroup([0] if backend.rank == 0 else [0, 1])
    except MismatchError as error:
        different = str(error)
    gathered = None if group is None else group.all_gather_object(backend.rank)
    return gathered, out_of_range, different


def test_subgroup_by_members(several: Team) -> None:
    size = several.size
    for rank, (gathered, out_of_range, different) in enumerate(several.run(name_members)):
        assert gathered == ([0, size - 1] if rank in (0, size - 1) else None)
        assert f"from 0 to {size - 1}" in out_of_range
        assert "subgroup([0, 1])" in different


def every_collective_in_a_group():
    """The group's ranks are not the world's: roots and peers count inside."""
    backend = shoal.world().backend
    group = backend.split(0 if backend.rank else None)
    if group is None:
        return True
    size, rank = group.size, group.rank
    ones = torch.ones(size)
    everybody = [float(peer) for peer in range(size)]
    own = torch.full((size,), float(rank))
    root = torch.arange(float(size)) if rank == size - 1 else None
    assert group.all_reduce(ones.clone()).tolist() == [float(size)] * size
    reduced = group.reduce(ones.clone(), root=size - 1)
    assert (reduced is None) == (rank != size - 1)
    assert group.broadcast(own.clone(), root=size - 1).tolist() == [float(size - 1)] * size
    assert group.all_gather(own[:1]).tolist() == everybody
    gathered = group.gather(own[:1], root=size - 1)
    assert gathered is None if rank != size - 1 else gathered.tolist() == everybody
    assert group.scatter(root, root=size - 1).tolist() == [float(rank)]
    assert group.reduce_scatter(own).tolist() == [sum(everybody)]
    assert group.all_to_all(own).tolist() == everybody
    if size > 1:
        send = group.send(own, (rank + 1) % size, async_op=True)
        assert group.recv(src=(rank - 1) % size)[0] == (rank - 1) % size
        send.wait()
    assert group.all_gather_object(rank) == list(range(size))
    group.barrier()
    return True


def test_the_full_set_of_collectives(several: Team) -> None:
    assert all(several.run(every_collective_in_a_group))


def nested():
    backend = shoal.world().backend
    sizes = []
    group = backend
    while group is not None and group.size > 1:
        group = group.split(0 if group.rank < (group.size + 1) // 2 else 1)
        sizes.append(int(group.all_reduce(torch.ones(1)).item()))
        if len(sizes) == 2:  # a group made while others are made elsewhere
            group = group.split(group.rank if group.size == 1 else 0)
    return sizes, int(backend.all_reduce(torch.ones(1)).item())


def test_nested_groups(several: Team) -> None:
    for sizes, world_size in several.run(nested):
        assert world_size == several.size
        assert sizes[-1] == 1
        assert sizes == sorted(sizes, reverse=True)


def alternate(rounds):
    """Two groups that share a rank, and the world, in turn: none disturbs another."""
    backend = shoal.world().backend
    left = backend.subgroup(range(backend.size - 1))
    right = backend.subgroup(range(1, backend.size))
    totals = []
    for index in range(rounds):
        for group in (left, right, backend):
            if group is not None:
                numel = 1 + 9000 * (index % 2)
                total = group.all_reduce(torch.full((numel,), float(backend.rank)))
                totals.append(total.unique().tolist())
    return totals


def test_overlapping_groups_in_turn(several: Team) -> None:
    size = several.size
    groups = [range(size - 1), range(1, size), range(size)]
    for rank, totals in enumerate(several.run(alternate, 20)):
        expected = [[float(sum(group))] for group in groups if rank in group] * 20
        assert totals == expected


def apart(rounds):
    """Disjoint groups work at their own pace, with different numbers of operations."""
    backend = shoal.world().backend
    group = backend.split(backend.rank % 2)
    count = rounds * (1 + backend.rank % 2)
    for index in range(count):
        tensor = torch.full((1 + 300 * (index % 50),), 1.0)
        assert group.all_reduce(tensor).unique().tolist() == [float(group.size)]
    return backend.all_reduce(torch.tensor([count])).item()


def test_disjoint_groups_at_the_same_time(several: Team) -> None:
    expected = sum(50 * (1 + rank % 2) for rank in range(several.size))
    assert several.run(apart, 50) == [expected] * several.size


def async_in_two_groups():
    backend = shoal.world().backend
    other = backend.split(0)
    tensors = [torch.full((5000,), float(index)) for index in range(6)]
    works = [
        (backend, other)[index % 2].all_reduce(tensor, async_op=True)
        for index, tensor in enumerate(tensors)
    ]
    return [work.wait()[0].item() for work in reversed(works)]


def test_asynchronous_work_in_two_groups(several: Team) -> None:
    expected = [float(index * several.size) for index in reversed(range(6))]
    assert several.run(async_in_two_groups) == [expected] * several.size


# Meshes ---------------------------------------------------------------------------------


def lay_out(shape):
    mesh = Mesh(**shape)
    ranks = {axis: mesh.group(axis).ranks for axis in ("replica", "data", "pipeline", "tensor")}
    here = mesh.rank_at(**mesh.coordinates)
    first = mesh.rank_at(data=0, tensor=0, pipeline=0, replica=0)
    return mesh.shape, mesh.coordinates, ranks, here, first, repr(mesh)


def test_mesh_of_three_axes() -> None:
    results = Team("memory", 8).run(lay_out, {"data": 2, "tensor": 2, "pipeline": 2})
    for rank, (shape, place, ranks, here, first, text) in enumerate(results):
        data, pipeline, tensor = rank // 4, rank // 2 % 2, rank % 2
        assert shape == {"replica": 1, "data": 2, "pipeline": 2, "tensor": 2}
        assert place == {"replica": 0, "data": data, "pipeline": pipeline, "tensor": tensor}
        assert ranks == {
            "replica": (rank,),
            "data": (rank % 4, rank % 4 + 4),
            "pipeline": (rank - 2 * pipeline, rank - 2 * pipeline + 2),
            "tensor": (rank - tensor, rank - tensor + 1),
        }
        assert (here, first) == (rank, 0)
        assert text == "Mesh(data=2, pipeline=2, tensor=2)"


def test_data_takes_what_is_left() -> None:
    results = Team("memory", 8).run(lay_out, {"tensor": 2, "replica": 2})
    assert [shape["data"] for shape, *_ in results] == [2] * 8
    assert results[5][2]["replica"] == (1, 5)
    assert [text for *_, text in Team("memory", 1).run(lay_out, {})] == ["Mesh(one rank)"]


def sums_along_axes():
    mesh = Mesh(tensor=2)
    rank = float(shoal.world().rank)
    along = [
        mesh.group(axis).all_reduce(torch.tensor([rank])).item() for axis in ("data", "tensor")
    ]
    return along, mesh.group("replica").size


@pytest.mark.parametrize("backend", ["memory", "shm"])
def test_sums_stay_on_their_axis(backend) -> None:
    results = Team(backend, 4).run(sums_along_axes)
    assert results == [([2.0, 1.0], 1), ([4.0, 1.0], 1), ([2.0, 5.0], 1), ([4.0, 5.0], 1)]


def mesh_of_a_group():
    group = shoal.world().subgroup([1, 2])
    return None if group is None else Mesh(tensor=2, world=group).group("tensor").ranks


def test_mesh_of_a_group() -> None:
    assert Team("memory", 4).run(mesh_of_a_group) == [None, (1, 2), (1, 2), None]


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"data": 3}, "multiply to the 4 ranks of the world; .*data=3.* is 3"),
        ({"tensor": 3}, "multiply to the 4 ranks"),
        ({"tensor": 0}, "at least 1"),
        ({"data": 4, "pipeline": 2}, "is 8. Change an axis, or start 8 ranks"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(shape, message) -> None:
    with pytest.raises(ValueError, match=message):
        Team("memory", 4).run(lay_out, shape)


def unknown_axes():
    mesh = Mesh()
    with pytest.raises(ValueError, match="the axes replica, data, pipeline, tensor; got 'rows'"):
        mesh.group("rows")
    with pytest.raises(ValueError, match=r"got \['rows'\]"):
        mesh.rank_at(rows=0)
    with pytest.raises(ValueError, match="data must be from 0 to 1; got 2"):
        mesh.rank_at(data=2)


def test_unknown_axes_are_refused() -> None:
    Team("memory", 2).run(unknown_axes)
