"""Paged attention: write this pass's keys and values into the pool, then attend to everything before each row.

Per forward, `plan_attention` turns the batch into index tensors that all layers share:

    prefill (rows > 1)   one sequence at a time; new keys straight from this pass, earlier ones gathered from pages,
                         joined by log-sum-exp, so no mask over the context is ever built
    decode  (rows == 1)  all sequences of similar length together, gathered and padded

Query heads that share a key/value head are a dimension of stride 0 in keys and values: nothing is repeated.
The flash kernels return the log-sum-exp on the CPU only; elsewhere prefill with a context uses one masked call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forebay.models.batch import Span, StageBatch

_flash_cpu: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True, slots=True)
class Prefill:
    """One sequence of several rows. `gather (kv_heads * pages,)` picks page-heads of `context` (`total`) tokens."""

    span: Span
    gather: Tensor | None
    direct: bool
    """New keys and values are taken from this pass, and only the context is gathered."""


@dataclass(frozen=True, slots=True)
class Decodes:
    """Single rows, attended together. `rows (B,)`; `gather (B * kv_heads * pages,)`; `mask (B, 1, 1, keys)` or None."""

    rows: Tensor
    gather: Tensor
    keys: int
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What all layers of one forward share. `slots (W * kv_heads,)` index the pool as rows of head_dim."""

    slots: Tensor
    write_rows: Tensor | None
    prefills: list[Prefill]
    decodes: list[Decodes]


def plan_attention(batch: StageBatch, kv_heads: int, dtype: torch.dtype) -> AttentionPlan:
    """Index tensors for `batch` over a pool with `kv_heads` heads a page."""
    heads = torch.arange(kv_heads, device=batch.positions.device)
    slots = (batch.write_pages[:, None] * kv_heads + heads) * batch.page_size + batch.write_offsets[:, None]
    singles: dict[int, list[int]] = {}
    prefills = []
    for index, span in enumerate(batch.spans):
        if span.rows == 1:
            singles.setdefault(len(batch.page_tables[index]).bit_length(), []).append(index)
        else:
            prefills.append(_plan_prefill(span, batch, batch.page_tables[index], heads))
    return AttentionPlan(
        slots=slots.flatten(),
        write_rows=None if len(batch.write_rows) == batch.rows else batch.write_rows,
        prefills=prefills,
        decodes=[_plan_decodes(group, batch, heads, dtype) for group in singles.values()],
    )


def attend(plan: AttentionPlan, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Write `k`, `v` into the pool in place, then attend.

    `q (T, heads, head_dim)`, `k`, `v (T, kv_heads, head_dim)`; `keys`, `values (pages, kv_heads, page_size, head_dim)`.
    Returns `(T, heads * head_dim)`. The pool's pages are read and written only during the call.
    """
    head_dim = q.shape[-1]
    for pool, new in ((keys, k), (values, v)):
        rows = new if plan.write_rows is None else new.index_select(0, plan.write_rows)
        pool.view(-1, head_dim).index_copy_(0, plan.slots, rows.reshape(-1, head_dim))
    if not plan.decodes and len(plan.prefills) == 1:
        return _prefill(plan.prefills[0], q, k, v, keys, values)
    if not plan.prefills and len(plan.decodes) == 1 and len(plan.decodes[0].rows) == q.shape[0]:
        return _decode(plan.decodes[0], q, keys, values)
    out = torch.empty(q.shape[0], q.shape[1] * head_dim, dtype=q.dtype, device=q.device)
    for prefill in plan.prefills:
        part = slice(prefill.span.row_start, prefill.span.row_stop)
        out[part] = _prefill(prefill, q[part], k[part], v[part], keys, values)
    for decodes in plan.decodes:
        out.index_copy_(0, decodes.rows, _decode(decodes, q.index_select(0, decodes.rows), keys, values))
    return out


def _plan_prefill(span: Span, batch: StageBatch, table: Tensor, heads: Tensor) -> Prefill:
    direct = span.written and (span.context == 0 or table.device.type == "cpu")
    gathered = span.context if direct else span.total
    if gathered == 0:
        return Prefill(span, None, direct)
    pages = table[: -(-gathered // batch.page_size)]
    return Prefill(span, (pages[None, :] * len(heads) + heads[:, None]).flatten(), direct)


def _plan_decodes(group: list[int], batch: StageBatch, heads: Tensor, dtype: torch.dtype) -> Decodes:
    spans = [batch.spans[index] for index in group]
    device = batch.positions.device
    tables = torch.nn.utils.rnn.pad_sequence([batch.page_tables[index] for index in group], batch_first=True)
    totals = [span.total for span in spans]
    padded = tables.shape[1] * batch.page_size
    mask = None
    keys = padded
    if min(totals) == max(totals):
        keys = totals[0]
    else:
        unseen = torch.arange(padded, device=device) >= torch.tensor(totals, device=device)[:, None]
        mask = torch.zeros(unseen.shape, dtype=dtype, device=device).masked_fill_(unseen, float("-inf"))[:, None, None]
    return Decodes(
        rows=torch.tensor([span.row_start for span in spans], device=device),
        gather=(tables[:, None, :] * len(heads) + heads[:, None]).flatten(),
        keys=keys,
        mask=mask,
    )


def _gather(pool: Tensor, gather: Tensor, keys: int) -> Tensor:
    """`(n, keys, head_dim)`: the first `keys` tokens of each run of page-heads, n runs in all (heads, or B x heads)."""
    page_size, head_dim = pool.shape[2:]
    runs = pool.view(-1, page_size, head_dim).index_select(0, gather)
    pages = -(-keys // page_size)
    return runs.view(-1, pages * page_size, head_dim)[:, :keys]


def _grouped(x: Tensor, groups: int) -> Tensor:
    """`(kv_heads, n, head_dim)` seen as `(kv_heads, groups, n, head_dim)`, without a copy."""
    return x.unsqueeze(1).expand(-1, groups, -1, -1)


def _prefill(work: Prefill, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """`(rows, heads, head_dim)` against context and itself; returns `(rows, heads * head_dim)`."""
    rows, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    groups = heads // kv_heads
    query = q.view(rows, kv_heads, groups, head_dim).permute(1, 2, 0, 3)
    if not work.direct:
        out = _masked(work, query, keys, values)
    else:
        new_k, new_v = (_grouped(x.transpose(0, 1), groups) for x in (k, v))
        if work.gather is None:
            out = F.scaled_dot_product_attention(query, new_k, new_v, is_causal=True)
        else:
            old_k, old_v = (_grouped(_gather(pool, work.gather, work.span.context), groups) for pool in (keys, values))
            out, lse = _flash_cpu(query, new_k, new_v, 0.0, True)
            old_out, old_lse = _flash_cpu(query, old_k, old_v, 0.0, False)
            out = torch.lerp(old_out, out, torch.sigmoid(lse - old_lse).unsqueeze(-1).to(out.dtype))
    return out.permute(2, 0, 1, 3).reshape(rows, heads * head_dim)


def _masked(work: Prefill, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Everything read back from the pages, with a causal mask aligned to the bottom right."""
    assert work.gather is not None
    span = work.span
    groups = query.shape[1]
    all_k, all_v = (_grouped(_gather(pool, work.gather, span.total), groups) for pool in (keys, values))
    seen = torch.ones(span.rows, span.total, dtype=torch.bool, device=query.device).tril_(span.context)
    return F.scaled_dot_product_attention(query, all_k, all_v, attn_mask=seen)


def _decode(work: Decodes, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """`(B, heads, head_dim)`, one row a sequence; returns `(B, heads * head_dim)`."""
    batch, heads, head_dim = q.shape
    kv_heads = keys.shape[1]
    query = q.view(batch, kv_heads, heads // kv_heads, head_dim)
    old_k, old_v = (_gather(pool, work.gather, work.keys).view(batch, kv_heads, work.keys, head_dim) for pool in (keys, values))
    out = F.scaled_dot_product_attention(query, old_k, old_v, attn_mask=work.mask)
    return out.reshape(batch, heads * head_dim)
