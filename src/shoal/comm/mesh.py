"""A mesh: the ranks of a world along named axes, with the group of each axis."""

from __future__ import annotations

import math
from collections.abc import Mapping

from shoal.comm.backend import Backend
from shoal.comm.world import World, current

# From the outermost to the innermost: ranks that differ in the last axis only are neighbours,
# so the axis with the most traffic stays inside a host.
AXES = ("replica", "data", "pipeline", "tensor")


class Mesh:
    """The ranks of a world as a grid.

    Ranks are numbered with the last axis fastest: tensor neighbours are next to each other.
    All ranks make the mesh together, because it makes groups.

    Example:
        >>> import shoal
        >>> from shoal.comm import Mesh
        >>> def locate():
        ...     mesh = Mesh(data=2, tensor=2)
        ...     return mesh.coordinates, mesh.group("tensor").ranks
        >>> shoal.run(locate, ranks=4, backend="memory")[3]
        ({'replica': 0, 'data': 1, 'pipeline': 0, 'tensor': 1}, (2, 3))
    """

    def __init__(
        self,
        *,
        data: int | None = None,
        tensor: int = 1,
        pipeline: int = 1,
        replica: int = 1,
        world: World | Backend | None = None,
    ) -> None:
        """Lays out the grid and makes one group per axis.

        Args:
            data: Ranks that see different data; None takes what the other axes leave.
            tensor: Ranks that share each layer.
            pipeline: Ranks that hold different layers.
            replica: Copies of the whole data axis.
            world: What to lay out; the current world if None.
        """
        self._backend = _backend_of(world)
        sizes = {"data": data, "tensor": tensor, "pipeline": pipeline, "replica": replica}
        self.shape = _checked_shape(sizes, self._backend.size)
        self.coordinates = _coordinates(self._backend.rank, self.shape)
        self._groups = {axis: self._make_group(axis) for axis in AXES}

    def group(self, axis: str) -> Backend:
        """The ranks that differ from this one along one axis only."""
        if axis not in self._groups:
            raise ValueError(f"a mesh has the axes {', '.join(AXES)}; got {axis!r}")
        return self._groups[axis]

    def rank_at(self, **coordinates: int) -> int:
        """The rank at some coordinates; axes that are left out are this rank's own."""
        unknown = set(coordinates) - set(AXES)
        if unknown:
            raise ValueError(f"a mesh has the axes {', '.join(AXES)}; got {sorted(unknown)}")
        at = {**self.coordinates, **coordinates}
        rank = 0
        for axis in AXES:
            if not 0 <= at[axis] < self.shape[axis]:
                raise ValueError(f"{axis} must be from 0 to {self.shape[axis] - 1}; got {at[axis]}")
            rank = rank * self.shape[axis] + at[axis]
        return rank

    def _make_group(self, axis: str) -> Backend:
        first = self.rank_at(**{axis: 0})
        group = self._backend.split(first)
        assert group is not None
        return group

    def __repr__(self) -> str:
        sizes = ", ".join(f"{axis}={size}" for axis, size in self.shape.items() if size > 1)
        return f"Mesh({sizes or 'one rank'})"


def _backend_of(world: World | Backend | None) -> Backend:
    if isinstance(world, Backend):
        return world
    return (world or current()).backend


def _checked_shape(sizes: Mapping[str, int | None], world_size: int) -> dict[str, int]:
    given = {axis: size for axis, size in sizes.items() if size is not None}
    if any(size < 1 for size in given.values()):
        raise ValueError(f"every axis of a mesh must be at least 1; got {given}")
    product = math.prod(given.values())
    if sizes["data"] is None and world_size % product == 0:
        given["data"] = world_size // product
        product = world_size
    if product != world_size:
        factors = " x ".join(f"{axis}={size}" for axis, size in given.items())
        raise ValueError(
            f"the axes must multiply to the {world_size} ranks of the world; "
            f"{factors} is {product}. Change an axis, or start {product} ranks."
        )
    return {axis: given[axis] for axis in AXES}


def _coordinates(rank: int, shape: Mapping[str, int]) -> dict[str, int]:
    coordinates = {}
    for axis in reversed(AXES):
        rank, coordinates[axis] = divmod(rank, shape[axis])
    return {axis: coordinates[axis] for axis in AXES}
