"""Proofs on pickled objects: that a rank of this world made them, for this group and only once.

Unpickling runs code, so a pickle is read only if it carries a proof made with the world's secret.
The proof covers the group, the sender, the stream (collectives, or messages from one rank to
another under a tag) and a running number. A receiver remembers numbers, so nothing is read a
second time. Numbers may be left out: an operation that failed has used one.
"""

from __future__ import annotations

import hmac
import itertools
import struct
import threading
from collections import defaultdict
from collections.abc import Sequence

from shoal.comm.objects.encoding import PICKLED
from shoal.errors import UntrustedPickleError

COLLECTIVES = "collectives"
_NUMBER = struct.Struct("<Q")
_PROOF_BYTES = 32
# Threads of a rank may overtake each other by a few numbers.
_WINDOW = 1024


class Seals:
    """One rank's side of the proofs in one group."""

    def __init__(self, secret: bytes | None, group_id: int, ranks: Sequence[int]) -> None:
        """``ranks`` are the members' world ranks in group order; without a secret none is valid."""
        self._secret, self._ranks = secret, ranks
        self._group = f"{group_id} of {list(ranks)}"
        self._numbers: dict[str, itertools.count[int]] = defaultdict(lambda: itertools.count(1))
        self._seen: dict[tuple[str, int], list[int]] = defaultdict(list)
        self._lock = threading.Lock()

    def seal(self, data: bytes, sender: int, stream: str) -> bytes:
        """Encoded objects, with a proof where they need one."""
        if data[:1] != PICKLED or self._secret is None:
            return data
        with self._lock:
            number = _NUMBER.pack(next(self._numbers[stream]))
        return PICKLED + number + self._prove(number, sender, stream, data[1:]) + data[1:]

    def open(self, data: bytes, sender: int, stream: str) -> tuple[bytes, bool]:
        """Encoded objects without their proof, and whether pickles among them may be read."""
        if data[:1] != PICKLED or self._secret is None:
            return data, False
        number, rest = data[1 : 1 + _NUMBER.size], data[1 + _NUMBER.size :]
        proof, pickled = rest[:_PROOF_BYTES], rest[_PROOF_BYTES:]
        if len(number) < _NUMBER.size or not hmac.compare_digest(
            proof, self._prove(number, sender, stream, pickled)
        ):
            raise self._refusal(sender, "does not prove to come from it")
        with self._lock:
            is_new = self._note(_NUMBER.unpack(number)[0], sender, stream)
        if not is_new:
            raise self._refusal(sender, "was read before")
        return PICKLED + pickled, True

    def _prove(self, number: bytes, sender: int, stream: str, pickled: bytes) -> bytes:
        assert self._secret is not None
        about = f"pickle\0{self._group}\0{self._ranks[sender]}\0{stream}\0".encode()
        return hmac.digest(self._secret, about + number + pickled, "sha256")

    def _note(self, number: int, sender: int, stream: str) -> bool:
        seen = self._seen[stream, sender]
        if number in seen or (seen and number + _WINDOW <= seen[-1]):
            return False
        seen.append(number)
        seen.sort()
        del seen[:-_WINDOW]
        return True

    def _refusal(self, sender: int, what: str) -> UntrustedPickleError:
        return UntrustedPickleError(
            f"an object that needs pickle, said to be of rank {self._ranks[sender]}, {what}. "
            "It was not read. Somebody else writes to the connections of this world."
        )


def message_stream(source: int, target: int, tag: int) -> str:
    """The stream of messages between two ranks of a group under a tag."""
    return f"{source} to {target}, tag {tag}"
