"""Stage `index` in Triton: FP4 index keys to their pages and back, packed queries, head weights."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from latentkv.kernels import device as dev
from latentkv.kernels import quantizers
from latentkv.kernels.launch import DEVICE_VARIANTS, TargetCase, common_options, narrow, on_device, pair_stride, words
from latentkv.kernels.store import ALL_WORDS, case_of
from latentkv.layout import INDEX_DIM, INDEX_GROUP, INDEX_PAYLOAD_BYTES, IndexKeyLayout, IndexQueryLayout

SPLITS_AT_ONCE = 16  # partial sums of a head weight that are on their way together
WEIGHTS_A_PROGRAM = 128
MAX_HEADS = 64  # of a token's FLYDSL scales


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
    """Launch `store_keys_kernel` with norm, rotation and both FP4 stages."""
    _store_keys(values, payload, scale, slots, layout, page_size, finish=(weight, positions, freqs, eps, ratio))


def store_index_key_plain(
    values: Tensor,
    payload: Tensor,
    scale: Tensor | None,
    slots: Tensor,
    round_half_even: bool,
    layout: str,
    page_size: int,
) -> None:
    """Launch `store_keys_kernel` with the pack stage alone."""
    _store_keys(values, payload, scale, slots, layout, page_size, half_even=round_half_even)


def _store_keys(
    values: Tensor,
    payload: Tensor,
    scale: Tensor | None,
    slots: Tensor,
    layout: str,
    page_size: int,
    *,
    finish: tuple[Tensor, Tensor, Tensor, float, int] | None = None,
    half_even: bool = True,
) -> None:
    count = values.shape[0]
    if count == 0:
        return
    # what the constexprs keep from being read points at something valid
    weight, positions, freqs, eps, ratio = finish or (values, slots, values, 0.0, 1)
    scales = scale if scale is not None else payload
    row_words, freq_words = words(values), words(freqs)
    tile, warps = key_tile(count, values.device)
    with on_device(values):
        store_keys_kernel[(triton.cdiv(count, tile),)](
            values,
            pair_stride(values.stride(0), row_words),
            payload,
            payload.stride(0),
            scales,
            scales.stride(0),
            slots,
            slots.stride(0),
            payload.shape[0] * page_size,
            weight,
            eps,
            freqs,
            pair_stride(freqs.stride(0), freq_words),
            freqs.shape[0],
            positions,
            positions.stride(0),
            ratio,
            count,
            **key_constants(IndexKeyLayout.parse(layout), page_size),
            FINISH=finish is not None,
            HALF_EVEN=half_even,
            NARROW=narrow(values.dtype),
            ROW_WORDS=row_words,
            WEIGHT_WORDS=words(weight),
            FREQ_WORDS=freq_words,
            ROWS=tile,
            num_warps=warps,
            **common_options(values.device),
        )


def key_constants(layout: IndexKeyLayout, page_size: int) -> dict[str, Any]:
    """The constexprs by which a kernel addresses keys of a layout.

    Bits 0, 2 and 3 of a row's offset in its page move the payload by ROW_1, ROW_4 and ROW_8 bytes, bits 0, 3 and 4 the
    scales by SCALE_1, SCALE_8 and SCALE_16, and a bit in between or above by twice what the one below it does. The next
    group is GROUP_STEP and SCALE_STEP further.
    """
    base = layout.scale_in_page(0, 0, page_size)
    return {
        "PAGE_SHIFT": page_size.bit_length() - 1,
        "ROW_1": layout.payload_in_page(1, 0, page_size),
        "ROW_4": layout.payload_in_page(4, 0, page_size),
        "ROW_8": layout.payload_in_page(8, 0, page_size),
        "GROUP_STEP": layout.payload_in_page(0, INDEX_GROUP, page_size),
        "SCALE_BASE": base,
        "SCALE_1": layout.scale_in_page(1, 0, page_size) - base,
        "SCALE_8": layout.scale_in_page(8, 0, page_size) - base,
        "SCALE_16": layout.scale_in_page(16, 0, page_size) - base,
        "SCALE_STEP": layout.scale_in_page(0, 1, page_size) - base,
    }


def key_tile(count: int, device: torch.device) -> tuple[int, int]:
    """Keys a program writes and its warps; fastest of 3 to 7 shapes on one H200 (2026-12-03); bits are the same."""
    if device.type == "cpu":  # interpreted, where a program costs a tenth of a second
        return triton.next_power_of_2(min(count, 1024)), 1
    if count <= 512:
        return 2, 1
    return (4, 1) if count <= 16384 else (8, 1)


def read_tile(count: int, device: torch.device) -> tuple[int, int]:
    """Keys a program reads and its warps; as in `key_tile`."""
    if device.type == "cpu":
        return triton.next_power_of_2(min(count, 1024)), 1
    return (4, 1) if count <= 1024 else (32, 4)


def load_index_key(
    payload: Tensor, scale: Tensor | None, slots: Tensor, layout: str, page_size: int
) -> tuple[Tensor, Tensor]:
    """Launch `load_keys_kernel`."""
    count = slots.shape[0]
    rows = torch.empty(count, INDEX_PAYLOAD_BYTES, dtype=torch.int8, device=payload.device)
    scale_words = torch.empty(count, dtype=torch.int32, device=payload.device)
    if count == 0:
        return rows, scale_words
    scales = scale if scale is not None else payload
    tile, warps = read_tile(count, payload.device)
    with on_device(payload):
        load_keys_kernel[(triton.cdiv(count, tile),)](
            payload,
            payload.stride(0),
            scales,
            scales.stride(0),
            slots,
            slots.stride(0),
            payload.shape[0] * page_size,
            rows.view(torch.uint8),
            scale_words,
            count,
            **key_constants(IndexKeyLayout.parse(layout), page_size),
            ROWS=tile,
            num_warps=warps,
            **common_options(payload.device),
        )
    return rows, scale_words


def dequantize_index(payload: Tensor, scale: Tensor) -> Tensor:
    """Launch `dequantize_kernel` over the rows, flattened."""
    out = torch.empty(*payload.shape[:-1], INDEX_DIM, dtype=torch.float32, device=payload.device)
    rows, scale_words = payload.reshape(-1, INDEX_PAYLOAD_BYTES), scale.reshape(-1)
    count = scale_words.shape[0]
    if count == 0:
        return out
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    tile, warps = read_tile(count, payload.device)
    with on_device(payload):
        dequantize_kernel[(triton.cdiv(count, tile),)](
            rows.view(torch.uint8),
            rows.stride(0),
            scale_words,
            scale_words.stride(0),
            out,
            count,
            ROWS=tile,
            num_warps=warps,
            **common_options(payload.device),
        )
    return out


def pack_index_query(query: Tensor, freqs: Tensor, positions: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """Launch `pack_queries_kernel` without weights."""
    payload, scale, _ = _pack_queries(query, freqs, positions, layout)
    return payload, scale


def pack_index_query_weights(
    query: Tensor,
    freqs: Tensor,
    positions: Tensor,
    partials: Tensor,
    weight_scale: float,
    layout: str,
    weights_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch `pack_queries_kernel`, whose first programs sum the head weights."""
    weights = torch.empty(query.shape[:2], dtype=weights_dtype, device=query.device)
    return _pack_queries(query, freqs, positions, layout, partials, weight_scale, weights)


def _pack_queries(
    query: Tensor,
    freqs: Tensor,
    positions: Tensor,
    layout: str,
    partials: Tensor | None = None,
    weight_scale: float = 0.0,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, heads = query.shape[:2]
    flydsl = IndexQueryLayout.parse(layout) is IndexQueryLayout.FLYDSL
    lead = (tokens, heads) if flydsl else (tokens * heads,)
    payload = torch.empty(*lead, INDEX_PAYLOAD_BYTES, dtype=torch.int8, device=query.device)
    if flydsl:
        scale = torch.empty(tokens, 1, 4, 16, 4, dtype=torch.uint8, device=query.device)
    else:
        scale = torch.empty(tokens * heads, dtype=torch.int32, device=query.device)
    of_weights = weights if weights is not None else payload
    if tokens == 0:
        return payload, scale, of_weights
    sums = partials if partials is not None else query
    tile, warps = query_tile(tokens, heads, query.device)
    row_words, freq_words = words(query), words(freqs)
    weight_programs = triton.cdiv(tokens * heads, WEIGHTS_A_PROGRAM) if partials is not None else 0
    with on_device(query):
        pack_queries_kernel[(weight_programs + tokens * triton.cdiv(heads, tile),)](
            query,
            pair_stride(query.stride(0), row_words),
            pair_stride(query.stride(1), row_words),
            payload.view(torch.uint8),
            scale.view(torch.uint8),
            freqs,
            pair_stride(freqs.stride(0), freq_words),
            freqs.shape[0],
            positions,
            positions.stride(0),
            sums,
            sums.stride(0),
            sums.stride(1),
            sums.shape[0],
            weight_scale,
            of_weights,
            tokens,
            weight_programs,
            HEADS=heads,
            FLYDSL=flydsl,
            WEIGHTS=WEIGHTS_A_PROGRAM if partials is not None else 0,
            SPLITS=min(SPLITS_AT_ONCE, sums.shape[0]) if partials is not None else 0,
            ROW_WORDS=row_words,
            FREQ_WORDS=freq_words,
            ROWS=tile,
            num_warps=warps,
            **common_options(query.device),
        )
    return payload, scale, of_weights


def query_tile(tokens: int, heads: int, device: torch.device) -> tuple[int, int]:
    """Heads of one token that a program packs and its warps; as in `key_tile`."""
    if device.type == "cpu":
        return triton.next_power_of_2(heads), 1
    if tokens * heads <= 4096 or heads < 16:
        return 4, 1
    return (16, 2) if heads % 32 else (32, 4)


# --- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["capacity", "eps", "max_positions", "ratio", "count"])
def store_keys_kernel(
    values,
    values_stride,
    payload,
    payload_stride,
    scale,
    scale_stride,
    slots,
    slots_stride,
    capacity,
    weight,
    eps,
    freqs,
    freqs_stride,
    max_positions,
    positions,
    positions_stride,
    ratio,
    count,
    PAGE_SHIFT: tl.constexpr,
    ROW_1: tl.constexpr,
    ROW_4: tl.constexpr,
    ROW_8: tl.constexpr,
    GROUP_STEP: tl.constexpr,
    SCALE_BASE: tl.constexpr,
    SCALE_1: tl.constexpr,
    SCALE_8: tl.constexpr,
    SCALE_16: tl.constexpr,
    SCALE_STEP: tl.constexpr,
    FINISH: tl.constexpr,
    HALF_EVEN: tl.constexpr,
    NARROW: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    WEIGHT_WORDS: tl.constexpr,
    FREQ_WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    CAST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Quantize and write ROWS keys; with FINISH norm and rotate them first, and skip slot 0.

    A row travels in halves: the one that is rotated and the one that is not.
    """
    dev.begin(OVERLAP)
    dtype: tl.constexpr = values.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < count
    mask = live[:, None]
    pair = tl.arange(0, 32)[None, :] + tl.zeros([ROWS, 1], tl.int32)
    if FINISH:
        place = tl.load(positions + row * positions_stride, mask=live, other=0).to(tl.int64) & (0 - ratio)
        place = tl.where((place >= 0) & (place < max_positions), place, 0)
    at, step = dev.pair_pointer(values, ROW_WORDS), (row * values_stride)[:, None]
    re, im = dev.load_pairs(at, step, pair, mask, dtype, ROW_WORDS)
    last_re, last_im = dev.load_pairs(at, step, pair + 32, mask, dtype, ROW_WORDS)
    slot = tl.load(slots + row * slots_stride, mask=live, other=-1).to(tl.int64)
    if FINISH:
        table, at_angle = dev.pair_pointer(freqs, FREQ_WORDS), (place * freqs_stride)[:, None]
        cos, sin = dev.load_pairs(table, at_angle, pair, mask, tl.float32, FREQ_WORDS)
        kind: tl.constexpr = weight.dtype.element_ty
        weights = dev.pair_pointer(weight, WEIGHT_WORDS)
        weight_re, weight_im = dev.load_pairs(weights, 0, pair, pair >= 0, kind, WEIGHT_WORDS)
        last_weight_re, last_weight_im = dev.load_pairs(weights, 0, pair + 32, pair >= 0, kind, WEIGHT_WORDS)
        squares = (re * re + im * im) + (last_re * last_re + last_im * last_im)
        factor = dev.rsqrt_rn(dev.sum_rows(squares) * (1.0 / 128) + eps)[:, None]
        re, im = dev.round_pairs(re * factor * weight_re, im * factor * weight_im, tl.bfloat16, CAST)
        last_re, last_im = last_re * factor * last_weight_re, last_im * factor * last_weight_im
        last_re, last_im = dev.round_pairs(last_re, last_im, tl.bfloat16, CAST)
        last_re, last_im = dev.rotate(last_re, last_im, cos, sin)
        last_re, last_im = dev.round_pairs(last_re, last_im, tl.bfloat16, CAST)
    byte, exponent = quantize_half(re, im, FINISH, HALF_EVEN, NARROW)
    last_byte, last_exponent = quantize_half(last_re, last_im, FINISH, HALF_EVEN, NARROW)
    FIRST_SLOT: tl.constexpr = 1 if FINISH else 0
    written = (slot >= FIRST_SLOT) & (slot < capacity)
    row_at, scale_at = key_addresses(
        tl.where(written, slot, 0), payload_stride, scale_stride, PAGE_SHIFT, ROW_1, ROW_4, ROW_8, SCALE_BASE, SCALE_1,
        SCALE_8, SCALE_16,
    )  # fmt: skip
    mask = written[:, None]
    to = payload + row_at[:, None] + ((pair // 16) * GROUP_STEP + pair % 16)
    tl.store(to, byte, mask=mask)
    tl.store(to + 2 * GROUP_STEP, last_byte, mask=mask)
    to = scale + scale_at[:, None] + tl.arange(0, 2)[None, :] * SCALE_STEP
    tl.store(to, exponent, mask=mask)
    tl.store(to + 2 * SCALE_STEP, last_exponent, mask=mask)


@triton.jit
def quantize_half(re, im, TWICE: tl.constexpr, HALF_EVEN: tl.constexpr, NARROW: tl.constexpr):
    """Bytes [rows, 32] and exponent bytes [rows, 2] of half rows [rows, 32 pairs]."""
    ROWS: tl.constexpr = re.shape[0]
    re, im = tl.reshape(re, [ROWS, 2, 16]), tl.reshape(im, [ROWS, 2, 16])
    if TWICE:
        byte, exponent = quantizers.quantize_index_twice(re, im)
    else:
        byte, exponent = quantizers.quantize_index(re, im, HALF_EVEN, NARROW)
    return tl.reshape(byte, [ROWS, 32]), exponent.to(tl.uint8)


@triton.jit
def key_addresses(
    slot, payload_stride, scale_stride, PAGE_SHIFT: tl.constexpr, ROW_1: tl.constexpr, ROW_4: tl.constexpr,
    ROW_8: tl.constexpr, SCALE_BASE: tl.constexpr, SCALE_1: tl.constexpr, SCALE_8: tl.constexpr,
    SCALE_16: tl.constexpr,
):  # fmt: skip
    """Bytes at which the payload and the scales of slots (int64) start; see `key_constants`."""
    page, offset = slot >> PAGE_SHIFT, slot & ((1 << PAGE_SHIFT) - 1)
    row_at = page * payload_stride + (offset & 3) * ROW_1 + ((offset >> 2) & 1) * ROW_4 + (offset >> 3) * ROW_8
    scale_at = page * scale_stride + SCALE_BASE + (offset & 7) * SCALE_1
    return row_at, scale_at + ((offset >> 3) & 1) * SCALE_8 + (offset >> 4) * SCALE_16


@triton.jit(do_not_specialize=["capacity", "count"])
def load_keys_kernel(
    payload,
    payload_stride,
    scale,
    scale_stride,
    slots,
    slots_stride,
    capacity,
    rows,
    scale_words,
    count,
    PAGE_SHIFT: tl.constexpr,
    ROW_1: tl.constexpr,
    ROW_4: tl.constexpr,
    ROW_8: tl.constexpr,
    GROUP_STEP: tl.constexpr,
    SCALE_BASE: tl.constexpr,
    SCALE_1: tl.constexpr,
    SCALE_8: tl.constexpr,
    SCALE_16: tl.constexpr,
    SCALE_STEP: tl.constexpr,
    ROWS: tl.constexpr,
    CAST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Gather ROWS keys; a slot outside the cache reads zeros."""
    dev.begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < count
    slot = tl.load(slots + row * slots_stride, mask=live, other=-1).to(tl.int64)
    inside = (slot >= 0) & (slot < capacity)
    row_at, scale_at = key_addresses(
        tl.where(inside, slot, 0), payload_stride, scale_stride, PAGE_SHIFT, ROW_1, ROW_4, ROW_8, SCALE_BASE, SCALE_1,
        SCALE_8, SCALE_16,
    )  # fmt: skip
    byte, group = tl.arange(0, 64)[None, :], tl.arange(0, 4)[None, :]
    source = payload + row_at[:, None] + ((byte // 16) * GROUP_STEP + byte % 16)
    found = tl.load(source, mask=inside[:, None], other=0)
    source = scale + scale_at[:, None] + group * SCALE_STEP
    exponent = tl.load(source, mask=inside[:, None], other=0).to(tl.int32)
    tl.store(rows + (row * 64)[:, None] + byte, found, mask=live[:, None])
    tl.store(scale_words + row, tl.sum(exponent << (8 * group), axis=1), mask=live)


@triton.jit(do_not_specialize=["count"])
def dequantize_kernel(
    payload,
    payload_stride,
    scale_words,
    scale_words_stride,
    out,
    count,
    ROWS: tl.constexpr,
    CAST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """fp32 values of ROWS packed rows."""
    dev.begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < count
    pair = tl.arange(0, 64)[None, :]
    byte = tl.load(payload + (row * payload_stride)[:, None] + pair, mask=live[:, None], other=0).to(tl.int32)
    word = tl.load(scale_words + row * scale_words_stride, mask=live, other=0)[:, None]
    scale = dev.ue8m0_decode((word >> (8 * (pair // 16))) & 0xFF)
    re, im = dev.e2m1_decode(byte & 0xF) * scale, dev.e2m1_decode(byte >> 4) * scale
    to = dev.pair_pointer(out, True)
    dev.store_pairs(to, (row * 64)[:, None], pair, re, im, live[:, None], tl.float32, True, CAST)


@triton.jit(do_not_specialize=["max_positions", "splits", "weight_scale", "count", "weight_programs"])
def pack_queries_kernel(
    query,
    query_stride,
    head_stride,
    payload,
    scale,
    freqs,
    freqs_stride,
    max_positions,
    positions,
    positions_stride,
    partials,
    partials_stride,
    token_stride,
    splits,
    weight_scale,
    weights,
    count,
    weight_programs,
    HEADS: tl.constexpr,
    FLYDSL: tl.constexpr,
    WEIGHTS: tl.constexpr,
    SPLITS: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    FREQ_WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    CAST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Rotate and pack ROWS heads of one token; the first `weight_programs` programs sum WEIGHTS head weights each."""
    dev.begin(OVERLAP)
    if WEIGHTS > 0:
        if tl.program_id(0) < weight_programs:
            sum_weights(
                partials, partials_stride, token_stride, splits, weight_scale, weights, count, HEADS, WEIGHTS, SPLITS
            )
            return
    BLOCKS: tl.constexpr = (HEADS + ROWS - 1) // ROWS
    item = tl.program_id(0) - weight_programs
    token = (item // BLOCKS).to(tl.int64)
    head = (item % BLOCKS) * ROWS + tl.arange(0, ROWS)
    live = head < HEADS
    mask = live[:, None]
    pair = tl.arange(0, 32)[None, :] + tl.zeros([ROWS, 1], tl.int32)
    place = tl.load(positions + token * positions_stride).to(tl.int64)
    place = tl.where((place >= 0) & (place < max_positions), place, 0)
    at, step = dev.pair_pointer(query, ROW_WORDS), (token * query_stride + head.to(tl.int64) * head_stride)[:, None]
    re, im = dev.load_pairs(at, step, pair, mask, tl.bfloat16, ROW_WORDS)
    last_re, last_im = dev.load_pairs(at, step, pair + 32, mask, tl.bfloat16, ROW_WORDS)
    table = dev.pair_pointer(freqs, FREQ_WORDS)
    cos, sin = dev.load_pairs(table, place * freqs_stride, pair, mask, tl.float32, FREQ_WORDS)
    last_re, last_im = dev.rotate(last_re, last_im, cos, sin)
    last_re, last_im = dev.round_pairs(last_re, last_im, tl.bfloat16, CAST)
    byte, exponent = quantize_half(re, im, True, True, 8)
    last_byte, last_exponent = quantize_half(last_re, last_im, True, True, 8)
    row = token * HEADS + head
    to = payload + (row * 64)[:, None] + pair
    tl.store(to, byte, mask=mask)
    tl.store(to + 32, last_byte, mask=mask)
    group = tl.arange(0, 2)[None, :]
    if FLYDSL:
        to = scale + token * 256 + group * 64 + ((head % 16) * 4 + head // 16)[:, None]
        tl.store(to, exponent, mask=mask)
        tl.store(to + 128, last_exponent, mask=mask)
        zero = tl.zeros_like(exponent)
        for absent in tl.static_range(HEADS, 64, HEADS):  # a head tile that the query lacks is zero
            void = mask & (head + absent < 64)[:, None]
            tl.store(to + absent // 16, zero, mask=void)
            tl.store(to + absent // 16 + 128, zero, mask=void)
    else:
        to = scale + (row * 4)[:, None] + group
        tl.store(to, exponent, mask=mask)
        tl.store(to + 2, last_exponent, mask=mask)


@triton.jit
def sum_weights(
    partials, partials_stride, token_stride, splits, weight_scale, weights, count, HEADS: tl.constexpr,
    WEIGHTS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Head weights: partial sums added in order, rounded to bf16, scaled, rounded again."""
    at = tl.program_id(0).to(tl.int64) * WEIGHTS + tl.arange(0, WEIGHTS)
    inside = at < count.to(tl.int64) * HEADS
    source = partials + (at // HEADS) * token_stride + at % HEADS
    total = dev.bits_float(tl.full([WEIGHTS], -2147483648, tl.int32))  # x + -0 is x
    nth = tl.zeros([WEIGHTS], tl.int32)
    for first in range(0, splits, SPLITS):
        for n in tl.static_range(SPLITS):
            given = inside & (nth + first + n < splits)
            total = tl.where(given, total + tl.load(source, mask=given, other=0.0), total)
            source += partials_stride
    value = dev.to_bf16(dev.to_fp32(dev.to_bf16(total)) * weight_scale)
    if weights.dtype.element_ty == tl.float32:
        tl.store(weights + at, dev.to_fp32(value), mask=inside)
    else:
        tl.store(weights + at, value, mask=inside)


# --- what is compiled offline -----------------------------------------------------------------------------------------

_TYPES = {"values": "*bf16", "payload": "*u8", "scale": "*u8", "scale_words": "*i32", "rows": "*u8", "out": "*fp32",
          "partials": "*fp32", "weights": "*bf16", "weight_scale": "fp32"}  # fmt: skip
_STRIDES = ("values_stride", "payload_stride", "scale_stride", "partials_stride", "token_stride")
_GPU = torch.device("cuda")  # a name: tiles are chosen for a GPU, none is asked


def _cases() -> list[TargetCase]:
    cases = []
    for variant in DEVICE_VARIANTS:

        def add(kernel: Any, label: str, tile: tuple[int, int], **numbers: Any) -> None:
            rows, warps = tile
            numbers = {**ALL_WORDS, "ROWS": rows, "HALF_EVEN": True, "NARROW": 8, **numbers}
            cases.append(case_of(kernel, f"{label} x{rows}", variant, warps, _TYPES, _STRIDES, **numbers))  # noqa: B023

        for layout, page_size in (("fused", 64), ("fused", 128), ("split64", 64), ("split8", 64)):
            where, name = key_constants(IndexKeyLayout(layout), page_size), f"{layout} {page_size}"
            for count in (1, 65536) if page_size == 64 else (65536,):
                add(store_keys_kernel, f"store {name}", key_tile(count, _GPU), FINISH=True, **where)
            add(load_keys_kernel, f"load {name}", read_tile(65536, _GPU), **where)
            for rule, numbers in (("even", {}), ("down", {"HALF_EVEN": False}), ("wide", {"NARROW": 0})):
                if page_size == 64 and layout != "split8":
                    numbers = {"FINISH": False, **numbers, **where}
                    add(store_keys_kernel, f"plain {rule} {name}", key_tile(65536, _GPU), **numbers)
        for count in (1, 65536):
            add(dequantize_kernel, "dequantize", read_tile(count, _GPU))
        for form in ("packed", "flydsl"):
            for heads, tokens in ((16, 1536), (32, 1), (32, 1536), (48, 1536), (64, 1536)):
                tile, label = query_tile(tokens, heads, _GPU), f"{form} {heads} heads {tokens} tokens"
                numbers = {"HEADS": heads, "FLYDSL": form == "flydsl", "WEIGHTS": WEIGHTS_A_PROGRAM, "SPLITS": 10}
                add(pack_queries_kernel, label, tile, **numbers)
    return cases


TARGET_CASES = _cases()
