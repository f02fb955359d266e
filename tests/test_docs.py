import importlib.util
import re
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parent.parent / "tools" / "check_docs.py"
spec = importlib.util.spec_from_file_location("check_docs", SCRIPT)
check_docs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check_docs)


@pytest.mark.parametrize("page", check_docs.pages(), ids=lambda page: page.name)
def test_page_is_in_order(page):
    assert list(check_docs.problems(page)) == []


def test_the_map_lists_every_note():
    text = (check_docs.ROOT / "docs" / "architecture.md").read_text()
    listed = set(re.findall(r"^\| \[Note: ([^\]]+)\] \|", text, re.M))
    assert listed == check_docs.notes_in(check_docs.ROOT)


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


def test_every_page_is_reached_from_the_readme():
    assert list(check_docs.unreachable()) == []


def test_a_page_that_nobody_links_to(tmp_path):
    """Links in code are none, and a link from a page that nobody reaches does not count."""
    (tmp_path / "docs").mkdir()
    pages = {
        "README.md": "[a](docs/a.md#x)\n```\n[e](docs/e.md)\n```\n",
        "docs/a.md": "[b](b.md) [site](https://example.org/c.md)",
        "docs/b.md": "[a](a.md)",
        "docs/c.md": "[d](d.md)",
        "docs/d.md": "[c](c.md)",
        "docs/e.md": "",
    }
    for name, text in pages.items():
        (tmp_path / name).write_text(text)
    found = [problem.partition(":")[0] for problem in check_docs.unreachable(tmp_path)]
    assert [Path(each).name for each in found] == ["c.md", "d.md", "e.md"]


@pytest.fixture
def source(tmp_path):
    """A checkout with one class, one function, one test and one note."""
    package = tmp_path / "src" / "shoal" / "comm" / "shm"
    package.mkdir(parents=True)
    (package / "backend.py").write_text(
        '"""Shared memory.\n\n[Note: two halves]\nThey alternate.\n"""\n'
        "from torch import Tensor\n\n"
        "class Backend:\n    def reduce(self): self.size = 1\n\n"
        "def connect(): ...\n"
    )
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "leaks.py").write_text("def baseline(): ...")
    return tmp_path


@pytest.mark.parametrize(
    "span",
    [
        *("src/shoal/comm/shm/backend.py", "comm/shm/backend.py", "backend.py", "comm/shm/"),
        *("tests/leaks.py", "leaks.baseline()", "connect()", "connect(world, 3)"),
        *("Backend", "Backend.reduce", "Backend.reduce()", "Backend.size", "Tensor", "ValueError"),
        *("shm", "num_x", "MISSING", "make test", "-k shm -x", "[Note: two halves]"),
    ],
)
def test_names_that_exist_pass(source, span):
    page = source / "architecture.md"
    assert list(check_docs.unknown_names(page, f"A `{span}`.", source)) == []


@pytest.mark.parametrize(
    "span",
    [
        *("src/shoal/comm/gone.py", "comm/gone/backend.py", "gone.py", "comm/gone/", "tests/gone"),
        *("gone()", "Backend.gone()", "Gone", "Gone.reduce", "Backend.gone", "[Note: gone]"),
    ],
)
def test_names_that_do_not_exist_are_found(source, span):
    page = source / "architecture.md"
    (problem,) = check_docs.unknown_names(page, f"A `{span}`.", source)
    assert span in problem


def test_a_note_that_is_only_referred_to_is_none(source):
    path = source / "src" / "shoal" / "other.py"
    path.write_text("# See [Note: two\n# halves] and [Note: a third].\n")
    (problem,) = check_docs.unknown_notes(path, path.read_text(), source)
    assert "[Note: a third]" in problem


def test_only_descriptions_of_the_source_are_held_against_it(tmp_path):
    for name, num_problems in (("CONTRIBUTING.md", 1), ("README.md", 0)):
        page = tmp_path / name
        page.write_text("See `NoSuchClass`.")
        assert len(list(check_docs.problems(page))) == num_problems


@pytest.fixture(scope="session")
def first_use():
    """The first step of an optimizer sets a variable that stays."""
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]).step()


@pytest.mark.usefixtures("first_use")
@pytest.mark.parametrize("page", ["activations"])
def test_examples_of_a_page_run(page, capsys):
    text = (SCRIPT.parent.parent / "docs" / "guide" / f"{page}.md").read_text(encoding="utf-8")
    for example in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(example, page, "exec"), {"__name__": "__main__"})
    assert "Distributed Memory Statistics:" in capsys.readouterr().out
