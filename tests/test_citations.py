"""Every code that is cited anywhere is explained in this repository.

A rule is cited as "rule R5", an invariant as "I6", a field report as "field report B3". docs/RULES.md
has the rules, `core/invariants.py` the invariants, docs/FIELD_REPORTS.md the field reports.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RULES = frozenset(
    re.findall(r"^\*\*((?:R|ST|DR)\d+)\.", (ROOT / "docs/RULES.md").read_text(), re.M)
)
INVARIANTS = frozenset(
    re.findall(r"^(I\d+) ", (ROOT / "forebay/core/invariants.py").read_text(), re.M)
)
REPORTS = frozenset(
    re.findall(r"^\| ([A-Z]\d+) \|", (ROOT / "docs/FIELD_REPORTS.md").read_text(), re.M)
)
# Not citations: tiers, number formats, lint codes, hardware.
OTHERS = frozenset({"L1", "L2", "L3", "F16", "F32", "F64", "O3", "C11", "E731", "H20", "X1"})
CODE = r"[A-Z]{1,2}\d{1,3}"
LIST = rf"({CODE}[a-z]?\d?(?:(?:, | and | to )(?:rules? |field reports? )?{CODE}[a-z]?\d?)*)"
CITED = re.compile(rf"\b(?:[Rr]ules?|[Ff]ield reports?) {LIST}")
BARE = re.compile(rf"(?<![\w/`.\-+*%])({CODE})(?![\w\-+*])")


def sources() -> list[Path]:
    found = [
        *(ROOT / "forebay").rglob("*.py"),
        *(ROOT / "forebay").rglob("*.[ch]"),
        *(ROOT / "tests").rglob("*.py"),
        *(ROOT / "tests/scenarios").glob("*.txt"),
        *(ROOT / "docs").glob("*.md"),
        ROOT / "README.md",
    ]
    history = {ROOT / "docs/LOG.md", ROOT / "docs/FIELD_REPORTS.md", Path(__file__)}
    return sorted(path for path in found if path not in history)


def prose(path: Path) -> str:
    """What is written for people; of scenarios and C the comments alone. Line breaks become spaces."""
    text = path.read_text()
    if path.suffix in (".c", ".h"):
        text = "\n".join(re.findall(r"/\*.*?\*/", text, re.S))
    lines = text.splitlines()
    if path.suffix == ".txt":
        lines = [line for line in lines if line.startswith("#")]
    return " ".join(line.strip().lstrip("#*/ ") for line in lines)


def test_the_three_tables_are_read() -> None:
    assert {"R1", "R12", "ST1", "ST7", "DR1", "DR9"} <= RULES
    assert {"I1", "I17"} <= INVARIANTS
    assert {"P1", "B3", "H8"} <= REPORTS


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_cited_code_resolves(path: Path) -> None:
    text = prose(path)
    known = RULES | INVARIANTS | REPORTS
    for cited in CITED.finditer(text):
        for code in re.findall(CODE, cited.group(1)):
            assert code in known or code in OTHERS, f"{cited.group(0)!r}: nothing explains {code}"


@pytest.mark.parametrize(
    "path",
    [path for path in sources() if path.suffix != ".md"],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_a_field_report_is_named_as_one(path: Path) -> None:
    """A bare code is a rule's or an invariant's, so that "S1" cannot mean two things."""
    text = CITED.sub(" ", prose(path))
    bare = {code for code in BARE.findall(text) if code[0].isalpha()}
    stray = {
        code
        for code in bare - RULES - INVARIANTS - OTHERS
        if re.fullmatch(r"(?:[PBLSTEVNHDXROCF]|ST|DR|PD|RT|MH|PL|TS|OB)\d{1,2}", code)
    }
    assert not stray, f"say 'field report' or 'rule' before {sorted(stray)}, or explain it"
