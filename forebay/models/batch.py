"""One plan's work on one stage, as the device needs it.

    rows 0 .. T-1      | sequence 0 (prefill, 5 rows) | sequence 1 (decode, 1 row) | ...
    positions            context+0 .. context+4         context+0
    page table           the pages that hold positions 0 .. context+rows-1 of the sequence

A row's key and value go to the page of its position, unless its write is suppressed (rule R7): then the page already
holds them, and the row attends to them there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SequenceWork:
    """One sequence's share of a plan, in plain numbers.

    `rows` query tokens follow `context` tokens that are in `pages` already; `pages` cover `context + rows` tokens.
    Keys and values of positions below `write_from` (default: none) are not written. `sample` asks for the logits of
    the last row, `score` for those of all rows.
    """

    rows: int
    context: int
    pages: Sequence[int] | npt.NDArray[np.int64]
    write_from: int | None = None
    sample: bool = False
    score: bool = False


@dataclass(frozen=True, slots=True)
class Span:
    """Rows `[row_start, row_start + rows)` belong to one sequence with `context` tokens before them."""

    row_start: int
    rows: int
    context: int
    written: bool
    """Whether every row writes its key and value."""

    @property
    def row_stop(self) -> int:
        return self.row_start + self.rows

    @property
    def total(self) -> int:
        """Tokens attended to by the last row."""
        return self.context + self.rows


@dataclass(frozen=True, slots=True)
class StageBatch:
    """What a stage computes in one pass. All tensors are int64 on the stage's device.

    positions (T,); page_tables: per sequence (pages,), views of flat_tables, one after the other; write_rows, write_pages,
    write_offsets (W,): row `write_rows[i]` writes to slot `write_offsets[i]` of page `write_pages[i]`; sample_rows (S,): rows whose
    logits are wanted. finite (T,) bool, all true at first: a forward pass takes it from rows that
    came to NaN, to infinity, or out of the range in which a norm can be computed.
    """

    positions: Tensor
    spans: list[Span]
    page_tables: list[Tensor]
    flat_tables: Tensor
    write_rows: Tensor
    write_pages: Tensor
    write_offsets: Tensor
    sample_rows: Tensor
    finite: Tensor
    page_size: int

    @property
    def rows(self) -> int:
        return int(self.positions.shape[0])

    @property
    def total_max(self) -> int:
        """The longest context that any row sees, in tokens."""
        return max(span.total for span in self.spans)


def build_batch(
    sequences: Sequence[SequenceWork], page_size: int, device: torch.device | str = "cpu"
) -> StageBatch:
    """Lay out `sequences` one after the other and find the slot of each row; no loop over tokens.

    Asserts that each sequence has at least one row and that its pages cover `context + rows` tokens.
    """
    assert sequences and page_size > 0
    rows = np.array([work.rows for work in sequences], dtype=np.int64)
    context = np.array([work.context for work in sequences], dtype=np.int64)
    writes = [work.context if work.write_from is None else work.write_from for work in sequences]
    used = -(-(context + rows) // page_size)
    assert (rows > 0).all() and (context >= 0).all(), (
        "a sequence without rows, or with a negative context"
    )
    assert all(len(work.pages) >= n for work, n in zip(sequences, used, strict=True)), (
        "pages do not cover the tokens"
    )
    tables = [
        np.asarray(work.pages, dtype=np.int64)[:n] for work, n in zip(sequences, used, strict=True)
    ]
    flat = np.concatenate(tables)

    starts = np.cumsum(rows) - rows
    positions = np.arange(int(rows.sum()), dtype=np.int64) + np.repeat(context - starts, rows)
    write_rows = np.flatnonzero(positions >= np.repeat(np.array(writes, dtype=np.int64), rows))
    written = positions[write_rows]
    table_start = np.repeat(np.cumsum(used) - used, rows)[write_rows]
    sample_rows = (starts + rows - 1)[np.array([work.sample for work in sequences], dtype=bool)]
    if any([work.score for work in sequences]):
        sample_rows = _rows_with_logits(sequences, starts)

    def move(array: npt.NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    flat_tables = move(flat)
    return StageBatch(
        positions=move(positions),
        spans=[
            Span(int(start), work.rows, work.context, write <= work.context)
            for start, work, write in zip(starts, sequences, writes, strict=True)
        ],
        page_tables=list(torch.split(flat_tables, used.tolist())),
        flat_tables=flat_tables,
        write_rows=move(write_rows),
        write_pages=move(flat[table_start + written // page_size]),
        write_offsets=move(written % page_size),
        sample_rows=move(sample_rows),
        finite=torch.ones(len(positions), dtype=torch.bool, device=device),
        page_size=page_size,
    )


def _rows_with_logits(
    sequences: Sequence[SequenceWork], starts: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """All rows of what is scored, the last one of what is only sampled, in order."""
    return np.concatenate(
        [
            np.arange(start if work.score else start + work.rows - work.sample, start + work.rows)
            for work, start in zip(sequences, starts, strict=True)
        ]
    )
