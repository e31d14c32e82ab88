"""Stage `index` in plain PyTorch: FP4 index keys to their pages and back, packed queries, head weights."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from latentkv import numerics
from latentkv.layout import (
    INDEX_DIM,
    INDEX_GROUP,
    INDEX_PAYLOAD_BYTES,
    INDEX_SCALE_BYTES,
    ROPE_DIM,
    IndexKeyLayout,
    IndexQueryLayout,
)

F32 = torch.float32
BF16 = torch.bfloat16
PAGE_PAYLOAD_BYTES = 64 * INDEX_PAYLOAD_BYTES  # of a split page
PAGE_SCALE_BYTES = 64 * INDEX_SCALE_BYTES
FLYDSL_SCALE_SHAPE = (1, INDEX_SCALE_BYTES, 16, 4)  # of a token: group, head % 16, head // 16


def store_index_key(
    values: Tensor,
    weight: Tensor,
    payload: Tensor,
    scale: Tensor | None,
    slots: Tensor,
    positions: Tensor,
    freqs: Tensor,
    eps: float,
    ratio: int,
    layout: str,
    page_size: int,
) -> None:
    """Norm, rotate at the group's first position, quantize twice and write; slot 0 is a padded row's."""
    keys = numerics.round_bf16(numerics.rms_norm(values, weight, eps))
    keys = rotate_and_fake_quant(keys, numerics.freqs_at(freqs, positions & ~(ratio - 1)))
    rows, scales = numerics.quantize_index(keys)
    write_index_rows(rows, scales, payload, scale, slots, IndexKeyLayout.parse(layout), page_size, first_slot=1)


def store_index_key_plain(
    values: Tensor,
    payload: Tensor,
    scale: Tensor | None,
    slots: Tensor,
    round_half_even: bool,
    layout: str,
    page_size: int,
) -> None:
    """Quantize once and write, slot 0 included."""
    rows, scales = numerics.quantize_index(values.to(F32), round_half_even=round_half_even)
    write_index_rows(rows, scales, payload, scale, slots, IndexKeyLayout.parse(layout), page_size, first_slot=0)


def load_index_key(
    payload: Tensor, scale: Tensor | None, slots: Tensor, layout: str, page_size: int
) -> tuple[Tensor, Tensor]:
    """Gather payload int8 `[n, 64]` and scale words int32 `[n]`; a slot outside the cache reads zeros."""
    kind = IndexKeyLayout.parse(layout)
    slots = slots.long()  # a capacity may be past int32
    inside = (slots >= 0) & (slots < payload.shape[0] * page_size)
    rows = torch.zeros(slots.shape[0], INDEX_PAYLOAD_BYTES, dtype=torch.uint8, device=slots.device)
    scales = torch.zeros(slots.shape[0], INDEX_SCALE_BYTES, dtype=torch.uint8, device=slots.device)
    payload_pages, scale_pages = flat_pages(payload, scale, kind)
    page, payload_at, scale_at = _locate(slots[inside], kind, page_size)
    rows[inside] = payload_pages[page, payload_at]
    scales[inside] = scale_pages[page, scale_at]
    return rows.view(torch.int8), scales.view(torch.int32).squeeze(-1)


def pack_index_query(query: Tensor, freqs: Tensor, positions: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """Rotate every head of a token at its position, quantize twice and arrange the scales."""
    heads = rotate_and_fake_quant(query.to(F32), numerics.freqs_at(freqs, positions).unsqueeze(1))
    payload, words = numerics.quantize_index(heads)
    if IndexQueryLayout.parse(layout) is IndexQueryLayout.PACKED:
        return payload.flatten(0, 1), words.flatten()
    tokens, count = words.shape
    scale = torch.zeros(tokens, 256, dtype=torch.uint8, device=query.device)  # absent head tiles stay zero
    scale[:, query_scale_table(layout, count).to(query.device)] = word_bytes(words)
    return payload, scale.unflatten(1, FLYDSL_SCALE_SHAPE)


def pack_index_query_weights(
    query: Tensor,
    freqs: Tensor,
    positions: Tensor,
    partials: Tensor,
    weight_scale: float,
    layout: str,
    weights_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """`pack_index_query`, and head weights from partial sums added left to right."""
    total = partials[0]
    for partial in partials[1:]:
        total = total + partial
    factor = torch.full((), weight_scale, dtype=F32, device=query.device)
    weights = (numerics.round_bf16(total) * factor).to(BF16).to(weights_dtype)
    return (*pack_index_query(query, freqs, positions, layout), weights)


# --- shared with `select` ---------------------------------------------------------------------------------------------


def rotate_and_fake_quant(values: Tensor, angles: Tensor) -> Tensor:
    """fp32 rows `[..., 128]` with the last 64 values rotated and rounded to bf16, after the first FP4 stage."""
    head, tail = values[..., :-ROPE_DIM], values[..., -ROPE_DIM:]
    tail = numerics.round_bf16(numerics.rotate(tail, angles))
    return numerics.fake_quant_index(torch.cat((head, tail), -1))


def write_index_rows(
    rows: Tensor,
    scales: Tensor,
    payload: Tensor,
    scale: Tensor | None,
    slots: Tensor,
    layout: IndexKeyLayout,
    page_size: int,
    *,
    first_slot: int,
) -> None:
    """Write payload rows int8 `[n, 64]` and scale words int32 `[n]` to slots in `first_slot ..< capacity`."""
    slots = slots.long()  # a capacity may be past int32
    inside = (slots >= first_slot) & (slots < payload.shape[0] * page_size)
    payload_pages, scale_pages = flat_pages(payload, scale, layout)
    page, payload_at, scale_at = _locate(slots[inside], layout, page_size)
    payload_pages[page, payload_at] = rows[inside].view(torch.uint8)
    scale_pages[page, scale_at] = word_bytes(scales[inside])


def flat_pages(payload: Tensor, scale: Tensor | None, layout: IndexKeyLayout) -> tuple[Tensor, Tensor]:
    """The pages that hold payload bytes and those that hold scale bytes, `[pages, bytes]` each, as views."""
    if layout is IndexKeyLayout.FUSED:
        return payload, payload
    assert scale is not None
    pages = payload.shape[0]
    return payload.view(pages, PAGE_PAYLOAD_BYTES), scale.view(pages, PAGE_SCALE_BYTES)


def word_bytes(words: Tensor) -> Tensor:
    """Bytes `[..., 4]` of int32 words, the lowest first."""
    return words.contiguous().unsqueeze(-1).view(torch.uint8)


@cache
def key_tables(layout: IndexKeyLayout, page_size: int) -> tuple[Tensor, Tensor]:
    """In-page byte of every payload byte `[page_size, 64]` and of every scale `[page_size, 4]` of a page's rows."""
    offsets = range(page_size)
    payload = [[layout.payload_in_page(o, d, page_size) for d in range(0, INDEX_DIM, 2)] for o in offsets]
    scale = [[layout.scale_in_page(o, g, page_size) for g in range(INDEX_DIM // INDEX_GROUP)] for o in offsets]
    return torch.tensor(payload), torch.tensor(scale)


@cache
def query_scale_table(layout: str, heads: int) -> Tensor:
    """Byte of every head's four scales `[heads, 4]`, counted from the token's first scale byte."""
    kind = IndexQueryLayout.parse(layout)
    return torch.tensor([[kind.scale_in_token(h, g) for g in range(INDEX_SCALE_BYTES)] for h in range(heads)])


def _locate(slots: Tensor, layout: IndexKeyLayout, page_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pages `[n, 1]` of slots, and the in-page bytes of their payload `[n, 64]` and scales `[n, 4]`."""
    payload_table, scale_table = (t.to(slots.device) for t in key_tables(layout, page_size))
    offset = slots % page_size
    return (slots // page_size).unsqueeze(-1), payload_table[offset], scale_table[offset]
