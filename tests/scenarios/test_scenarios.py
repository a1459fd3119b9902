"""Every scenario still happens as it is written."""

from pathlib import Path

import pytest

from tests.scenarios.script import ScriptError, rewrite, scripts, tokens_of
from tests.scenarios.stages import new_stage


@pytest.mark.parametrize("path", scripts(), ids=lambda path: path.stem)
def test_it_happens_as_written(path: Path) -> None:
    before = path.read_text()
    assert rewrite(before, new_stage) == before, (
        "read what has changed with: python -m tests.scenarios --rewrite"
    )


def test_effects_are_written_below_their_command_and_old_ones_go() -> None:
    script = "# a story\n\nreplica pp=1\n    nonsense\nsubmit a 1..4 max=1   # one page\n"
    written = rewrite(script, new_stage)
    assert "nonsense" not in written
    assert (
        "submit a 1..4 max=1   # one page\n    plan 1\n      a: positions 0 to 3, table gains 0, samples\n"
        in written
    )
    assert rewrite(written, new_stage) == written


@pytest.mark.parametrize(
    "line", ["submit a 1..4", "replica pp=1\nfly", "replica pp=1\ndone 7", "store\nlogged h a"]
)
def test_a_command_that_means_nothing_is_named_with_its_line(line: str) -> None:
    with pytest.raises(ScriptError, match=rf"line {line.count(chr(10)) + 1}"):
        rewrite(line, new_stage)


def test_tokens_are_written_short() -> None:
    assert tokens_of("1..3+7x2+5") == [1, 2, 3, 7, 7, 5]
