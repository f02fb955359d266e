"""The page of mistakes and the tests that are named after them tell the same."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

TESTS = Path(__file__).parent.parent
PAGE = TESTS.parent / "docs" / "mistakes.md"
ROW = re.compile(r"^\| P(\d\d) \|(.+)\|(.+)\|$", re.MULTILINE)
NAME = re.compile(r"`(test_\w+)`")

Numbered = dict[int, set[str]]


def listed(page: str) -> Numbered:
    """The tests that each mistake's row names."""
    return {int(number): set(NAME.findall(tests)) for number, _, tests in ROW.findall(page)}


def numbers_in(text: str) -> dict[str, int | None]:
    """Tests, each with the number of the mistake in its name or docstring, if there is one."""
    found = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            number = re.match(r"test_p(\d\d)_", node.name) or re.match(
                r"P(\d+):", ast.get_docstring(node) or ""
            )
            found[node.name] = int(number[1]) if number else None
    return found


def all_tests() -> dict[str, int | None]:
    found: dict[str, int | None] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        found |= numbers_in(path.read_text(encoding="utf-8"))
    return found


def test_every_number_in_a_test_is_on_the_page() -> None:
    page = listed(PAGE.read_text(encoding="utf-8"))
    by_number: Numbered = defaultdict(set)
    for name, number in all_tests().items():
        if number is not None:
            by_number[number].add(name)
    missing = {
        number: names - page.get(number, set())
        for number, names in by_number.items()
        if not names <= page.get(number, set())
    }
    assert missing == {}, f"add to {PAGE}"


def test_every_row_of_the_page_names_tests_that_exist() -> None:
    page = listed(PAGE.read_text(encoding="utf-8"))
    assert list(page) == list(range(1, len(page) + 1)), "numbers without a gap, in order"
    assert [number for number, names in page.items() if not names] == []
    unknown = {name for names in page.values() for name in names} - set(all_tests())
    assert unknown == set(), f"no such tests; {PAGE} names them"


def test_numbers_are_read_from_names_and_docstrings() -> None:
    text = 'def test_p07_x(): pass\ndef test_y():\n    """P31: z."""\ndef test_z(): pass\n'
    assert numbers_in(text) == {"test_p07_x": 7, "test_y": 31, "test_z": None}
    assert listed("| P07 | What. | `test_p07_x`, `test_y` |") == {7: {"test_p07_x", "test_y"}}
