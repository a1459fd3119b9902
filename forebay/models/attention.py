"""Paged attention: write this pass's keys and values into the pool, then attend to everything before each row.

Per forward, `plan_attention` turns the batch into index tensors that all layers share:

    prefill (rows > 1)   one sequence at a time: its pages are gathered once, then blocks of rows see the keys before
                         them, so the half of the square that causality forbids is never computed
    decode  (rows == 1)  all sequences of similar length together, gathered and padded

The query heads that share a key/value head are rows of one matrix product: nothing is repeated. On the CPU, products
and softmax apart are twice as fast as torch's flash kernel (docs/LOG.md); elsewhere that kernel is used. Keys are
always whole pages, the unused tail masked: an odd number of keys makes the products copy their operands.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from forebay.models.batch import Span, StageBatch
from forebay.models.kv import KVSide

# Rows of a prefill that attend together: fewer waste less on the diagonal, more make better matrix products.
BLOCK_ROWS = 128


@dataclass(frozen=True, slots=True)
class Prefill:
    """One sequence of several rows. `gather (kv_heads * pages,)` picks the page-heads of all its tokens."""

    span: Span
    gather: Tensor


@dataclass(frozen=True, slots=True)
class Decodes:
    """Single rows, attended together. `rows (B,)`; `gather (B * kv_heads * pages,)`; `mask (B, keys)`, added, or None."""

    rows: Tensor
    gather: Tensor
    keys: int
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What all layers of one forward share. `slots (W * kv_heads,)` index the pool as rows of head_dim.

    `causal (BLOCK_ROWS, BLOCK_ROWS + page_size)` is added to the scores of a block of rows from its own keys on.
    """

    slots: Tensor
    write_rows: Tensor | None
    prefills: list[Prefill]
    decodes: list[Decodes]
    causal: Tensor


def plan_attention(batch: StageBatch, kv_heads: int, dtype: torch.dtype) -> AttentionPlan:
    """Index tensors for `batch` over a pool with `kv_heads` heads a page."""
    device = batch.positions.device
    heads = torch.arange(kv_heads, device=device)
    slots = (batch.write_pages[:, None] * kv_heads + heads) * batch.page_size + batch.write_offsets[
        :, None
    ]
    singles: dict[int, list[int]] = {}
    prefills = []
    for index, span in enumerate(batch.spans):
        table = batch.page_tables[index]
        if span.rows == 1:
            singles.setdefault(len(table).bit_length(), []).append(index)
        else:
            prefills.append(Prefill(span, (table[None, :] * kv_heads + heads[:, None]).flatten()))
    return AttentionPlan(
        slots=slots.flatten(),
        write_rows=None if len(batch.write_rows) == batch.rows else batch.write_rows,
        prefills=prefills,
        decodes=[_plan_decodes(group, batch, heads, dtype) for group in singles.values()],
        causal=torch.full(
            (BLOCK_ROWS, BLOCK_ROWS + batch.page_size), float("-inf"), dtype=dtype, device=device
        ).triu_(1),
    )


def attend(
    plan: AttentionPlan, q: Tensor, k: Tensor, v: Tensor, keys: KVSide, values: KVSide
) -> Tensor:
    """Write `k`, `v` into the pool in place, then attend.

    `q (T, heads, head_dim)`, `k`, `v (T, kv_heads, head_dim)`; `keys`, `values`: the layer's part of the pool.
    Returns `(T, heads * head_dim)`. The pool's pages are read and written only during the call.
    """
    head_dim = q.shape[-1]
    for side, new in ((keys, k), (values, v)):
        rows = new if plan.write_rows is None else new.index_select(0, plan.write_rows)
        side.write(plan.slots, rows.reshape(-1, head_dim))
    if not plan.decodes and len(plan.prefills) == 1:
        return _prefill(plan.prefills[0], plan.causal, q, keys, values)
    if not plan.prefills and len(plan.decodes) == 1 and len(plan.decodes[0].rows) == q.shape[0]:
        return _decode(plan.decodes[0], q, keys, values)
    out = torch.empty(q.shape[0], q.shape[1] * head_dim, dtype=q.dtype, device=q.device)
    for prefill in plan.prefills:
        part = slice(prefill.span.row_start, prefill.span.row_stop)
        out[part] = _prefill(prefill, plan.causal, q[part], keys, values)
    for decodes in plan.decodes:
        out.index_copy_(
            0, decodes.rows, _decode(decodes, q.index_select(0, decodes.rows), keys, values)
        )
    return out


def _plan_decodes(
    group: list[int], batch: StageBatch, heads: Tensor, dtype: torch.dtype
) -> Decodes:
    spans = [batch.spans[index] for index in group]
    device = batch.positions.device
    own = [batch.page_tables[index] for index in group]
    tables = torch.nn.utils.rnn.pad_sequence(own, batch_first=True, padding_value=-1)
    # Padded with pages of their own: another's may come to NaN in this very pass, and 0 * NaN is NaN.
    last = torch.stack([table[-1] for table in own])
    tables = torch.where(tables < 0, last[:, None], tables)
    totals = [span.total for span in spans]
    keys = tables.shape[1] * batch.page_size
    mask = None
    if min(totals) < keys:
        unseen = torch.arange(keys, device=device) >= torch.tensor(totals, device=device)[:, None]
        mask = torch.zeros(unseen.shape, dtype=dtype, device=device).masked_fill_(
            unseen, float("-inf")
        )
    return Decodes(
        rows=torch.tensor([span.row_start for span in spans], device=device),
        gather=(tables[:, None, :] * len(heads) + heads[:, None]).flatten(),
        keys=keys,
        mask=mask,
    )


def _prefill(work: Prefill, causal: Tensor, q: Tensor, keys: KVSide, values: KVSide) -> Tensor:
    """`(rows, heads, head_dim)` against context and itself; returns `(rows, heads * head_dim)`."""
    rows, heads, head_dim = q.shape
    span, kv_heads, page_size = work.span, *keys.pages.shape[1:3]
    groups = heads // kv_heads
    k, v = (side.gather(work.gather, kv_heads, q.dtype) for side in (keys, values))
    query = q.view(rows, kv_heads, groups, head_dim).permute(1, 2, 0, 3)
    if q.device.type != "cpu":
        k, v = k[:, : span.total], v[:, : span.total]
        visible = torch.ones(rows, span.total, dtype=torch.bool, device=q.device).tril_(
            span.context
        )
        k, v = (x.unsqueeze(1).expand(-1, groups, -1, -1) for x in (k, v))
        return (
            F.scaled_dot_product_attention(query, k, v, attn_mask=visible)
            .permute(2, 0, 1, 3)
            .reshape(rows, -1)
        )
    out = torch.empty(rows, kv_heads, groups, head_dim, dtype=q.dtype, device=q.device)
    query = query * head_dim**-0.5
    for start in range(0, rows, BLOCK_ROWS):
        stop = min(start + BLOCK_ROWS, rows)
        own = span.context + start
        seen = -(-(span.context + stop) // page_size) * page_size
        block = query[:, :, start:stop].reshape(kv_heads, -1, head_dim)
        scores = torch.bmm(block, k[:, :seen].transpose(1, 2))
        scores.view(kv_heads, groups, stop - start, seen)[..., own:].add_(
            causal[: stop - start, : seen - own]
        )
        part = torch.bmm(torch.softmax(scores, -1), v[:, :seen])
        out[start:stop] = part.view(kv_heads, groups, stop - start, head_dim).permute(2, 0, 1, 3)
    return out.view(rows, heads * head_dim)


def _decode(work: Decodes, q: Tensor, keys: KVSide, values: KVSide) -> Tensor:
    """`(B, heads, head_dim)`, one row a sequence; returns `(B, heads * head_dim)`."""
    batch, heads, head_dim = q.shape
    kv_heads = keys.pages.shape[1]
    k, v = (side.gather(work.gather, batch * kv_heads, q.dtype) for side in (keys, values))
    query = (q * head_dim**-0.5).view(batch * kv_heads, heads // kv_heads, head_dim)
    scores = torch.bmm(query, k.transpose(1, 2))
    if work.mask is not None:
        scores.view(batch, heads, work.keys).add_(work.mask[:, None])
    return torch.bmm(torch.softmax(scores, -1), v).view(batch, heads * head_dim)
