"""Request traces: one JSON object a line, as in the public Mooncake traces.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58]}

``timestamp`` is milliseconds from the start, lengths are tokens, and there is one id for each block of 512 prompt tokens, the last
possibly partial: equal leading ids are a prefix that can be shared. A trace has no text, so every token of a block is its id; that is
all that page hashes need. The tokens that a request emits are its own and match nothing, since the trace doesn't say what they were.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

BLOCK_TOKENS = 512
_TOKEN_BYTES = 4
_Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]
_Id = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class TraceError(ValueError):
    """One line: which line of the trace, what is wrong with it, how many lines were good."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """``at_s``: arrival, from the trace's start. ``blocks``: one id for each `BLOCK_TOKENS` of the prompt."""

    at_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]

    def prompt(self) -> bytes:
        """The prompt's packed tokens."""
        block = b"".join(id.to_bytes(_TOKEN_BYTES, "little") * BLOCK_TOKENS for id in self.blocks)
        return block[: self.input_tokens * _TOKEN_BYTES]


class _Line(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0, le=1e12)]
    input_length: _Count
    output_length: _Count
    hash_ids: tuple[_Id, ...]


def read_trace(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """The first ``limit`` requests of a trace (None: all). Raises ``TraceError``."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise TraceError(
            f"trace {path}: {error.strerror}; give a file with one JSON object a line"
        ) from error
    decode = msgspec.json.Decoder(_Line).decode
    requests: list[TraceRequest] = []
    problem, bad = "", 0
    for number, line in enumerate(lines, 1):
        if limit is not None and len(requests) == limit:
            break
        if not line.strip():
            continue
        try:
            requests.append(_request(decode(line), requests[-1].at_s if requests else 0.0))
        except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
            problem = problem or f"line {number}: {error}"
            bad += 1
    if problem:
        raise TraceError(
            f"trace {path}, {problem}; {len(requests)} of {len(requests) + bad} lines are good"
        )
    if not requests:
        raise TraceError(f"trace {path} is empty; give a file with one JSON object a line")
    return requests


def _request(line: _Line, previous_s: float) -> TraceRequest:
    """Raises ``ValueError`` for what no line of a trace can mean."""
    blocks = -(-line.input_length // BLOCK_TOKENS)
    if len(line.hash_ids) != blocks:
        raise ValueError(
            f"hash_ids has {len(line.hash_ids)} ids; a prompt of {line.input_length} tokens needs {blocks}"
        )
    at_s = line.timestamp / 1000
    if at_s < previous_s:
        raise ValueError(
            f"timestamp {line.timestamp:g} is before that of the line above ({previous_s * 1000:g}); sort the trace"
        )
    return TraceRequest(at_s, line.input_length, line.output_length, line.hash_ids)
