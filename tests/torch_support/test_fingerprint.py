"""Fingerprints: equal for equal values, and for no others that ranks might have."""

from __future__ import annotations

import pytest
import torch

from shoal.torch_support.fingerprint import checksum, fingerprint, fingerprint_number


@pytest.mark.parametrize(
    ("left", "right", "is_same"),
    [
        (torch.ones(3), torch.ones(3), True),
        (torch.ones(3), torch.ones(3, 1), False),
        (torch.ones(3), torch.ones(3).double(), False),
        (torch.zeros(1 << 18), torch.arange(1 << 18) % 7 / 7, False),
        ({"a": torch.ones(2), "b": 3}, {"a": torch.ones(2), "b": 4}, False),
        ([torch.ones(2), "text"], [torch.ones(2), "text"], True),
        (torch.ones(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.bfloat16), False),
    ],
)  # fmt: skip
def test_fingerprints(left, right, is_same) -> None:
    assert (fingerprint(left) == fingerprint(right)) is is_same


def test_nothing_to_look_at() -> None:
    assert fingerprint(()) == fingerprint([object()]) == fingerprint(torch.empty(0)) == ""
    assert fingerprint_number([]) == 0


def test_what_vmap_runs_over_is_not_looked_at() -> None:
    seen: list[str] = []

    def look(row: torch.Tensor) -> torch.Tensor:
        seen.append(fingerprint(row))
        return row

    torch.func.vmap(look)(torch.ones(2, 3))
    assert seen == [""]


def test_all_elements_or_a_sample() -> None:
    left = torch.zeros(1000)
    right = left.clone()
    right[1] = 1
    assert fingerprint(left, most_elements=10) == fingerprint(right, most_elements=10)
    assert fingerprint(left, most_elements=None) != fingerprint(right, most_elements=None)
    assert checksum(left) != checksum(right)
