"""Ranks that share layers train to the parameters of one process.

20 steps of AdamW with clipping, every other one with accumulated gradients; also the norms agree.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import pools
import shoal
from strategies.models import has_transformers
from strategies.tensor.tasks import HUGGING_FACE, TASKS
from strategies.tensor.training import Case, compare, train_rank

pytestmark = [
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True"),
]

# Of the others, only a few steps run with the usual tests.
_LONG = {("gpt", 3)}
_SHORT = {
    ("gpt", 2), ("gpt", 4),
    ("encoder", 2), ("translator", 3), ("resnet", 2), ("adapter", 2), ("llama", 4),
    ("gpt2", 2), ("t5", 3), ("bert", 2), ("gemma2", 2), ("qwen3", 4), ("vit", 3),
}  # fmt: skip
_FEW = 3


def _marks(task: str, is_fast: bool, backend: str = "memory") -> list[pytest.MarkDecorator]:
    marks = [] if is_fast else [pytest.mark.full]
    if task in HUGGING_FACE and not has_transformers():
        marks.append(pytest.mark.skip(reason="needs transformers"))
    return [*marks, pytest.mark.mpi] if backend == "mpi" else marks


def cases() -> Iterator[object]:
    for task in TASKS:
        for ranks in (1, 2, 3, 4):
            case = Case(task, ranks)
            yield pytest.param(case, id=str(case), marks=_marks(task, (task, ranks) in _LONG))
    for task, ranks in sorted(_SHORT):
        case = Case(task, ranks, steps=_FEW)
        yield pytest.param(case, id=f"{case}-few", marks=_marks(task, True))
    for task in ("gpt", "encoder", "llama"):
        for zero in range(4):
            case = Case(task, 4, {"tensor": 2, "zero": zero})
            yield pytest.param(case, id=str(case), marks=_marks(task, False))
            if task == "gpt" and zero > 1:
                case = Case(task, 4, {"tensor": 2, "zero": zero}, steps=_FEW)
                yield pytest.param(case, id=f"{case}-few")
    for task in ("encoder", "llama", "qwen3", "gpt2", "t5", "vit"):
        for ranks in (2, 3):
            is_fast = (task, ranks) in {("encoder", 3), ("llama", 2), ("t5", 2)}
            steps = _FEW if is_fast else 20
            case = Case(task, ranks, {"sequence_parallel": True}, steps)
            yield pytest.param(case, id=str(case), marks=_marks(task, is_fast))


@pytest.mark.parametrize("case", list(cases()))
def test_equals_one_process(case: Case) -> None:
    compare(case, shoal.run(train_rank, case.ranks, "memory", args=(case,), timeout=60))


def over_processes() -> Iterator[object]:
    fast = {("shm", "gpt", 4, 2, 3), ("gloo", "gpt", 2, 2, 0)}
    more = {
        ("shm", "gpt", 2, 2, 0),
        ("shm", "llama", 4, 2, 1), ("shm", "encoder", 2, 2, 0), ("gloo", "translator", 3, 3, 0),
        ("gloo", "gpt", 4, 2, 2), ("mpi", "gpt", 3, 3, 0), ("mpi", "t5", 2, 2, 0),
        ("mpi", "gpt", 4, 2, 3),
    }  # fmt: skip
    for backend, task, ranks, tensor, zero in sorted(fast | more):
        case = Case(task, ranks, {"tensor": tensor, "zero": zero}, steps=_FEW)
        is_fast = (backend, task, ranks, tensor, zero) in fast
        marks = _marks(task, is_fast, backend)
        yield pytest.param(backend, case, id=f"{backend}-{case}", marks=marks)


@pytest.mark.parametrize(("backend", "case"), list(over_processes()))
def test_equals_one_process_over_processes(backend: str, case: Case) -> None:
    compare(case, pools.Team(backend, case.ranks).run(train_rank, case))
