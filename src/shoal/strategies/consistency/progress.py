"""How far a rank's optimizers are, and with which options: the same on all ranks of one model.

[Note: ranks that train alike]
Replicas stay equal because every rank makes the same steps with the same options. A rank that
leaves out a step, or steps with another learning rate, breaks that without any collective going
wrong. So what a rank has done travels as two numbers, in headers that are exchanged anyway, with
every vote. Only if they differ do the ranks tell each other the details, for the error message.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Protocol

from shoal.comm import Backend
from shoal.comm.agreement import by_rank
from shoal.errors import MismatchError

Facts = Mapping[str, str]
"""What must be the same on every rank, by what it is called in an error message."""

NUM_WORDS = 3
_MOST_EDITS = 1 << 62  # as many bits as a header has room for
_STEPS = "the number of steps of "
_EDITS = "what was done to averaged gradients"


class Stepper(Protocol):
    """An optimizer, as far as the ranks compare it."""

    @property
    def num_steps(self) -> int:
        """How many steps it has made."""
        ...

    def facts(self) -> Facts:
        """Its class and the options of its parameter groups."""
        ...


class Progress:
    """What the optimizers of one model have done on this rank; see [Note: ranks that train alike].

    Example:
        >>> progress.follow(optimizer)
        >>> vote = Vote.cast(group, progress, "backward()")
    """

    def __init__(self) -> None:
        """Of no optimizer yet."""
        self._steppers: list[Stepper] = []
        self._known: tuple[Facts, ...] = ()
        self._fingerprint = 0
        self._is_told = False
        self._edits = self._num_edited_steps = 0

    def follow(self, stepper: Stepper) -> None:
        """One more optimizer steps this model."""
        self._steppers.append(stepper)

    def note_edit(self, edit: str) -> None:
        """A user has changed a gradient; see [Note: edits of gradients]."""
        number = zlib.crc32(f"{self._num_edited_steps} {edit}".encode())
        self._edits = (self._edits + number) % _MOST_EDITS

    def note_step(self) -> None:
        """A step is over: an edit before it is another than the same edit after it."""
        self._num_edited_steps += 1

    def words(self) -> tuple[int, int, int]:
        """The number of all steps, a fingerprint of all options, and edits, for a header."""
        facts = tuple(stepper.facts() for stepper in self._steppers)
        if facts != self._known:
            self._known, self._fingerprint = facts, _fingerprint(facts)
        num_steps = sum(stepper.num_steps for stepper in self._steppers)
        return num_steps, self._fingerprint, self._edits

    def _all_facts(self) -> dict[str, str]:
        """Steps first: a rank that left one out may have other options for that reason."""
        counts: dict[str, str] = {}
        options: dict[str, str] = {}
        for number, stepper in enumerate(self._steppers):
            name = f"optimizer {number}" if len(self._steppers) > 1 else "the optimizer"
            counts[_STEPS + name] = str(stepper.num_steps)
            options |= {f"{fact} of {name}": value for fact, value in stepper.facts().items()}
        return counts | options | {_EDITS: f"#{self._edits:08x}"}

    def compare(self, group: Backend) -> None:
        """Compares everything; all ranks of the group call it.

        Raises:
            MismatchError: If the ranks do not train alike.
        """
        try:
            compare(group, self._all_facts())
        except MismatchError:
            self._is_told = True
            raise

    def difference(self, group: Backend) -> MismatchError:
        """The error for ranks whose words differ; all of them call it."""
        try:
            self.compare(group)
        except MismatchError as error:
            return error
        return MismatchError(f"the ranks have not always trained alike; {_REMEDY_OPTIONS}")

    # The end of a run -----------------------------------------------------------------------

    def exit_record(self) -> str:
        """What a rank leaves behind for those that leave after it: few bytes."""
        return json.dumps(self.words()[:2])

    def check_exit_records(self, records: Mapping[int, str]) -> None:
        """Raises if a rank that left before has trained in another way."""
        if self._is_told:  # once is enough
            return
        own = self.words()
        for rank, word in records.items():
            steps, fingerprint = json.loads(word)
            if steps != own[0]:
                raise MismatchError(
                    f"this rank has made {own[0]} steps, and rank {rank} had made {steps} when it "
                    f"left: {_REMEDY_STEPS}"
                )
            if fingerprint != own[1]:
                raise MismatchError(
                    f"rank {rank} made its last step with other options than this rank, which has "
                    f"{self._options()}: {_REMEDY_OPTIONS}"
                )

    def _options(self) -> str:
        chosen = [stepper.facts().items() for stepper in self._steppers]
        return ", ".join(f"{fact}: {value}" for facts in chosen for fact, value in facts)


_REMEDY_STEPS = (
    "the weights of the ranks have drifted apart. Decide together whether to step, for example "
    "`if world.agree(is_bad): optimizer.zero_grad(); continue`"
)
_REMEDY_EDITS = (
    "averaged gradients must be changed in the same way on every rank: not on some ranks only, nor "
    "with numbers or tensors of a rank's own, such as its loss, its noise or a gradient of its own "
    "batch. Make those equal first (world.agree, world.all_reduce), or assign them, p.grad = ..."
)
_REMEDY_OPTIONS = (
    "make the same change on every rank; what a scheduler goes by must be the same number "
    "everywhere, for example `scheduler.step(world.agree(loss))`"
)


def compare(group: Backend, own: Facts) -> None:
    """Compares facts; all ranks of the group call it.

    Raises:
        MismatchError: Naming the first that is not the same everywhere.
    """
    facts = group.all_gather_object(dict(own))
    for name in dict.fromkeys(name for other in facts for name in other):
        values = [other.get(name, "nothing") for other in facts]
        if len(set(values)) > 1:
            remedy = _REMEDY_STEPS if name.startswith(_STEPS) else _REMEDY_OPTIONS
            remedy = _REMEDY_EDITS if name == _EDITS else remedy
            raise MismatchError(
                f"the ranks do not train alike: {name} is not the same on all of them "
                f"({by_rank(values, group.ranks)}); {remedy}"
            )


def _fingerprint(facts: Sequence[Facts]) -> int:
    """The same in every process, unlike Python's own hashes."""
    text = json.dumps([sorted(own.items()) for own in facts])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
