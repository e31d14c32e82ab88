"""Stage `compress` in Triton: tokens, alone or pooled in pairs, become latents and are written to their pages."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from latentkv.kernels import device as dev
from latentkv.kernels.launch import (
    DEVICE_VARIANTS,
    TargetCase,
    common_options,
    layout_constants,
    on_device,
    page_words,
    pair_stride,
    words,
)
from latentkv.kernels.rows import write_pairs
from latentkv.kernels.store import ALL_WORDS, case_of, launch_store_rows, store_rows_kernel, write_tile
from latentkv.layout import LATENT_DIM, KVLayout


def compress1(
    rows: Tensor,
    weight: Tensor,
    cache: Tensor,
    slots: Tensor,
    positions: Tensor,
    freqs: Tensor,
    eps: float,
    layout: str,
    page_size: int,
    out: Tensor,
) -> None:
    """Launch `store_rows_kernel`, which returns the normed rows as it writes them."""
    launch_store_rows(
        rows, cache, slots, KVLayout.parse(layout), page_size,
        freqs=freqs, positions=positions, weight=weight, eps=eps, latents=out,
    )  # fmt: skip


def compress2(
    rows: Tensor,
    state: Tensor,
    weight: Tensor,
    cache: Tensor,
    raw_slots: Tensor,
    positions: Tensor,
    requests: Tensor,
    freqs: Tensor,
    eps: float,
    layout: str,
    page_size: int,
    ring: int,
    draft_len: int,
    out: Tensor,
) -> None:
    """Launch `pool_rows_kernel`, whose programs park or pool, in any order.

    A request's rows hold consecutive positions. One at an odd position q reads the state of q - 1 where no row of this
    call holds q - 1, and rows at even positions write theirs: at most draft_len apart and never equal, so that with
    ring > draft_len they are different state rows.
    """
    _pool_rows(
        rows, state, weight, cache, raw_slots, positions, requests, freqs, eps, layout, page_size, ring, out,
        draft_len=draft_len, prefill=False,
    )  # fmt: skip


def compress2_prefill(
    rows: Tensor,
    state: Tensor,
    weight: Tensor,
    cache: Tensor,
    raw_slots: Tensor,
    positions: Tensor,
    requests: Tensor,
    freqs: Tensor,
    first_row: Tensor,
    row_count: Tensor,
    eps: float,
    layout: str,
    page_size: int,
    ring: int,
    out: Tensor,
) -> None:
    """Launch `pool_rows_kernel`, then `park_rows_kernel`: a chunk may read and write the same state row."""
    _pool_rows(
        rows, state, weight, cache, raw_slots, positions, requests, freqs, eps, layout, page_size, ring, out,
        draft_len=1 << 30, prefill=True,
    )  # fmt: skip
    count, chunks = rows.shape[0], first_row.shape[0]
    if count == 0 or chunks == 0:
        return
    in_words = words(rows) and words(state)
    with on_device(rows):
        park_rows_kernel[(chunks * ring,)](
            rows,
            pair_stride(rows.stride(0), in_words),
            state,
            pair_stride(state.stride(0), in_words),
            state.shape[0] // ring,
            raw_slots,
            raw_slots.stride(0),
            2 * cache.shape[0] * page_size,
            positions,
            positions.stride(0),
            requests,
            requests.stride(0),
            first_row,
            first_row.stride(0),
            row_count,
            row_count.stride(0),
            count,
            RING=ring,
            ROW_WORDS=in_words,
            num_warps=1,
            **common_options(rows.device),
        )


def _pool_rows(
    rows: Tensor,
    state: Tensor,
    weight: Tensor,
    cache: Tensor,
    raw_slots: Tensor,
    positions: Tensor,
    requests: Tensor,
    freqs: Tensor,
    eps: float,
    layout: str,
    page_size: int,
    ring: int,
    out: Tensor,
    *,
    draft_len: int,
    prefill: bool,
) -> None:
    count, kind = rows.shape[0], KVLayout.parse(layout)
    if count == 0:
        return
    in_words = words(rows) and words(state)
    page_in_words, freq_words, out_words = page_words(cache), words(freqs), words(out)
    with on_device(rows):
        pool_rows_kernel[(count,)](
            rows,
            pair_stride(rows.stride(0), in_words),
            state,
            pair_stride(state.stride(0), in_words),
            state.shape[0] // ring,
            weight,
            eps,
            cache,
            cache.stride(0),
            cache.stride(0) // kind.pair_bytes if page_in_words else cache.stride(0),
            raw_slots,
            raw_slots.stride(0),
            2 * cache.shape[0] * page_size,
            positions,
            positions.stride(0),
            requests,
            requests.stride(0),
            freqs,
            pair_stride(freqs.stride(0), freq_words),
            freqs.shape[0],
            out,
            pair_stride(out.stride(0), out_words),
            draft_len,
            **layout_constants(kind, page_size),
            RING=ring,
            PREFILL=prefill,
            ROW_WORDS=in_words,
            PAGE_WORDS=page_in_words,
            WEIGHT_WORDS=words(weight),
            FREQ_WORDS=freq_words,
            OUT_WORDS=out_words,
            num_warps=_pool_warps(count),
            **common_options(rows.device),
        )


def _pool_warps(count: int) -> int:
    """Warps of a pooling program: few rows wait for the work of one, many for that of all. Bits are the same."""
    return 4 if count <= 2048 else 1


def pool_pairs(
    kv: Tensor,
    score: Tensor,
    positions: Tensor,
    raw_slots: Tensor,
    slots: Tensor,
    requests: Tensor,
    state_kv: Tensor,
    state_score: Tensor,
    pad_row: int,
    ring: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch `pool_pairs_kernel`. A padded row pools to zero whatever `pad_row` holds, so that row is not read."""
    count = kv.shape[0]
    pooled = torch.empty(count, LATENT_DIM, dtype=torch.float32, device=kv.device)
    groups, places = torch.empty_like(positions), torch.empty_like(slots)
    if count == 0:
        return pooled, groups, places
    in_words = all(words(x) for x in (kv, score, state_kv, state_score))
    with on_device(kv):
        pool_pairs_kernel[(count,)](
            kv,
            pair_stride(kv.stride(0), in_words),
            score,
            pair_stride(score.stride(0), in_words),
            state_kv,
            pair_stride(state_kv.stride(0), in_words),
            state_score,
            pair_stride(state_score.stride(0), in_words),
            state_kv.shape[0] // ring,
            positions,
            positions.stride(0),
            raw_slots,
            raw_slots.stride(0),
            slots,
            slots.stride(0),
            requests,
            requests.stride(0),
            pooled,
            groups,
            groups.stride(0),
            places,
            places.stride(0),
            RING=ring,
            ROW_WORDS=in_words,
            num_warps=_pool_warps(count),
            **common_options(kv.device),
        )
    return pooled, groups, places


# --- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["holders", "eps", "capacity", "max_positions"])
def pool_rows_kernel(
    rows,
    rows_stride,
    state,
    state_stride,
    holders,
    weight,
    eps,
    cache,
    page_stride,
    data_stride,
    raw_slots,
    raw_slots_stride,
    capacity,
    positions,
    positions_stride,
    requests,
    requests_stride,
    freqs,
    freqs_stride,
    max_positions,
    out,
    out_stride,
    draft_len,
    ENCODING: tl.constexpr,
    PAGE_SHIFT: tl.constexpr,
    DATA_STEP: tl.constexpr,
    SCALE_BASE: tl.constexpr,
    SCALE_STEP: tl.constexpr,
    RING: tl.constexpr,
    PREFILL: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    PAGE_WORDS: tl.constexpr,
    WEIGHT_WORDS: tl.constexpr,
    FREQ_WORDS: tl.constexpr,
    OUT_WORDS: tl.constexpr,
    CAST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One row: at an odd position pool it with its partner, norm, rotate, quantize and write; at an even one park it.

    PREFILL, one block of all rows, checks that the row before is the partner, and parks nothing.
    """
    dev.begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    # four pieces of 64 pairs, so that the norm sums alike however many warps share them
    first = tl.arange(0, 4) * 64
    pair = first[:, None] + tl.arange(0, 64)[None, :]
    at = dev.pair_pointer(rows, ROW_WORDS)
    held = dev.pair_pointer(state, ROW_WORDS)
    if not PREFILL:
        kv_re, kv_im, score_re, score_im = load_token(at + row * rows_stride, pair, ROW_WORDS)
    chained = tl.program_id(0) % draft_len != 0
    position = tl.load(positions + row * positions_stride).to(tl.int64)
    request = tl.load(requests + row * requests_stride).to(tl.int64)
    raw_slot = tl.load(raw_slots + row * raw_slots_stride).to(tl.int64)
    last_request = tl.load(requests + (row - 1) * requests_stride, mask=chained, other=-1).to(tl.int64)
    last_raw_slot = tl.load(raw_slots + (row - 1) * raw_slots_stride, mask=chained, other=0).to(tl.int64)
    chained = is_active(last_raw_slot, capacity, last_request, holders)
    if PREFILL:
        last = tl.load(positions + (row - 1) * positions_stride, mask=row > 0, other=0).to(tl.int64)
        chained = chained & (last_request == request) & (last == position - 1)
    odd = (position & 1) == 1
    active = is_active(raw_slot, capacity, request, holders)
    if PREFILL:
        if (active & odd) == 0:
            return
        kv_re, kv_im, score_re, score_im = load_token(at + row * rows_stride, pair, ROW_WORDS)
    if active & odd:
        parked = held + (request * RING + ((position - 1) & (RING - 1))) * state_stride
        partner = tl.where(chained, at + (row - 1) * rows_stride, parked)
        first_kv_re, first_kv_im, first_score_re, first_score_im = load_token(partner, pair, ROW_WORDS)
        kind: tl.constexpr = weight.dtype.element_ty
        weights = dev.pair_pointer(weight, WEIGHT_WORDS)
        weight_re, weight_im = dev.load_pairs(weights, 0, pair, pair >= 0, kind, WEIGHT_WORDS)
        place = tl.where((position > 0) & (position <= max_positions), position - 1, 0)
        table = dev.pair_pointer(freqs, FREQ_WORDS)
        rotated = pair >= 224
        cos, sin = dev.load_pairs(table, place * freqs_stride, pair - 224, rotated, tl.float32, FREQ_WORDS)
        slot = (raw_slot >> 1) + tl.zeros_like(first)

        re = pool(first_kv_re, kv_re, first_score_re, score_re)
        im = pool(first_kv_im, kv_im, first_score_im, score_im)
        re, im = dev.round_pairs(re, im, tl.bfloat16, CAST)
        scale = dev.rsqrt_rn(sum_pieces(re * re + im * im) * (1.0 / 512) + eps)
        word = dev.join_bf16(re * scale * weight_re, im * scale * weight_im, CAST)
        dev.store_bf16_words(dev.pair_pointer(out, OUT_WORDS), row * out_stride, pair, word, pair >= 0, OUT_WORDS)
        re, im = dev.split_bf16(word)
        turned_re, turned_im = dev.rotate(re, im, cos, sin)
        turned_re, turned_im = dev.round_pairs(turned_re, turned_im, tl.bfloat16, CAST)
        re, im = tl.where(rotated, turned_re, re), tl.where(rotated, turned_im, im)
        if ENCODING == "bf16":
            re, im = dev.settle_nan(re), dev.settle_nan(im)
        write_pairs(
            re, im, first, 256, cache, page_stride, data_stride, slot, first >= 0, ENCODING, PAGE_SHIFT,
            DATA_STEP, SCALE_BASE, SCALE_STEP, PAGE_WORDS, True, 8, CAST,
        )  # fmt: skip
    elif active:
        if not PREFILL:
            own = held + (request * RING + (position & (RING - 1))) * state_stride
            store_token(own, pair, kv_re, kv_im, score_re, score_im, ROW_WORDS)


@triton.jit(do_not_specialize=["holders", "capacity", "count"])
def park_rows_kernel(
    rows,
    rows_stride,
    state,
    state_stride,
    holders,
    raw_slots,
    raw_slots_stride,
    capacity,
    positions,
    positions_stride,
    requests,
    requests_stride,
    first_row,
    first_row_stride,
    row_count,
    row_count_stride,
    count,
    RING: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    CAST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Park one of the last RING rows of a chunk."""
    dev.begin(OVERLAP)
    chunk = (tl.program_id(0) // RING).to(tl.int64)
    start = tl.load(first_row + chunk * first_row_stride).to(tl.int64)
    length = tl.load(row_count + chunk * row_count_stride).to(tl.int64)
    row = start + tl.maximum(length, 0) - 1 - tl.program_id(0) % RING
    if (row >= start) & (row >= 0) & (row < count):
        request = tl.load(requests + row * requests_stride).to(tl.int64)
        position = tl.load(positions + row * positions_stride).to(tl.int64)
        raw_slot = tl.load(raw_slots + row * raw_slots_stride).to(tl.int64)
        pair = tl.arange(0, 256)
        at = dev.pair_pointer(rows, ROW_WORDS) + row * rows_stride
        kv_re, kv_im, score_re, score_im = load_token(at, pair, ROW_WORDS)
        if is_active(raw_slot, capacity, request, holders):
            own = dev.pair_pointer(state, ROW_WORDS) + (request * RING + (position & (RING - 1))) * state_stride
            store_token(own, pair, kv_re, kv_im, score_re, score_im, ROW_WORDS)


@triton.jit(do_not_specialize=["holders"])
def pool_pairs_kernel(
    kv,
    kv_stride,
    score,
    score_stride,
    state_kv,
    state_kv_stride,
    state_score,
    state_score_stride,
    holders,
    positions,
    positions_stride,
    raw_slots,
    raw_slots_stride,
    slots,
    slots_stride,
    requests,
    requests_stride,
    pooled,
    groups,
    groups_stride,
    places,
    places_stride,
    RING: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    CAST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Pool or park one row of one request, and round its position and slot to its group's."""
    dev.begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + row * positions_stride)
    slot = tl.load(slots + row * slots_stride)
    request = tl.load(requests + row * requests_stride).to(tl.int64)
    padded = (tl.load(raw_slots + row * raw_slots_stride) <= 0) | (request < 0) | (request >= holders)
    pair = tl.arange(0, 256)
    own_kv = dev.pair_pointer(kv, ROW_WORDS) + row * kv_stride
    own_score = dev.pair_pointer(score, ROW_WORDS) + row * score_stride
    kv_re, kv_im = dev.load_pairs(own_kv, 0, pair, pair >= 0, tl.float32, ROW_WORDS)
    score_re, score_im = dev.load_pairs(own_score, 0, pair, pair >= 0, tl.float32, ROW_WORDS)
    odd = (position & 1) == 1
    group = position - (position & 1)
    tl.store(groups + row * groups_stride, group)
    tl.store(places + row * places_stride, tl.maximum(slot, 0))
    # at an even position `group` is the row's own, at an odd one its partner's
    held = request * RING + (group.to(tl.int64) & (RING - 1))
    at_kv = dev.pair_pointer(state_kv, ROW_WORDS) + held * state_kv_stride
    at_score = dev.pair_pointer(state_score, ROW_WORDS) + held * state_score_stride
    re, im = tl.zeros_like(kv_re), tl.zeros_like(kv_im)
    if padded == 0:
        if odd:
            first_re, first_im = dev.load_pairs(at_kv, 0, pair, pair >= 0, tl.float32, ROW_WORDS)
            first_score_re, first_score_im = dev.load_pairs(at_score, 0, pair, pair >= 0, tl.float32, ROW_WORDS)
            re = pool(first_re, kv_re, first_score_re, score_re)
            im = pool(first_im, kv_im, first_score_im, score_im)
        else:
            dev.store_pairs(at_kv, 0, pair, kv_re, kv_im, pair >= 0, tl.float32, ROW_WORDS, CAST)
            dev.store_pairs(at_score, 0, pair, score_re, score_im, pair >= 0, tl.float32, ROW_WORDS, CAST)
    to = dev.pair_pointer(pooled, True)
    dev.store_pairs(to, row * 256, pair, re, im, pair >= 0, tl.float32, True, CAST)


# --- parts of them ----------------------------------------------------------------------------------------------------


@triton.jit
def is_active(raw_slot, capacity, request, holders):
    """Whether a row is no padding: a raw slot of the cache other than 0, and a request that has state."""
    return (raw_slot > 0) & (raw_slot < capacity) & (request >= 0) & (request < holders)


@triton.jit
def load_token(at, pair, WORDS: tl.constexpr):
    """kv and score pairs of a token's row at a pointer from `pair_pointer`."""
    kv_re, kv_im = dev.load_pairs(at, 0, pair, pair >= 0, tl.float32, WORDS)
    score_re, score_im = dev.load_pairs(at, 0, pair + 256, pair >= 0, tl.float32, WORDS)
    return kv_re, kv_im, score_re, score_im


@triton.jit
def store_token(at, pair, kv_re, kv_im, score_re, score_im, WORDS: tl.constexpr):
    """Inverse of `load_token`; the bits are those that were loaded."""
    dev.store_pairs(at, 0, pair, kv_re, kv_im, pair >= 0, tl.float32, WORDS, dev.PORTABLE)
    dev.store_pairs(at, 0, pair + 256, score_re, score_im, pair >= 0, tl.float32, WORDS, dev.PORTABLE)


@triton.jit
def pool(kv_a, kv_b, score_a, score_b):
    """Sum of two tokens weighed by the softmax of their scores, per channel; twin of reference.compress.pool."""
    e = dev.exp_nonpositive(-tl.abs(score_a - score_b))
    is_first = score_a >= score_b
    large, small = tl.where(is_first, kv_a, kv_b), tl.where(is_first, kv_b, kv_a)
    return tl.div_rn(large + small * e, 1.0 + e)


@triton.jit
def sum_pieces(x):
    """Sum of [4, 64] values: of each piece, then of pieces half a row apart, so that no order is left open."""
    half = tl.sum(tl.reshape(tl.sum(x, axis=1), [2, 2]), axis=0)
    return tl.sum(half, axis=0)


# --- what is compiled offline -----------------------------------------------------------------------------------------

_TYPES = {"rows": "*fp32", "state": "*fp32", "raw_slots": "*i64", "requests": "*i64", "first_row": "*i32",
          "row_count": "*i32", "kv": "*fp32", "score": "*fp32", "state_kv": "*fp32", "state_score": "*fp32",
          "pooled": "*fp32", "groups": "*i64", "places": "*i64"}  # fmt: skip
_STRIDES = ("state_stride", "kv_stride", "score_stride", "state_kv_stride", "state_score_stride")


def _cases() -> list[TargetCase]:
    cases = []
    normed = {"NORM": True, "ROTATE": True, "BY_POSITION": True, "QUERY": False, "LATENT": True, "NARROW": 8}
    for variant in DEVICE_VARIANTS:

        def add(kernel: Any, label: str, warps: int, types: dict[str, str], **numbers: Any) -> None:
            cases.append(case_of(kernel, label, variant, warps, types, _STRIDES, **ALL_WORDS, **numbers))  # noqa: B023

        for layout in (KVLayout.V4, KVLayout.V41, KVLayout.V41_FP4, KVLayout.V41_MXFP4, KVLayout.BF16):
            where = layout_constants(layout, 256)
            for count in (1, 65536):
                tile, warps = write_tile(count, True, True)
                numbers = {"ROWS": tile, "QUERY_TAILS": 8, **normed, **where}
                add(store_rows_kernel, f"compress1 {layout} x{tile}", warps, {}, **numbers)
            for label, count, numbers in (
                ("compress2 decode", 1, {"RING": 2, "PREFILL": False, "draft_len": 1}),
                ("compress2 verify", 2048, {"RING": 8, "PREFILL": False}),
                ("compress2_prefill", 65536, {"RING": 2, "PREFILL": True}),
            ):
                add(pool_rows_kernel, f"{label} {layout}", _pool_warps(count), _TYPES, **numbers, **where)
        add(park_rows_kernel, "park", 1, _TYPES, RING=2)
        add(pool_pairs_kernel, "pool_pairs", 4, _TYPES, RING=2)
    return cases


TARGET_CASES = _cases()
