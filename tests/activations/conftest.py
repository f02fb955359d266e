"""The worlds that activations are kept and fetched on."""

from collections.abc import Iterator

import pytest

import pools

FAST = {"memory": (2, 4), "shm": (3,), "gloo": (3,), "mpi": (3,)}
FULL = {"memory": (3, 5), "shm": (2, 4), "gloo": (2,), "mpi": (2, 4)}


def _params(worlds: dict[str, tuple[int, ...]], *marks: pytest.MarkDecorator) -> Iterator[object]:
    for backend, sizes in worlds.items():
        own = (pytest.mark.mpi,) if backend == "mpi" else ()
        for size in sizes:
            team = pools.Team(backend, size)
            yield pytest.param(team, id=f"{backend}-{size}", marks=(*marks, *own))


@pytest.fixture(params=[*_params(FAST), *_params(FULL, pytest.mark.full)], scope="session")
def several(request: pytest.FixtureRequest) -> pools.Team:
    """A world of more than one rank."""
    return request.param


@pytest.fixture(params=list(_params(dict.fromkeys(FAST, (1,)))), scope="session")
def alone(request: pytest.FixtureRequest) -> pools.Team:
    """A world of one rank."""
    return request.param


@pytest.fixture(scope="session", autouse=True)
def pools_end() -> Iterator[None]:
    """Ends the worlds with the session."""
    yield
    pools.close_all()
