"""Counts what can be read off the source: sizes, repeated names, private names of torch."""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch_names

MOST_FILES, MOST_LINES, LONGEST_FUNCTION, MOST_METHODS = 12, 400, 40, 25
Function = ast.FunctionDef | ast.AsyncFunctionDef


def survey(package: Path) -> dict[str, Any]:
    """What there is in a package, by the name of the question."""
    texts = {
        str(path.relative_to(package)): path.read_text(encoding="utf-8")
        for path in sorted(package.rglob("*.py"))
    }
    trees = {name: ast.parse(text) for name, text in texts.items()}
    return {
        "files": len(texts),
        "lines": sum(len(text.splitlines()) for text in texts.values()),
        "lines of code": sum(len(lines_of_code(texts[name], trees[name])) for name in texts),
        "folders": dict(sorted(Counter(folder_of(name) for name in texts).items())),
        "files above 400 lines": long_files(texts),
        "functions above 40 lines": long_functions(trees),
        "classes above 25 methods": large_classes(trees),
        "repeated class names": repeated_classes(trees),
        "repeated file names": repeated_files(list(texts)),
        "private names of torch": torch_names.find_in(trees),
    }


def folder_of(name: str) -> str:
    return str(Path(name).parent)


def crowded(folders: dict[str, int]) -> dict[str, int]:
    return {folder: count for folder, count in folders.items() if count > MOST_FILES}


def lines_of_code(text: str, tree: ast.Module) -> set[int]:
    """The numbers of lines that hold something other than blanks, comments and docstrings."""
    skipped = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped:
            found.update(range(token.start[0], token.end[0] + 1))
    return found - set(docstring_lines(tree))


def docstring_lines(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | Function) or not node.body:
            continue
        first = node.body[0]
        if isinstance(first, ast.Expr) and isinstance(getattr(first.value, "value", None), str):
            yield from range(first.lineno, (first.end_lineno or first.lineno) + 1)


def long_files(texts: dict[str, str]) -> dict[str, int]:
    lengths = {name: len(text.splitlines()) for name, text in texts.items()}
    return {name: length for name, length in lengths.items() if length > MOST_LINES}


def long_functions(trees: dict[str, ast.Module]) -> dict[str, int]:
    """Lengths with the signature and the docstring."""
    found = {}
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, Function):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > LONGEST_FUNCTION:
                    found[f"{name}:{node.name}"] = length
    return found


def large_classes(trees: dict[str, ast.Module]) -> dict[str, int]:
    """Numbers of methods, without those that are inherited."""
    counts = {
        f"{name}:{node.name}": sum(isinstance(each, Function) for each in node.body)
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    return {name: count for name, count in counts.items() if count > MOST_METHODS}


def repeated_classes(trees: dict[str, ast.Module]) -> dict[str, dict[str, Any]]:
    """Classes of several files that share a name, leading underscores aside.

    Public ones are those that an ``__init__`` exports.
    """
    homes = defaultdict(list)
    for name, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                homes[node.name.lstrip("_")].append(name)
    exported = set(exported_names(trees))
    return {
        name: {"files": files, "is_public": name in exported}
        for name, files in sorted(homes.items())
        if len(files) > 1
    }


def exported_names(trees: dict[str, ast.Module]) -> Iterator[str]:
    """What the packages list in ``__all__``."""
    for name, tree in trees.items():
        if Path(name).name != "__init__.py":
            continue
        for node in tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                yield from ast.literal_eval(node.value)


def repeated_files(names: list[str]) -> dict[str, list[str]]:
    folders = defaultdict(list)
    for name in names:
        if Path(name).name != "__init__.py":
            folders[Path(name).stem].append(name)
    return {stem: files for stem, files in sorted(folders.items()) if len(files) > 1}
