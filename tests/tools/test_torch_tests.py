"""`make test-torch` names files that exist."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

TOOLS = Path(__file__).parent.parent.parent / "tools"


def test_all_paths_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    files = importlib.import_module("torch_tests").files()
    assert files
    assert all(Path(path).exists() for path in files)
