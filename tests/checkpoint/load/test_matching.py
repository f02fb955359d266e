"""Which tensor of a checkpoint is which of a model, also under other names of tied ones."""

from __future__ import annotations

import pytest
import torch

from shoal.checkpoint.load.matching import compare, match
from shoal.errors import CheckpointMismatchError

SMALL, LARGE = torch.Size([2]), torch.Size([3])


def test_all_fits() -> None:
    found = match({"a": SMALL}, {}, {"model/a": SMALL}, {})
    assert found.keys == {"a": "model/a"}
    compare([found], ["model/a"], {}).check("it", strict=True)


def test_names_of_tied_tensors() -> None:
    found = match({"a": SMALL}, {"b": "a"}, {"model/c": SMALL}, {"b": "c"})
    assert found.keys == {"a": "model/c"}
    misfits = compare([found], ["model/c"], {"b": "c"})
    assert (misfits.missing, misfits.unexpected) == ([], [])


def test_what_does_not_fit() -> None:
    found = match(
        {"a": SMALL, "b": SMALL, "c": SMALL}, {}, {"model/a": LARGE, "model/c": SMALL}, {}
    )
    misfits = compare([found], ["model/a", "model/c", "model/d", "extra/x"], {})
    assert (misfits.missing, misfits.unexpected) == (["b"], ["d"])
    assert misfits.misshapen == {"a": ([3], [2])}
    with pytest.raises(CheckpointMismatchError, match=r"missing .*: b; not in the model: d; of an"):
        misfits.check("it", strict=True)
    misfits.check("it", strict=False)


def test_each_rank_knows_some_names() -> None:
    stored = {"model/a": SMALL, "model/b": SMALL}
    matches = [match({name: SMALL}, {}, stored, {}) for name in "ab"]
    compare(matches, stored, {}).check("it", strict=True)


def test_nothing_fits() -> None:
    found = match({"a": SMALL}, {}, {"model/z": SMALL}, {})
    with pytest.raises(CheckpointMismatchError, match="does not fit"):
        compare([found], ["model/z"], {}).check("it", strict=False)
