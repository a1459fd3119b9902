"""`docs/FIELD_REPORTS.md` names what exists, for every report."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REPORTS = {
    "P": (1, 2, 3, 4, 5, 7, 9, 10, 13, 14, 15, 16, 18, 19, 20, 21),
    "B": (1, 2, 3, 4, 6, 7, 9, 11, 13, 14, 15, 16, 17, 18),
    "L": (1, 2, 5, 6, 8, 9, 10, 11, 12, 14, 15, 16, 17, 18),
    "S": (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 14, 15),
    "T": (1, 2),
    "E": (1, 3, 4, 5, 6),
    "V": (1, 3, 4, 5),
    "N": (1, 2, 4, 5, 6, 7, 8, 9, 11, 13, 14, 15, 16),
    "H": (1, 2, 3, 5, 6, 7, 8),
}


@cache
def rows() -> dict[str, str]:
    """Report -> what holds it."""
    lines = (ROOT / "docs/FIELD_REPORTS.md").read_text().splitlines()
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines
        if line.startswith("| ")
    ]
    return {cell[0]: cell[2] for cell in cells if cell[0] != "report"}


@cache
def names(path: Path) -> frozenset[str]:
    """Functions and assigned names at the top of a module."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return frozenset(found)


def test_every_report_has_a_row() -> None:
    assert list(rows()) == [
        f"{section}{number}" for section, numbers in REPORTS.items() for number in numbers
    ]


@pytest.mark.parametrize("report", rows())
def test_what_holds_it_exists(report: str) -> None:
    references = re.findall(r"`(tests/[^`]+)`", rows()[report])
    assert references or rows()[report].startswith("not here: "), (
        "a scenario, a test, or the reason why there is nothing to hold to"
    )
    for reference in references:
        path, _, name = reference.partition("::")
        assert (ROOT / path).is_file(), f"{path} is not there"
        assert not name or name in names(ROOT / path), f"{path} has no {name}"


@pytest.mark.parametrize("report", rows())
def test_it_is_a_scenario_or_the_property_that_prevents_it_is_named(report: str) -> None:
    held = rows()[report]
    words = re.sub(r"`[^`]*`|[^a-z ]", "", held).split()
    said = len(words) >= 4 or re.search(r"\bas [A-Z]\d+", held)
    assert "`tests/scenarios/" in held or said, (
        "say in words why it cannot happen, or write it as a scenario"
    )
