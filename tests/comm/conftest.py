"""The worlds that the conformance tests run on."""

from collections.abc import Iterator, Mapping

import pytest

import pools

Sizes = Mapping[str, tuple[int, ...]]
# Every backend at every size is for `make test-full`. The processes of a world start once.
FAST: Sizes = {"memory": (1, 2, 3, 4, 5, 8), "shm": (1, 2, 3, 4), "gloo": (2, 3), "mpi": (3,)}
FULL: Sizes = {"gloo": (1, 4), "mpi": (1, 2, 4)}
# Where what matters is that there are others.
SEVERAL_FAST: Sizes = {"memory": (2, 4), "shm": (2, 4), "gloo": (3,), "mpi": (3,)}
SEVERAL_FULL: Sizes = {"memory": (3, 5, 8), "shm": (3,), "gloo": (2, 4), "mpi": (2, 4)}


def _worlds(fast: Sizes, full: Sizes) -> list[object]:
    return [*_params(fast), *_params(full, pytest.mark.full)]


def _params(worlds: Sizes, *marks: pytest.MarkDecorator) -> Iterator[object]:
    for backend, sizes in worlds.items():
        own = (pytest.mark.mpi,) if backend == "mpi" else ()
        for size in sizes:
            team = pools.Team(backend, size)
            yield pytest.param(team, id=f"{backend}-{size}", marks=(*marks, *own))


@pytest.fixture(params=_worlds(FAST, FULL), scope="session")
def team(request: pytest.FixtureRequest) -> pools.Team:
    """A world of each backend and size."""
    return request.param


@pytest.fixture(params=_worlds(SEVERAL_FAST, SEVERAL_FULL), scope="session")
def several(request: pytest.FixtureRequest) -> pools.Team:
    """A world of more than one rank."""
    return request.param


@pytest.fixture(scope="session", autouse=True)
def pools_end() -> Iterator[None]:
    """Ends the worlds with the session."""
    yield
    pools.close_all()
