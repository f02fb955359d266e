"""The counts of `make survey`, on sources and calls that are small enough to count by hand."""

from __future__ import annotations

import importlib
import textwrap
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).parent.parent.parent / "tools" / "survey"

ONE = '''
"""A docstring
of two lines."""

import torch
from torch.nn.modules.batchnorm import _BatchNorm  # a comment


class Plan:
    def look(self, tensor):
        """Counts as nothing."""
        self._timeout = 1
        return tensor._version, torch._C._functorch, self._timeout
'''
OTHER = """
class _Plan:
    pass


def version(tensor):
    return getattr(tensor, "_version"), "_foreach_copy_"
"""


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module of the tool, whose modules import each other by their names."""
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module


@pytest.fixture
def package(tmp_path: Path) -> Path:
    for name, text in {
        "__init__.py": '__all__ = ["Plan"]',
        "one/__init__.py": "",
        "one/plan.py": ONE,
        "other/plan.py": OTHER,
        "long.py": "def f():\n" + "    pass\n" * 400,
        "wide.py": "class Wide:\n" + "".join(f"    def f{i}(self): ...\n" for i in range(26)),
        **{f"full/{i}.py": "" for i in range(13)},
    }.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return tmp_path


def test_what_is_counted_in_source(tool: Any, package: Path) -> None:
    source = tool("source")
    found = source.survey(package)
    assert source.crowded(found["folders"]) == {"full": 13}
    assert found["files above 400 lines"] == {"long.py": 401}
    assert found["functions above 40 lines"] == {"long.py:f": 401}
    assert found["classes above 25 methods"] == {"wide.py:Wide": 26}
    assert found["repeated file names"] == {"plan": ["one/plan.py", "other/plan.py"]}
    assert found["repeated class names"] == {
        "Plan": {"files": ["one/plan.py", "other/plan.py"], "is_public": True}
    }
    assert found["lines of code"] == 1 + 6 + 4 + 401 + 27


def test_private_names_of_torch_are_told_from_our_own(tool: Any, package: Path) -> None:
    found = tool("source").survey(package)["private names of torch"]
    assert found == {
        "_BatchNorm": ["one/plan.py"],
        "_C": ["one/plan.py"],
        "_functorch": ["one/plan.py"],
        "_version": ["one/plan.py", "other/plan.py"],
    }


FIRST = """
def go():
    work()
    work()

def wait():
    for _ in range(50):
        poll()
        look()

def look():
    [each for each in ()]
"""
SECOND = """
def work(): pass

def poll(): pass
"""


@pytest.mark.parametrize(("call", "expected"), [("go", (2, 2, 1, 1)), ("wait", (2, 3, 2, 2))])
def test_a_walk_counts_hops_and_not_the_rounds_of_a_loop(
    tool: Any, call: str, expected: tuple[int, ...]
) -> None:
    names: dict[str, Any] = {}
    exec(compile(FIRST, "/package/a/first.py", "exec"), names)
    exec(compile(SECOND, "/package/b/second.py", "exec"), names)
    recorder = tool("recorder").Recorder("/package")
    with recorder.recording():
        names[call]()
    *counts, called = recorder.walk().values()
    assert tuple(counts) == expected
    assert sum(map(len, called.values())) == counts[1]


def test_private_names_of_torch_are_used_in_one_room_only(tool: Any) -> None:
    found = tool("source").survey(TOOLS.parent.parent / "src" / "shoal")["private names of torch"]
    elsewhere = {
        name: outside
        for name, files in found.items()
        if (outside := [file for file in files if not file.startswith("torch_internals/")])
    }
    assert not elsewhere, "give them a word in torch_internals, with a test"
