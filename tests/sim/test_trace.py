"""A malformed trace is refused in one line: where, what, and how much of it is good."""

from pathlib import Path

import pytest

from forebay.sim.trace import TraceError, read_trace
from tests.sim.traffic import conversations, write_trace

GOOD = '{"timestamp": 5, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}'


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    wanted = conversations(20)
    read = read_trace(write_trace(tmp_path / "t.jsonl", wanted))
    assert [(one.input_tokens, one.output_tokens, one.blocks) for one in read] == [
        (one.input_tokens, one.output_tokens, one.blocks) for one in wanted
    ]
    assert read_trace(tmp_path / "t.jsonl", limit=7) == read[:7]


def test_equal_ids_are_equal_tokens_and_the_last_block_may_be_partial(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(GOOD)
    (request,) = read_trace(tmp_path / "t.jsonl")
    prompt = memoryview(request.prompt()).cast("I")
    assert len(prompt) == 600
    assert set(prompt[:512]) == {1} and set(prompt[512:]) == {2}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "truncated"),
        ("[1]", "Expected `object`"),
        (GOOD.replace("600", "-1"), "input_length"),
        (GOOD.replace("600", "0"), "input_length"),
        (GOOD.replace("[1, 2]", "[1]"), "needs 2"),
        (GOOD.replace("[1, 2]", '[1, "x"]'), "hash_ids"),
        (GOOD.replace("[1, 2]", "[1, -2]"), "hash_ids"),
        (GOOD.replace("5", "4"), "before that of the line above"),
        (GOOD.replace('"output_length": 3, ', ""), "output_length"),
    ],
)
def test_what_is_no_request_is_named_with_its_line(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join([GOOD, GOOD, line, GOOD]))
    with pytest.raises(TraceError, match="line 3: ") as caught:
        read_trace(path)
    text = str(caught.value)
    assert says in text and "3 of 4 lines are good" in text and "\n" not in text


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_an_empty_trace_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "t.jsonl").write_text(text)
    with pytest.raises(TraceError, match="is empty"):
        read_trace(tmp_path / "t.jsonl")


def test_a_trace_that_is_not_there_or_not_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "none.jsonl")
    (tmp_path / "t.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="line 1"):
        read_trace(tmp_path / "t.jsonl")
