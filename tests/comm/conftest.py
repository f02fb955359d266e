"""The worlds that the conformance tests run on."""

from collections.abc import Iterator

import pytest

import pools

_FAST = {
    "memory": (1, 2, 3, 4, 5, 8),
    "shm": (1, 2, 3, 4),
}
_FULL: dict[str, tuple[int, ...]] = {}


def _worlds() -> Iterator[object]:
    for marks, worlds in ((), _FAST), ((pytest.mark.full,), _FULL):
        for backend, sizes in worlds.items():
            own = (pytest.mark.mpi,) if backend == "mpi" else ()
            for size in sizes:
                team = pools.Team(backend, size)
                yield pytest.param(team, id=f"{backend}-{size}", marks=(*marks, *own))


@pytest.fixture(params=list(_worlds()), scope="session")
def team(request: pytest.FixtureRequest) -> pools.Team:
    """A world of each backend and size; its processes are started once."""
    return request.param


@pytest.fixture(scope="session", autouse=True)
def pools_end() -> Iterator[None]:
    """Ends the worlds with the session."""
    yield
    pools.close_all()
