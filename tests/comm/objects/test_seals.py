"""Pickles are read only from ranks of this world, for this group, and once."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pools
import shoal
from shoal.comm.objects.encoding import PICKLED
from shoal.comm.objects.seals import COLLECTIVES, Seals, message_stream
from shoal.errors import UntrustedPickleError
from shoal.torch_support.memory import as_bytes

SECRET = b"s" * 32
DATA = PICKLED + pickle.dumps({1, 2})


def seals(secret: bytes | None = SECRET, group_id: int = 0, ranks: Any = (0, 1)) -> Seals:
    return Seals(secret, group_id, ranks)


def test_what_a_rank_sealed_is_read() -> None:
    sender, receiver = seals(), seals()
    for _ in range(3):
        assert receiver.open(sender.seal(DATA, 1, COLLECTIVES), 1, COLLECTIVES) == (DATA, True)


def test_plain_data_needs_no_seal_and_allows_no_pickle() -> None:
    assert seals().seal(b"Pplain", 0, COLLECTIVES) == b"Pplain"
    assert seals().open(b"Pplain", 0, COLLECTIVES) == (b"Pplain", False)


@pytest.mark.parametrize(
    ("receiver", "sender_rank", "stream"),
    [
        (seals(b"t" * 32), 1, COLLECTIVES),
        (seals(group_id=3), 1, COLLECTIVES),
        (seals(ranks=(0, 2)), 1, COLLECTIVES),
        (seals(), 0, COLLECTIVES),
        (seals(), 1, message_stream(1, 0, 0)),
    ],
    ids=["other secret", "other group", "other ranks", "other sender", "other stream"],
)
def test_a_seal_is_good_for_what_it_was_made_for(
    receiver: Seals, sender_rank: int, stream: str
) -> None:
    sealed = seals().seal(DATA, 1, COLLECTIVES)
    with pytest.raises(UntrustedPickleError, match="does not prove"):
        receiver.open(sealed, sender_rank, stream)


def test_every_byte_is_sealed() -> None:
    sealed = seals().seal(DATA, 1, COLLECTIVES)
    for at in range(1, len(sealed)):
        changed = bytearray(sealed)
        changed[at] ^= 1
        with pytest.raises(UntrustedPickleError):
            seals().open(bytes(changed), 1, COLLECTIVES)
    for length in range(1, len(sealed)):
        with pytest.raises(UntrustedPickleError):
            seals().open(sealed[:length], 1, COLLECTIVES)


def test_nothing_is_read_twice_but_threads_may_overtake() -> None:
    sender, receiver = seals(), seals()
    sealed = [sender.seal(DATA, 1, COLLECTIVES) for _ in range(2000)]
    for each in (sealed[1], sealed[0], *sealed[2:]):
        receiver.open(each, 1, COLLECTIVES)
    for again in (sealed[0], sealed[1], sealed[-1]):
        with pytest.raises(UntrustedPickleError, match="was read before"):
            receiver.open(again, 1, COLLECTIVES)


# In a world -------------------------------------------------------------------------------


class Bomb:
    """Runs code where it is unpickled."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self._path),)


def unsealed(backend: Any, data: bytes) -> bytes:
    return data


def sealed_with_a_guess(backend: Any, data: bytes) -> bytes:
    return Seals(bytes(32), 0, backend.ranks).seal(data, backend.rank, COLLECTIVES)


def intrude(how: Callable[[Any, bytes], bytes], path: str) -> str:
    """Rank 1 is a stranger that got hold of a connection."""
    world = shoal.world()
    backend: Any = world.backend.split(0)
    if world.rank == 1:
        forged = how(backend, PICKLED + pickle.dumps(Bomb(path)))
        backend._encode = lambda value: as_bytes(bytearray(forged))
        backend._decode_parts = lambda joined, sizes: []
    try:
        backend.all_gather_object(None)
        return "read"
    except UntrustedPickleError as error:
        return str(error)


@pytest.mark.parametrize("how", [unsealed, sealed_with_a_guess])
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_strangers_pickle_runs_nothing(
    backend: str, how: Callable[[Any, bytes], bytes], tmp_path: Path
) -> None:
    path = tmp_path / "ran"
    found = pools.Team(backend, 2).run(intrude, how, str(path))
    assert "said to be of rank 1" in found[0]
    assert not path.exists()
