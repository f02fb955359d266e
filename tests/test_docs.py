import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "tools" / "check_docs.py"
spec = importlib.util.spec_from_file_location("check_docs", SCRIPT)
check_docs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check_docs)


@pytest.mark.parametrize("page", check_docs.pages(), ids=lambda page: page.name)
def test_page_is_in_order(page):
    assert list(check_docs.problems(page)) == []


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[x](missing.md)", "there is no"),
        ('<img src="missing.svg">', "there is no"),
        ("[x](#nowhere)", "no such heading"),
        ("```python\ndef f(:\n```", ":2: the example does not compile"),
    ],
)
def test_what_is_wrong_is_found(tmp_path, text, complaint):
    page = tmp_path / "page.md"
    page.write_text(text)
    (problem,) = check_docs.problems(page)
    assert complaint in problem


def test_what_is_right_passes(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A heading: `code`\n[x](#a-heading-code) [y](https://example.org) [z](page.md)\n"
        "```\n[not a link](missing.md)\n```\n"
        "- item\n\n  ```python\n  print(1)\n  ```\n"
    )
    assert list(check_docs.problems(page)) == []
