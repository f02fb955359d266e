"""Follows the data of parameters through operations, and says what a division would change.

[Note: marks]
Each parameter that is followed has an *owner* number. Memory that has been computed from it or from
its gradient is marked with that number; so is memory that was made like it (``zeros_like``), which
has no data of it yet. Step counters, learning rates and constants are not marked. Marks belong to
memory, not to tensor objects, so views share them and writes through a view count.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from shoal.optim.kinds import Kind
from shoal.optim.proof.judgement import StepFinding, current_line
from shoal.optim.proof.rules import Effect, Rule
from shoal.torch_internals.tensors import storage_id

MIXED = -1
"""The owner of what was computed from several parameters."""
FORGETS = "leaves parameters without their gradients"
"""Users see that, and only of what is stepped: parameters themselves, not memory in their place."""


class Level(IntEnum):
    """How much memory has to do with its owner."""

    UNIFORM = 0
    """It has the owner's shape and the same number everywhere."""
    SHAPED = 1
    """It was made like the owner, and its numbers may depend on their position."""
    DATA = 2
    """It was computed from the owner's elements, or drawn for them."""


class Mark(NamedTuple):
    """Whose memory it is."""

    owner: int
    level: Level


@dataclass
class _Memory:
    """The marks of one storage; ``ref`` keeps its address from being used for another."""

    ref: StorageWeakRef
    mark: Mark | None = None
    starts: list[int] = field(default_factory=list)
    parts: list[tuple[int, int, Mark]] = field(default_factory=list)

    def part_of(self, tensor: Tensor) -> int:
        """The part in which a tensor begins; -1 for none."""
        low = tensor.storage_offset() * tensor.itemsize
        index = bisect.bisect_right(self.starts, low) - 1
        return index if index >= 0 and low < self.parts[index][1] else -1


class Marks:
    """The marks of all memory that is followed; see [Note: marks]."""

    def __init__(self) -> None:
        """None yet."""
        self._memories: dict[int, _Memory] = {}

    def find(self, tensor: Tensor) -> Mark | None:
        """The mark of a tensor's memory."""
        memory = self._memories.get(storage_id(tensor))
        if memory is None:
            return None
        index = memory.part_of(tensor) if memory.parts else -1
        if index < 0:
            return memory.mark
        start, stop, mark = memory.parts[index]
        is_whole = tensor.nbytes == stop - start and tensor.is_contiguous()
        return mark if is_whole or _extent(tensor)[1] <= stop else Mark(MIXED, Level.DATA)

    def write(self, tensor: Tensor, mark: Mark) -> None:
        """The memory of a tensor has been written to."""
        memory = self._memory_of(tensor)
        index = memory.part_of(tensor) if memory.parts else -1
        if index < 0:
            memory.mark = mark
        else:
            memory.parts[index] = (*memory.parts[index][:2], mark)

    def begin(self, owned: Iterable[tuple[Tensor, Mark]]) -> None:
        """Marks tensors that may be parts of the same memory, each with its owner."""
        divided: dict[int, _Memory] = {}
        for tensor, mark in owned:
            memory = self._memory_of(tensor)
            if id(memory) not in divided:
                divided[id(memory)] = memory
                memory.parts = []
            memory.parts.append((*_extent(tensor), mark))
        for memory in divided.values():
            memory.parts.sort()
            memory.starts = [start for start, _, _ in memory.parts]

    def _memory_of(self, tensor: Tensor) -> _Memory:
        identity = storage_id(tensor)
        if identity not in self._memories:
            self._memories[identity] = _Memory(StorageWeakRef(tensor.untyped_storage()))
        return self._memories[identity]

    def memories(self) -> set[int]:
        """All that is marked, by the identity of its storage."""
        return {key for key, memory in self._memories.items() if memory.mark or memory.parts}

    def forget_dead(self) -> None:
        """Forgets memory that has been freed."""
        dead = [key for key, memory in self._memories.items() if memory.ref.expired()]
        for key in dead:
            del self._memories[key]


def _extent(tensor: Tensor) -> tuple[int, int]:
    """First byte and last, in its memory."""
    size = tensor.itemsize
    low = int(tensor.storage_offset()) * size
    if not tensor.numel():
        return low, low
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return low, low + (int(sum((length - 1) * step for length, step in steps)) + 1) * size


Operands = list[tuple[Tensor, Mark | None]]
Results = list[Mark | None]


class Following:
    """The parameters that are followed, with all that has been computed from them.

    What a division would change is given to `found`.
    """

    def __init__(self) -> None:
        """Of no parameters yet."""
        self.marks = Marks()
        self._shapes: list[torch.Size] = []
        self._hidden: set[int] = set()

    def begin(self, parameters: Sequence[Tensor], others: Sequence[Sequence[Tensor]]) -> None:
        """Follows these, and with each its gradient and state.

        They are given before each step, because a state that was loaded is in other memory.
        """
        self._shapes = [parameter.shape for parameter in parameters]
        self.marks.begin(
            (tensor, Mark(owner, Level.DATA))
            for owner, (parameter, own) in enumerate(zip(parameters, others, strict=True))
            for tensor in (parameter, *own)
            if tensor.layout is torch.strided
        )

    def expect_only(self, kept: Iterable[Tensor]) -> None:
        """Of what has been computed so far, the next step should use nothing but this.

        A division cuts what is in the optimizer's state. It does not know of a closure's dict.
        """
        self._hidden = self.marks.memories() - {
            storage_id(tensor) for tensor in kept if tensor.layout is torch.strided
        }

    def found(self, finding: StepFinding) -> None:
        """Something that a division would change; before it happens."""

    # One operation ------------------------------------------------------------------------

    def before(self, rule: Rule, args: Sequence[Any], kwargs: dict[str, Any]) -> Results:
        """Looks at an operation that is about to run; returns the marks of its results.

        One for each index of its lists, where these are on their own; else one for all.
        """
        if rule.is_by_index:
            return [self._look_at(rule, each) for each in self._by_index(args, kwargs)]
        return [self._look_at(rule, self._operands(args, kwargs))]

    def after(
        self,
        rule: Rule,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        result: Any,
        marks: Results,
    ) -> None:
        """Marks what an operation has written and returned."""
        if not any(marks):
            return
        for index, name in rule.written:
            target = args[index] if index < len(args) else kwargs.get(name)
            self._mark(target, marks, is_by_index=rule.is_by_index)
        if not rule.written:  # else it returns what it has written to
            self._mark(result, marks, is_by_index=rule.is_by_index)

    def _mark(self, target: Any, marks: Results, *, is_by_index: bool) -> None:
        if isinstance(target, Tensor):
            self._write(target, marks[0])
        elif isinstance(target, list | tuple):
            for index, each in enumerate(target):
                if isinstance(each, Tensor):
                    self._write(each, marks[index] if is_by_index else marks[0])

    def _write(self, tensor: Tensor, mark: Mark | None) -> None:
        if mark is None:
            return
        if tensor.layout is not torch.strided:
            self._report(Kind.GLOBAL, "a sparse tensor was made of data of a parameter")
            return
        before = self.marks.find(tensor)
        if before is None or mark.level > before.level or mark.owner == MIXED:
            self.marks.write(tensor, mark)

    # Operands -----------------------------------------------------------------------------

    def _operands(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Operands:
        given = (*args, *kwargs.values()) if kwargs else args
        return [(tensor, self._find(tensor)) for tensor in _tensors(given)]

    def _find(self, tensor: Tensor) -> Mark | None:
        return self.marks.find(tensor) if tensor.layout is torch.strided else None

    def _by_index(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Operands]:
        given = (*args, *kwargs.values())
        lists = [each for each in given if isinstance(each, list | tuple) and each]
        alone = [(each, self._find(each)) for each in given if isinstance(each, Tensor)]
        for index in range(len(lists[0]) if lists else 0):
            own = [each[index] for each in lists if index < len(each)]
            yield [*((each, self._find(each)) for each in own if isinstance(each, Tensor)), *alone]

    # Rules --------------------------------------------------------------------------------

    def _look_at(self, rule: Rule, operands: Operands) -> Mark | None:
        """What an operation on some operands gives."""
        if rule.effect is Effect.DRAWS:
            return self._drawn(rule, operands)
        marks = [mark for _, mark in operands if mark is not None]
        if not marks:
            return None
        if self._hidden and any(
            mark and storage_id(each) in self._hidden for each, mark in operands
        ):
            what = f"`{rule.name}` takes data of a parameter that was kept outside of the state"
            self._report(Kind.GLOBAL, what)
        if rule.effect is Effect.LIKE:
            return Mark(marks[0].owner, Level.UNIFORM)
        data = {mark for mark in marks if mark[1] is Level.DATA}
        if not data:
            return self._without_data(rule, operands)
        result = data.pop() if len(data) == 1 else Mark(MIXED, Level.DATA)
        self._check_data(rule, operands, result.owner)
        return result

    def _check_data(self, rule: Rule, operands: Operands, owner: int) -> None:
        if owner == MIXED:
            self._report(Kind.GLOBAL, f"`{rule.name}` combines data of several parameters")
        elif rule.effect is Effect.LEAVES and _takes_data(rule, operands):
            self._report(Kind.GLOBAL, f"`{rule.name}` takes a number out of data of a parameter")
        elif rule.effect is Effect.REPLACES_MEMORY:
            self._report(Kind.GLOBAL, f"`{rule.name}` gives a parameter other memory")
        elif not self._is_element_wise(rule, operands, owner):
            what = f"`{rule.name}` combines elements of a parameter, or depends on their positions"
            self._report(Kind.PER_PARAMETER, what)

    def _is_element_wise(self, rule: Rule, operands: Operands, owner: int) -> bool:
        if rule.effect is not Effect.ELEMENT_WISE and not _is_mask(rule, operands):
            return False
        shape = self._shapes[owner]
        return all(_fits(tensor, mark, shape) for tensor, mark in operands)

    def _without_data(self, rule: Rule, operands: Operands) -> Mark:
        """Of what was made like a parameter: is it still the same number everywhere?"""
        first, mark = next((tensor, mark) for tensor, mark in operands if mark)
        if rule.effect is Effect.LEAVES:
            self._report(Kind.PER_PARAMETER, f"`{rule.name}` looks at the shape of a parameter")
        is_uniform = rule.effect is Effect.ELEMENT_WISE and all(
            _fits(tensor, each, first.shape) for tensor, each in operands
        )
        return Mark(mark.owner, Level.UNIFORM if is_uniform else Level.SHAPED)

    def _drawn(self, rule: Rule, operands: Operands) -> Mark:
        owners = {mark.owner for _, mark in operands if mark}
        if len(owners) != 1 or MIXED in owners:
            self._report(Kind.GLOBAL, f"`{rule.name}` draws numbers for no parameter in particular")
            return Mark(MIXED, Level.DATA)
        self._report(Kind.PER_PARAMETER, f"`{rule.name}` draws random numbers")
        return Mark(owners.pop(), Level.DATA)

    # What does not go through operations --------------------------------------------------

    def look_at_shape(self, tensor: Tensor, name: str) -> None:
        """The optimizer asks for the shape of a tensor."""
        if self._find(tensor) is not None:
            self._report(Kind.PER_PARAMETER, f"`{name}` looks at the shape of a parameter")

    def look_at_memory(self, tensor: Tensor, name: str) -> None:
        """The optimizer reaches for the memory of a tensor, past torch's operations."""
        mark = self._find(tensor)
        if mark is not None and mark.level is Level.DATA:
            self._report(Kind.GLOBAL, f"`{name}` takes data of a parameter out of torch's sight")

    def _report(self, finest: Kind, what: str) -> None:
        self.found(StepFinding(finest, what, current_line()))


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (each for each in value if isinstance(each, Tensor))


def _fits(tensor: Tensor, mark: Mark | None, shape: torch.Size) -> bool:
    """Whether an operand has one number for each element of a parameter, or one for all."""
    if mark is None:
        return tensor.numel() == 1
    return mark.level is not Level.SHAPED and tensor.shape == shape


def _takes_data(rule: Rule, operands: Operands) -> bool:
    """Rows that are picked by numbers which are no data are as many as there are numbers."""
    chosen = operands[1:] if rule.name == "index" else operands
    return any(mark is not None and mark.level is Level.DATA for _, mark in chosen)


def _is_mask(rule: Rule, operands: Operands) -> bool:
    """Of a target, an index, and what is written there."""
    is_known = rule.effect is Effect.MASKS and len(operands) == 3
    return is_known and operands[1][0].dtype is torch.bool and operands[2][1] is None
