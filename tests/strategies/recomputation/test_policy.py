"""What users may say about activations."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.activations import Policy
from shoal.strategies.recomputation.policy import PRESETS, parse_bytes, parse_policy


def test_one_word() -> None:
    assert parse_policy("full") == Policy("full", "local")
    assert parse_policy("offload") == Policy("none", "host")
    assert parse_policy("auto", 1 << 30) == Policy("auto")
    assert parse_policy(None) is None
    assert parse_policy(Policy("none")) is None
    assert [word for word in PRESETS if word != "auto" and parse_policy(word) is None] == []


def test_memory_in_words() -> None:
    assert parse_bytes("80GB") == 80_000_000_000
    assert parse_bytes(" 1.5 gib ") == 3 << 29
    assert parse_bytes("4096") == parse_bytes(4096) == parse_bytes(np.int64(4096)) == 4096
    for wrong in ("", "80 apples", "GB", "1.2.3k", "-1", 0, -5):
        with pytest.raises(ValueError, match="memory must be bytes, as in 80_000_000_000"):
            parse_bytes(wrong)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Policy("some"), "recompute must be 'none', 'full', 'selective' or 'auto'; got 's"),
        (lambda: Policy(store="disk"), "store must be 'local', 'host', 'partition' or 'peer'"),
        (lambda: Policy("none", "partition"), 'store="partition" is for the inputs of blocks'),
        (lambda: Policy("auto", "peer"), "does not go with store='peer'"),
        (lambda: parse_policy("auto"), "say memory="),
        (lambda: parse_policy("full", 10), "say both, or neither"),
        (lambda: parse_policy(None, "1GB"), "say both, or neither"),
    ],
)
def test_what_does_not_go_together(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
