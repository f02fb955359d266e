"""Measures how easily the code is read as a whole, and compares checkouts.

Files per folder, repeated names, sizes, private names of torch, and how many files and functions
lie on the way of five things that users do.

Usage: python tools/survey [--json] [--walk NAME] [CHECKOUT ...]

Without a checkout, this one is surveyed. With several, they are columns of one table. A file that
``--json`` has written may stand for its checkout.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import source

HERE = Path(__file__).resolve().parent
Survey = dict[str, Any]
Row = tuple[str, ...]


def survey(checkout: Path) -> Survey:
    if checkout.is_file():
        loaded: Survey = json.loads(checkout.read_text(encoding="utf-8"))
        return loaded
    folder = checkout / "src"
    return {**source.survey(folder / "shoal"), "walks": walks(folder)}


def walks(folder: Path) -> Survey:
    path = os.pathsep.join([str(folder), str(HERE)])
    found = subprocess.run(
        [sys.executable, HERE / "walks.py"],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    counted: Survey = json.loads(found.stdout.splitlines()[-1])
    return counted


def rows(surveys: list[Survey]) -> list[Row]:
    """A line of numbers for each question, then one for each walk."""
    summaries = [summary(each) for each in surveys]
    counted = [(name, *(str(each[name]) for each in summaries)) for name in summaries[0]]
    walked = [
        (name, *(shown(each["walks"].get(name)) for each in surveys))
        for name in surveys[0]["walks"]
    ]
    heading = ("files / functions / hops / changes of folder", *("" for _ in surveys))
    return [*counted, heading, *walked]


def summary(survey: Survey) -> dict[str, int]:
    classes = survey["repeated class names"].values()
    private = survey["private names of torch"].values()
    return {
        "files": survey["files"],
        "lines": survey["lines"],
        "lines of code": survey["lines of code"],
        "folders": len(survey["folders"]),
        "folders of more than 12 files": len(source.crowded(survey["folders"])),
        "files above 400 lines": len(survey["files above 400 lines"]),
        "functions above 40 lines": len(survey["functions above 40 lines"]),
        "classes above 25 methods": len(survey["classes above 25 methods"]),
        "repeated class names": len(classes),
        "repeated class names, public": sum(each["is_public"] for each in classes),
        "repeated file names": len(survey["repeated file names"]),
        "private names of torch": len(private),
        "files with private names of torch": len({file for files in private for file in files}),
    }


def shown(walk: Survey | None) -> str:
    counts = [] if walk is None else [each for each in walk.values() if isinstance(each, int)]
    return " / ".join(map(str, counts)) or "-"


def called(walk: Survey) -> list[str]:
    """The files of a walk, in the order of their first calls, with the functions called."""
    return [f"{file}: {', '.join(names)}" for file, names in walk["called"].items()]


def details(survey: Survey) -> list[str]:
    """What the numbers of one survey stand for."""
    classes = {
        name + (" (public)" if each["is_public"] else ""): ", ".join(each["files"])
        for name, each in survey["repeated class names"].items()
    }
    lists: dict[str, dict[str, Any]] = {
        "folders of more than 12 files": source.crowded(survey["folders"]),
        **{name: survey[name] for name in survey if " above " in name},
        "repeated class names": classes,
        "repeated file names": joined(survey["repeated file names"]),
        "private names of torch": joined(survey["private names of torch"]),
    }
    return [
        line
        for name, found in lists.items()
        if found
        for line in ("", f"{name}:", *(f"  {key}: {value}" for key, value in found.items()))
    ]


def joined(files: dict[str, list[str]]) -> dict[str, str]:
    return {name: ", ".join(each) for name, each in files.items()}


def table(lines: list[Row]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkouts", nargs="*", type=Path, default=[HERE.parent.parent])
    parser.add_argument("--json", action="store_true", help="everything, for a program to read")
    parser.add_argument("--walk", help="the files and functions of one walk, by its name")
    options = parser.parse_args()
    surveys = [survey(checkout.resolve()) for checkout in options.checkouts]
    if options.walk:
        print("\n".join(called(surveys[0]["walks"][options.walk])))
        return
    if options.json:
        print(json.dumps(surveys[0] if len(surveys) == 1 else surveys, indent=1))
        return
    names = (str(checkout) for checkout in options.checkouts)
    print(table([("", *names), *rows(surveys)]))
    if len(surveys) == 1:
        print("\n".join(details(surveys[0])))


if __name__ == "__main__":
    main()
