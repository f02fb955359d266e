"""Checks the documentation: relative links resolve, Python examples compile.

Usage: python tools/check_docs.py
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^ *```", re.M | re.S)
LINK = re.compile(r"\]\(\s*<?([^)\s>]+)|(?:src|href)=\"([^\"]+)\"")
HEADING = re.compile(r"^#+ +(.+?) *$", re.M)


def pages(root: Path = ROOT) -> list[Path]:
    return sorted([*root.glob("*.md"), *(root / "docs").rglob("*.md")])


def problems(page: Path) -> Iterator[str]:
    """Yields one line for each thing that is wrong with a page."""
    text = page.read_text(encoding="utf-8")
    yield from broken_links(page, FENCE.sub("", text))
    yield from broken_examples(page, text)


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


def main() -> int:
    found = [problem for page in pages() for problem in problems(page)]
    print("\n".join(found) or f"{len(pages())} pages: links resolve, examples compile")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
