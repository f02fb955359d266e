"""How far a rank's optimizers are, and with which options: the same on all ranks of one model.

[Note: ranks that train alike]
Replicas stay equal because every rank makes the same steps with the same options. A rank that
leaves out a step, or steps with another learning rate, breaks that without any collective going
wrong. So what a rank has done travels as three numbers, in headers that are exchanged anyway, with
every vote. Only if they differ do the ranks tell each other the details, for the error message.
Some optimizers write into their groups while they step (a count, an estimate), on ranks that have
something to step there. So of options only what was changed outside of steps counts.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.comm import Backend
from shoal.comm.agreement import by_rank
from shoal.errors import MismatchError
from shoal.torch_internals.tensors import as_plain_tensors

Facts = Mapping[str, str]
"""What must be the same on every rank, by what it is called in an error message."""

NUM_WORDS = 3
_MOST_EDITS = 1 << 62  # as many bits as a header has room for
_STEPS = "the number of steps of "
_EDITS = "what was done to averaged gradients"
PLACE = "the place of "
"""With what facts begin that say where a parameter stands in an optimizer."""
_PLAIN = (bool, int, float, complex, str, type(None))
_Key = tuple[int, str]


class StepRecord:
    """The steps of one optimizer on this rank, and what the user chose for its parameter groups.

    Example:
        >>> record = StepRecord(optimizer)
        >>> optimizer.param_groups[0]["lr"] = 0.1
        >>> record.facts()["lr of parameter group 0"]
        '0.1'
    """

    def __init__(self, optimizer: Optimizer) -> None:
        """Everything that is there now was chosen by the user."""
        self._optimizer, self.num_steps = optimizer, 0
        self._last: dict[_Key, tuple[Any, str]] = {}
        kind = type(optimizer)
        self._chosen = {"the class": f"{kind.__module__}.{kind.__qualname__}"}
        self._stepped: dict[str, str] = {}
        self._find_chosen()

    def begin_step(self) -> None:
        """What is chosen now is what a step is made with, also if it is changed back after it."""
        self._stepped = self._find_chosen()

    def end_step(self) -> None:
        """What has changed during the step was not the user's doing."""
        for _ in self._changed():
            pass
        self.num_steps += 1

    def facts(self) -> dict[str, str]:
        """The optimizer's class and options, and those of its last step where they were others.

        It is the same object as long as nothing changes.
        """
        chosen = self._find_chosen()
        if self._stepped is chosen or not self._stepped:
            return chosen
        others = {key: text for key, text in self._stepped.items() if chosen[key] != text}
        return chosen | {f"{key} in its last step": text for key, text in others.items()}

    def _find_chosen(self) -> dict[str, str]:
        for (number, name), text in self._changed():
            self._chosen = {**self._chosen, f"{name} of parameter group {number}": text}
        return self._chosen

    def _changed(self) -> Iterator[tuple[_Key, str]]:
        """What is not what it was when this was asked the last time."""
        for number, group in enumerate(self._optimizer.param_groups):
            for name, value in group.items():
                before, known = self._last.get((number, name), (None, None))
                is_same = value is before and known is not None and isinstance(value, _PLAIN)
                if name == "params" or is_same:
                    continue
                text = _text_of(value)
                self._last[number, name] = (value, text)
                if text != known:
                    yield (number, name), text


def _text_of(value: Any) -> str:
    """A value in words that are the same on every rank for the same value.

    A tensor on a GPU is not read: the host would have to wait for it.
    """
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_text_of, value))}]"
    if isinstance(value, Tensor):
        return str(value.tolist()) if value.is_cpu else f"a tensor on {value.device.type}"
    return type(value).__qualname__


class Progress:
    """What a model's optimizers have done on this rank; see [Note: ranks that train alike]."""

    def __init__(self) -> None:
        """Of no optimizer yet."""
        self._records: list[StepRecord] = []
        self._known: tuple[Facts, ...] = ()
        self._fingerprint = 0
        self._is_told = False
        self._edits = self._stepped_edits = self._num_edited_steps = 0

    def follow(self, record: StepRecord) -> None:
        """One more optimizer steps this model."""
        self._records.append(record)

    def note_edit(self, edit: str, count: int = 1) -> None:
        """A user has changed a gradient so often; see [Note: edits of gradients]."""
        number = zlib.crc32(f"{self._num_edited_steps} {edit}".encode())
        self._edits = (self._edits + count * number) % _MOST_EDITS

    def note_step(self) -> None:
        """A step is over: an edit before it is another than the same edit after it."""
        self._num_edited_steps += 1
        self._stepped_edits = self._edits

    def words(self) -> tuple[int, int, int]:
        """The number of all steps, a fingerprint of all options, and edits, for a header."""
        facts = tuple(record.facts() for record in self._records)
        if facts != self._known:
            self._known, self._fingerprint = facts, _fingerprint(facts)
        num_steps = sum(record.num_steps for record in self._records)
        return num_steps, self._fingerprint, self._edits

    def _all_facts(self) -> dict[str, str]:
        """Steps first: a rank that left one out may have other options for that reason."""
        counts: dict[str, str] = {}
        options: dict[str, str] = {}
        for number, record in enumerate(self._records):
            name = f"optimizer {number}" if len(self._records) > 1 else "the optimizer"
            counts[_STEPS + name] = str(record.num_steps)
            options |= {f"{fact} of {name}": value for fact, value in record.facts().items()}
        return counts | options | {_EDITS: f"#{self._edits:08x}"}

    def compare(self, group: Backend) -> None:
        """Compares everything, and raises if ranks do not train alike; all of the group call it."""
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
        return json.dumps([*self.words()[:2], self._stepped_edits])

    def check_exit_records(self, records: Mapping[int, str]) -> None:
        """Raises if a rank that left before has trained in another way."""
        if self._is_told:  # once is enough
            return
        own = self.words()
        for rank, word in records.items():
            steps, fingerprint, edits = json.loads(word)
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
            if edits != self._stepped_edits:
                raise MismatchError(
                    f"rank {rank} made its last step with gradients that were changed in another "
                    f"way than on this rank: {_REMEDY_EDITS}"
                )

    def _options(self) -> str:
        chosen = [record.facts().items() for record in self._records]
        return ", ".join(f"{fact}: {value}" for facts in chosen for fact, value in facts)


class FrozenParameters:
    """Which parameters have no gradients on this rank: where that differs, averages are wrong.

    A rank that has frozen a parameter contributes nothing to its gradient, as if it had not used
    it, and all ranks would step it by too little. That counts in every backward whose gradients are
    averaged together.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """``parameters`` by name; whether they are frozen may change."""
        self._names, self._parameters = list(parameters), list(parameters.values())
        self._are_trained: list[bool] = []
        self._seen: list[bool] = []
        self._fingerprint = 0

    def see(self) -> None:
        """There is a backward whose gradients are averaged later."""
        with as_plain_tensors():  # whether it is frozen can be asked of an absent parameter
            are_trained = [parameter.requires_grad for parameter in self._parameters]
        is_first = not self._seen or self._seen == are_trained
        self._seen = are_trained if is_first else list(map(min, self._seen, are_trained))

    def fingerprint(self) -> int:
        """The same number on all ranks that have frozen the same parameters since last asked."""
        self.see()
        are_trained, self._seen = self._seen, []
        if are_trained != self._are_trained:
            self._are_trained = are_trained
            self._fingerprint = zlib.crc32(bytes(are_trained))
        return self._fingerprint

    def difference(self, group: Backend) -> MismatchError:
        """The error for ranks whose fingerprints differ; all of them call it."""
        everywhere = group.all_gather_object(self._are_trained)
        by_name = zip(self._names, zip(*everywhere, strict=True), strict=True)
        name, values = next((name, values) for name, values in by_name if len({*values}) > 1)
        return MismatchError(
            f"the ranks do not train alike: requires_grad of {name} is not the same on all of them "
            f"({by_rank(list(map(str, values)), group.ranks)}); freeze and unfreeze parameters on "
            "every rank"
        )


_REMEDY_STEPS = (
    "the weights of the ranks have drifted apart. Decide together whether to step, for example "
    "`if world.agree(is_bad): optimizer.zero_grad(); continue`"
)
_REMEDY_EDITS = (
    "averaged gradients must be changed in the same way on every rank: not on some ranks only, nor "
    "with numbers or tensors of a rank's own, such as its loss, its noise or a gradient of its own "
    "batch. Make those equal first (world.agree, world.all_reduce), or assign them, p.grad = ..."
)
_REMEDY_ORDER = (
    "give the optimizer the same parameters in the same groups and order on every rank; a set has "
    "another order in each process"
)
_REMEDY_OPTIONS = (
    "make the same change on every rank; what a scheduler goes by must be the same number "
    "everywhere, for example `scheduler.step(world.agree(loss))`"
)


def compare(group: Backend, own: Facts) -> None:
    """Raises naming the first fact that is not the same everywhere; all of the group call it."""
    facts = group.all_gather_object(dict(own))
    for name in dict.fromkeys(name for other in facts for name in other):
        values = [other.get(name, "nothing") for other in facts]
        if len(set(values)) > 1:
            remedy = _REMEDY_STEPS if name.startswith(_STEPS) else _REMEDY_OPTIONS
            remedy = _REMEDY_EDITS if name == _EDITS else remedy
            remedy = _REMEDY_ORDER if name.startswith(PLACE) else remedy
            raise MismatchError(
                f"the ranks do not train alike: {name} is not the same on all of them "
                f"({by_rank(values, group.ranks)}); {remedy}"
            )


def _fingerprint(facts: Sequence[Facts]) -> int:
    """The same in every process, unlike Python's own hashes."""
    text = json.dumps([sorted(own.items()) for own in facts])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
