"""Whose a file of code is."""

from __future__ import annotations

import threading

import pytest

from shoal.system.site import is_installed, is_stdlib


@pytest.mark.parametrize("file", [threading.__file__, "<frozen runpy>"])
def test_files_of_python_itself(file: str) -> None:
    assert is_stdlib(file)
    assert not is_stdlib(__file__)
    assert not is_stdlib(pytest.__file__)
    assert is_installed(pytest.__file__)
