"""Checks the documentation: links resolve, all pages are linked, examples compile, names exist.

The last holds for pages that describe the source: what they name in backticks (`comm/world.py`,
`Backend`, `Engine.step`, `all_reduce()`, `[Note: lanes]`) must be there.

Usage: python tools/check_docs.py
"""

from __future__ import annotations

import ast
import builtins
import re
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^ *```", re.M | re.S)
LINK = re.compile(r"\]\(\s*<?([^)\s>]+)|(?:src|href)=\"([^\"]+)\"")
# Pages whose names are compared with the source, and names there that need not be in it.
DESCRIPTIONS = ("CONTRIBUTING.md", "docs/architecture.md")
FOREIGN = frozenset({"utils.py"})
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
NOTE = re.compile(r"\[Note: ([^\]]+)\]")
NOTE_BEGIN = re.compile(r"^\W*\[Note: ([^\]\n]+)\]\W*?$", re.M)
PATH = re.compile(r"[\w.-]+(/[\w.-]+)*(\.py|/)|(src|tests|tools|docs|benchmarks|examples)/[\w./-]+")
CALL = re.compile(r"([A-Za-z_][\w.]*)\(.*\)")
CLASS = re.compile(r"_?[A-Z]\w*[a-z]\w*(\.\w+)*")
HEADING = re.compile(r"^#+ +(.+?) *$", re.M)


def pages(root: Path = ROOT) -> list[Path]:
    return sorted([*root.glob("*.md"), *(root / "docs").rglob("*.md")])


def problems(page: Path) -> Iterator[str]:
    """Yields one line for each thing that is wrong with a page."""
    text = page.read_text(encoding="utf-8")
    yield from broken_links(page, FENCE.sub("", text))
    yield from broken_examples(page, text)
    if str(page.relative_to(ROOT) if page.is_relative_to(ROOT) else page.name) in DESCRIPTIONS:
        yield from unknown_names(page, FENCE.sub("", text))


def broken_links(page: Path, text: str) -> Iterator[str]:
    for match in LINK.finditer(text):
        link = match[1] or match[2]
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists():
            yield f"{page}: link to {link}, but there is no {target}"
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            yield f"{page}: link to {link}, but {target} has no such heading"


def unreachable(root: Path = ROOT) -> Iterator[str]:
    """Pages that nobody finds who begins with the README and follows links."""
    reached: set[Path] = set()
    waiting = [root / "README.md"]
    while waiting:
        page = waiting.pop().resolve()
        if page in reached or page.suffix != ".md" or not page.is_file():
            continue
        reached.add(page)
        text = FENCE.sub("", page.read_text(encoding="utf-8"))
        links = (match[1] or match[2] for match in LINK.finditer(text))
        waiting += [page.parent / link.partition("#")[0] for link in links if link[0] != "#"]
    for page in pages(root):
        if page.is_relative_to(root / "docs") and page.resolve() not in reached:
            yield f"{page}: no link leads here from {root / 'README.md'}"


def anchors(page: Path) -> set[str]:
    """The names under which a page's headings can be linked to."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in HEADING.findall(text))
    return {heading.replace(" ", "-") for heading in plain}


def broken_examples(page: Path, text: str) -> Iterator[str]:
    for match in FENCE.finditer(text):
        if match["language"] != "python":
            continue
        line = text.count("\n", 0, match.start("code"))
        code = "\n" * line + textwrap.dedent(match["code"])
        try:
            compile(code, str(page), "exec")
        except SyntaxError as error:
            yield f"{page}:{error.lineno}: the example does not compile: {error.msg}"


def unknown_names(page: Path, text: str, root: Path = ROOT) -> Iterator[str]:
    """What a page says that the source has, and it has not."""
    known = names_in(root)
    for span in SPAN.findall(text):
        if not (NOTE.search(span) or span in FOREIGN or is_known(span, known, root)):
            yield f"{page}: `{span}`, but there is nothing of this name in the source"
    yield from unknown_notes(page, text, root)


def unknown_notes(page: Path, text: str, root: Path = ROOT) -> Iterator[str]:
    """References to notes, which may go on in the next line, also of a comment."""
    for reference in NOTE.findall(text):
        note = re.sub(r"[\s#]+", " ", reference)
        if note not in notes_in(root):
            yield f"{page}: [Note: {note}], but there is no such note in the source"


def is_known(span: str, known: frozenset[str], root: Path) -> bool:
    """Whether a file, class or function exists; true for all that is not said to be one."""
    if PATH.fullmatch(span):
        return is_file(span, root)
    call = CALL.fullmatch(span)
    if call:
        return call[1].rpartition(".")[2] in known
    return not CLASS.fullmatch(span) or known.issuperset(span.split("."))


def is_file(path: str, root: Path) -> bool:
    """Whether it exists below the root or the package; a name alone may be in any folder."""
    if "/" not in path:
        return any(path == file.name for file in sources(root)) or (root / path).exists()
    return any((folder / path).exists() for folder in (root, root / "src", root / "src" / "shoal"))


def sources(root: Path) -> list[Path]:
    folders = (root / folder for folder in ("src", "tests", "tools", "benchmarks", "examples"))
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


@cache
def names_in(root: Path) -> frozenset[str]:
    """All that is defined, assigned or imported in the source, and Python's own names."""
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in sources(root))
    defined = (name for tree in trees for node in ast.walk(tree) for name in defined_by(node))
    return frozenset(defined) | frozenset(dir(builtins))


def defined_by(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.alias):
        yield (getattr(node, "asname", None) or node.name).rpartition(".")[2]
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield node.attr


@cache
def notes_in(root: Path) -> frozenset[str]:
    """The names of notes: each stands in a line of its own where the note begins."""
    texts = (path.read_text(encoding="utf-8") for path in sources(root))
    return frozenset(note for text in texts for note in NOTE_BEGIN.findall(text))


def main() -> int:
    found = [problem for page in pages() for problem in problems(page)]
    found += unreachable()
    for path in (ROOT / "src").rglob("*.py"):
        found += unknown_notes(path, path.read_text(encoding="utf-8"))
    order = "links resolve and lead to all, examples compile, names exist"
    print("\n".join(found) or f"{len(pages())} pages: {order}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
