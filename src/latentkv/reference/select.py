"""Stage `select` in plain PyTorch: schedules, index logits over pages, top-k, candidate blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from latentkv import numerics
from latentkv.layout import INDEX_DIM, INDEX_GROUP, IndexKeyLayout, IndexQueryLayout
from latentkv.reference.index import flat_pages, key_tables, query_scale_table, word_bytes

F32 = torch.float32
GROUP_BYTES = INDEX_GROUP // 2
KEYS_AT_ONCE = 4096  # a chunk of decoded keys, 2 MiB
PRODUCTS_AT_ONCE = 1 << 20  # group dot products held at once, 4 MiB
MOST = 2**31 - 1  # of what int32 holds


# --- page table and schedules -----------------------------------------------------------------------------------------


def pad_page_table(table: Tensor, columns: int) -> Tensor:
    """int32 `[rows, columns]`: the table, -1 where int32 does not hold a page, then zeros."""
    out = torch.zeros(table.shape[0], columns, dtype=torch.int32, device=table.device)
    pages = table.to(torch.int32)
    out[:, : table.shape[1]] = torch.where(pages == table, pages, -1)
    return out


def decode_schedule(lengths: Tensor, max_len: int, block: int, next_n: int, out: Tensor) -> None:
    """One `[row, first chunk, chunks, length]` a work unit; `next_n` rows share a batch entry's chunks."""
    batch, start, count, used = _split_rows(lengths, max_len, block, out.shape[0], next_n)
    out.copy_(torch.tensor([0, 0, 1, 0], device=out.device))
    if not used:
        return
    draft = torch.arange(next_n, device=out.device)
    rows = batch.unsqueeze(1) * next_n + draft
    fields = (rows, start.unsqueeze(1), count.unsqueeze(1), lengths[batch].long().clamp(max=MOST).unsqueeze(1))
    units = torch.stack([f.expand_as(rows) for f in fields], -1)
    out[: used * next_n] = units.flatten(0, 1).to(torch.int32)


def prefill_schedule(lengths: Tensor, row_to_batch: Tensor | None, max_len: int, block: int, out: Tensor) -> None:
    """One `[row, batch, first chunk, chunks, 0, length]` a work unit."""
    row, start, count, used = _split_rows(lengths, max_len, block, out.shape[0], 1)
    out.copy_(torch.tensor([0, 0, 0, 1, 0, 0], device=out.device))
    if not used:
        return
    batch = row if row_to_batch is None else row_to_batch[row].long()
    batch = torch.where((batch < -MOST - 1) | (batch > MOST), -1, batch)
    units = torch.stack((row, batch, start, count, torch.zeros_like(row), lengths[row].long().clamp(max=MOST)), -1)
    out[:used] = units.to(torch.int32)


def _split_rows(
    lengths: Tensor, max_len: int, block: int, workers: int, next_n: int
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Row, first chunk and chunk count of each share in order, and how many there are."""
    chunks = _ceil_div(lengths.long().clamp(0, MOST), block)
    step = _chunks_a_share(chunks, max(1, _ceil_div(max_len, block)), workers, next_n)
    parts = _ceil_div(chunks, step)
    row = torch.repeat_interleave(torch.arange(lengths.shape[0], device=lengths.device), parts)
    first = parts.cumsum(0) - parts
    start = (torch.arange(row.shape[0], device=lengths.device) - first[row]) * step
    count = (chunks[row] - start).clamp(max=step)
    return row, start, count, row.shape[0]


def _chunks_a_share(chunks: Tensor, most: int, workers: int, next_n: int) -> int:
    """Fewest chunks a share, up to `most`, for which the shares fit the workers; else one share a row."""

    def fits(step: int) -> bool:
        return next_n * int(_ceil_div(chunks, step).sum()) <= workers

    if not fits(most):
        return max(1, int(chunks.max()))
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        if fits(middle):
            high = middle
        else:
            low = middle + 1
    return low


def _ceil_div(a: Any, b: int) -> Any:
    return (a + (b - 1)) // b


# --- index logits -----------------------------------------------------------------------------------------------------


def index_logits(
    query: Tensor,
    query_scale: Tensor,
    weights: Tensor,
    payload: Tensor,
    scale: Tensor | None,
    page_table: Tensor,
    lengths: Tensor,
    row_to_batch: Tensor | None,
    schedule: Tensor | None,
    fill: bool,
    query_layout: str,
    layout: str,
    page_size: int,
    out: Tensor,
) -> None:
    """Sum over heads of relu(query . key) * weight, for the keys of each row's pages below its length.

    The schedule says only how a GPU shares the work; the logits do not depend on it.
    """
    kind = IndexKeyLayout.parse(layout)
    heads = query_values(query, query_scale, weights.shape[1], query_layout)
    weights = weights.to(F32)
    if fill:
        out.fill_(-torch.inf)
    batches, rows_of = _rows_by_batch(page_table.shape[0], lengths, row_to_batch)
    lengths = lengths.clamp(0, min(out.shape[1], page_table.shape[1] * page_size))
    for batch, rows in zip(batches, rows_of, strict=True):
        end = int(lengths[rows].max())
        for first in range(0, end, KEYS_AT_ONCE):
            last = min(end, first + KEYS_AT_ONCE)
            pages = page_table[batch, first // page_size : _ceil_div(last, page_size)]
            keys = key_values(payload, scale, pages, kind, page_size)[: last - first]
            columns = torch.arange(first, last, device=out.device)
            for some in rows.split(max(1, PRODUCTS_AT_ONCE // (4 * weights.shape[1] * (last - first)))):
                logits = _score(heads[some], keys, weights[some])
                seen = columns < lengths[some].unsqueeze(1)
                out[some, first:last] = torch.where(seen, logits, out[some, first:last])


def _score(heads: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """Logits `[rows, keys]` of queries `[rows, heads, 128]`, keys `[keys, 128]` and weights `[rows, heads]`.

    A group's dot product is exact in any order: it is a sum of at most 32 * 144 equal units. Group sums, products with
    weights and the halvings that sum over heads (padded with zeros to a power of two) are rounded one by one.
    """
    rows, count = weights.shape
    grouped = heads.transpose(0, 1).reshape(count * rows, 4, INDEX_GROUP).transpose(0, 1)
    dots = torch.bmm(grouped, keys.unflatten(-1, (4, INDEX_GROUP)).permute(1, 2, 0))
    dots = dots[0].add_(dots[1]).add_(dots[2]).add_(dots[3]).unflatten(0, (count, rows))
    terms = dots.relu_().mul_(weights.t().unsqueeze(-1))
    padded = 1 << (count - 1).bit_length()
    if padded > count:
        terms = torch.cat((terms, torch.zeros_like(terms[: padded - count])))
    while len(terms) > 1:  # a fixed tree, which matrix units' registers can follow on any device
        half = len(terms) // 2
        terms = terms[:half] + terms[half:]
    return terms[0] + 0.0  # no logit is -0


def key_values(payload: Tensor, scale: Tensor | None, pages: Tensor, layout: IndexKeyLayout, page_size: int) -> Tensor:
    """fp32 `[pages * page_size, 128]` of whole pages; one outside the cache reads zeros."""
    if payload.shape[0] == 0:
        return torch.zeros(pages.shape[0] * page_size, INDEX_DIM, dtype=F32, device=payload.device)
    payload_at, scale_at = (t.to(payload.device) for t in key_tables(layout, page_size))
    payload_pages, scale_pages = flat_pages(payload, scale, layout)
    inside = (pages >= 0) & (pages < payload.shape[0])
    pages = torch.where(inside, pages, 0).long()
    # a group's 16 payload bytes are adjacent in every layout
    pieces = payload_pages[:, : payload_at.numel()][pages].unflatten(1, (-1, GROUP_BYTES))
    codes = pieces.index_select(1, payload_at[:, ::GROUP_BYTES].flatten() // GROUP_BYTES)
    codes *= inside.view(-1, 1, 1)
    exponents = scale_pages[pages].index_select(1, scale_at.flatten())
    exponents *= inside.view(-1, 1)
    return _decode(codes, exponents).view(-1, INDEX_DIM)


def query_values(query: Tensor, scale: Tensor, heads: int, layout: str) -> Tensor:
    """fp32 `[T, heads, 128]` of packed queries."""
    if IndexQueryLayout.parse(layout) is IndexQueryLayout.PACKED:
        exponents = word_bytes(scale)
    else:
        exponents = scale.flatten(1)[:, query_scale_table(layout, heads).to(scale.device)]
    return _decode(query.view(torch.uint8).flatten(), exponents.flatten()).view(-1, heads, INDEX_DIM)


def _decode(payload: Tensor, exponents: Tensor) -> Tensor:
    """fp32 `[groups, 32]` of payload bytes, 16 a group, and exponent bytes, one a group."""
    every_byte = torch.arange(256, dtype=torch.uint8, device=payload.device)
    pairs = numerics.e2m1_decode(numerics.unpack_nibbles(every_byte.unsqueeze(-1)))
    values = torch.nn.functional.embedding(payload.int(), pairs).view(-1, INDEX_GROUP)
    return values.mul_(numerics.ue8m0_decode(exponents.reshape(-1, 1)))


def _rows_by_batch(batches: int, lengths: Tensor, row_to_batch: Tensor | None) -> tuple[list[int], list[Tensor]]:
    """Page-table rows in use and the logits rows of each; a row of another batch scores nothing."""
    rows = torch.arange(lengths.shape[0], device=lengths.device)
    batch = rows // max(1, lengths.shape[0] // max(1, batches)) if row_to_batch is None else row_to_batch
    used = [b for b in batch.unique().tolist() if 0 <= b < batches]
    return used, [rows[batch == b] for b in used]


# --- selection --------------------------------------------------------------------------------------------------------


def select_topk(
    logits: Tensor, lengths: Tensor, k: int, page_table: Tensor | None, row_to_batch: Tensor | None, page_size: int
) -> tuple[Tensor, Tensor]:
    """Positions of the k largest logits of each row's first `length`, ascending, and their slots."""
    positions = _pick(logits, _below(lengths, logits), k)
    return positions, _slots_of(positions, page_table, row_to_batch, page_size)


def select_blocks(logits: Tensor, lengths: Tensor, blocks: int, block_size: int) -> Tensor:
    """Ids of the kept blocks, ascending: the newest, and those with the largest maxima among the others."""
    visible = _below(lengths, logits)
    scores = torch.where(visible & ~torch.isnan(logits), logits, -torch.inf)
    block_size = min(block_size, max(1, logits.shape[1]))
    width = _ceil_div(logits.shape[1], block_size)
    scores = torch.nn.functional.pad(scores, (0, width * block_size - logits.shape[1]), value=-torch.inf)
    keys = scores.unflatten(1, (width, block_size)).amax(-1)
    newest = (_ceil_div(lengths.long().clamp(0, logits.shape[1]), block_size) - 1).unsqueeze(1)
    older = torch.arange(width, device=logits.device) < newest
    kept = torch.full((logits.shape[0], blocks), -1, dtype=torch.int32, device=logits.device)
    kept[:, : blocks - 1] = _pick(keys, older, blocks - 1)
    at = older.sum(1, keepdim=True).clamp(max=blocks - 1)  # the newest id is the largest
    return kept.scatter(1, at, newest.to(torch.int32))


def select_topk_in_blocks(
    logits: Tensor,
    lengths: Tensor,
    block_ids: Tensor,
    k: int,
    block_size: int,
    page_table: Tensor | None,
    row_to_batch: Tensor | None,
    page_size: int,
) -> tuple[Tensor, Tensor]:
    """`select_topk` over the positions of kept blocks."""
    block_size = min(block_size, max(1, logits.shape[1]))
    width = _ceil_div(logits.shape[1], block_size)
    kept = torch.zeros(logits.shape[0], width + 1, dtype=torch.bool, device=logits.device)
    known = (block_ids >= 0) & (block_ids < width)
    kept.scatter_(1, torch.where(known, block_ids, width).long(), True)  # the last column takes the rest
    inside = kept[:, :width].repeat_interleave(block_size, 1)[:, : logits.shape[1]]
    positions = _pick(logits, inside & _below(lengths, logits), k)
    return positions, _slots_of(positions, page_table, row_to_batch, page_size)


def _below(lengths: Tensor, logits: Tensor) -> Tensor:
    return torch.arange(logits.shape[1], device=logits.device) < lengths.unsqueeze(1)


def _pick(scores: Tensor, eligible: Tensor, k: int) -> Tensor:
    """Ascending indices int32 `[rows, k]` of each row's k best eligible scores, then -1.

    Among equal scores the lower index wins; NaN counts as -inf; a row with at most k eligible entries keeps them all.
    """
    rows, width = scores.shape
    picked = eligible
    if 0 < k < width:
        scores = torch.where(eligible & ~torch.isnan(scores), scores, -torch.inf)
        bound = scores.topk(k, dim=1).values[:, -1:]  # only its value is used: torch leaves ties open
        better = scores > bound
        ties = eligible & (scores == bound)
        room = k - better.sum(1, keepdim=True)
        best = better | (ties & (ties.cumsum(1) <= room))
        picked = torch.where(eligible.sum(1, keepdim=True) > k, best, eligible)
    out = torch.full((rows, k), -1, dtype=torch.int32, device=scores.device)
    if k:
        row, index = picked.nonzero(as_tuple=True)
        out[row, picked.cumsum(1)[row, index] - 1] = index.to(torch.int32)
    return out


def _slots_of(positions: Tensor, page_table: Tensor | None, row_to_batch: Tensor | None, page_size: int) -> Tensor:
    """page * page_size + offset of every position; -1 where there is no position, page or page-table row."""
    if page_table is None:
        return positions.clone()
    batches, width = page_table.shape
    rows = torch.arange(positions.shape[0], device=positions.device)
    batch = rows // max(1, positions.shape[0] // max(1, batches)) if row_to_batch is None else row_to_batch.long()
    column = positions.long() // page_size
    known = (positions >= 0) & (column < width) & ((batch >= 0) & (batch < batches)).unsqueeze(1)
    if page_table.numel() == 0:
        return torch.full_like(positions, -1)
    at = torch.where(known, batch.unsqueeze(1) * width + column, 0)
    page = page_table.reshape(-1)[at].long()
    slots = page * page_size + positions % page_size
    return torch.where(known & (page >= 0) & (slots <= MOST), slots, -1).to(torch.int32)
