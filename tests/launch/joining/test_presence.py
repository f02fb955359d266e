"""Ranks that join leave a mark for the launcher."""

from __future__ import annotations

from pathlib import Path

import pytest

import shoal
from shoal.launch.joining.presence import has_mark


def test_a_rank_that_joins_leaves_its_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_ERROR_DIR", str(tmp_path))
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert not has_mark(tmp_path, 0)
    shoal.init("memory").shutdown()
    assert has_mark(tmp_path, 0)


def test_a_folder_that_is_gone_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_ERROR_DIR", str(tmp_path / "gone"))
    shoal.init("memory").shutdown()
