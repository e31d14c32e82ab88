"""Stage `store` in Triton: write latent rows to their pages and read them back."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from latentkv.kernels import device as dev
from latentkv.kernels import quantizers
from latentkv.kernels.launch import (
    DEVICE_VARIANTS,
    TargetCase,
    common_options,
    layout_constants,
    narrow,
    on_device,
    page_words,
    pair_stride,
    words,
)
from latentkv.kernels.rows import angles, read_pairs, write_pairs
from latentkv.layout import LATENT_DIM, KVLayout

QUERY_TAILS = 8  # query heads a warp rotates


def store_kv(rows: Tensor, cache: Tensor, slots: Tensor, layout: str, page_size: int, freqs: Tensor | None) -> None:
    """Launch `store_rows_kernel` without a norm; with `freqs`, row t is rotated by its row t."""
    launch_store_rows(rows, cache, slots, KVLayout.parse(layout), page_size, freqs=freqs)


def norm_rope_store_kv(
    rows: Tensor,
    weight: Tensor,
    cache: Tensor,
    slots: Tensor,
    positions: Tensor,
    freqs: Tensor,
    eps: float,
    layout: str,
    page_size: int,
    query: Tensor | None,
) -> None:
    """Launch `store_rows_kernel` with norm and rotation; programs behind the rows' rotate the query."""
    kind = KVLayout.parse(layout)
    normed: dict[str, Any] = {"positions": positions, "weight": weight, "eps": eps, "query": query}
    launch_store_rows(rows, cache, slots, kind, page_size, freqs=freqs, **normed)


def launch_store_rows(
    rows: Tensor,
    cache: Tensor,
    slots: Tensor,
    layout: KVLayout,
    page_size: int,
    *,
    freqs: Tensor | None,
    positions: Tensor | None = None,
    weight: Tensor | None = None,
    eps: float = 0.0,
    query: Tensor | None = None,
    latents: Tensor | None = None,
) -> None:
    """Launch `store_rows_kernel`; `latents` takes the normed rows, which are then written as compressed ones."""
    count = rows.shape[0]
    if count == 0:
        return
    heads = query.shape[1] if query is not None else 0
    tile, warps = write_tile(count, weight is not None, latents is not None)
    row_programs, tails = triton.cdiv(count, tile), QUERY_TAILS * warps
    # arguments that the constexprs keep from being read point at something valid
    table = freqs if freqs is not None else rows
    places = positions if positions is not None else slots
    heads_of = query if query is not None else rows
    out = latents if latents is not None else rows
    row_words, page_in_words, freq_words = words(rows), page_words(cache), words(table)
    query_words, out_words = words(heads_of), words(out)
    kind = rows.dtype
    if weight is not None:  # what the norm rounds to
        kind = torch.bfloat16 if latents is not None or layout != KVLayout.V4 else torch.float32
    with on_device(rows):
        store_rows_kernel[(row_programs + triton.cdiv(count * heads, tails),)](
            rows,
            pair_stride(rows.stride(0), row_words),
            cache,
            cache.stride(0),
            cache.stride(0) // layout.pair_bytes if page_in_words else cache.stride(0),
            slots,
            slots.stride(0),
            cache.shape[0] * page_size,
            weight if weight is not None else rows,
            eps,
            table,
            pair_stride(table.stride(0), freq_words),
            table.shape[0],
            places,
            places.stride(0),
            heads_of,
            pair_stride(heads_of.stride(0), query_words),
            pair_stride(heads_of.stride(1), query_words),
            out,
            pair_stride(out.stride(0), out_words),
            count,
            heads,
            row_programs,
            **layout_constants(layout, page_size),
            NORM=weight is not None,
            ROTATE=freqs is not None,
            BY_POSITION=positions is not None,
            QUERY=query is not None,
            LATENT=latents is not None,
            ROW_WORDS=row_words,
            PAGE_WORDS=page_in_words,
            WEIGHT_WORDS=weight is not None and words(weight),
            FREQ_WORDS=freq_words,
            QUERY_WORDS=query_words,
            OUT_WORDS=out_words,
            NARROW=narrow(kind),
            ROWS=tile,
            QUERY_TAILS=tails,
            num_warps=warps,
            **common_options(rows.device),
        )


def write_tile(count: int, normed: bool, latent: bool) -> tuple[int, int]:
    """Rows a program writes and its warps; fastest of 9 shapes on one H200 (2026-12-01), bits do not depend on it."""
    if count <= 1024:
        return 1, 1
    if count <= 4096:
        return 2, 2
    if latent:
        return 8, 2  # 128 registers a lane
    return (16, 4) if normed else (4, 2)


def _read_tile(count: int, layout: KVLayout) -> tuple[int, int]:
    """Rows a program reads and its warps; as in `write_tile`."""
    if count <= 1024:
        return 1, 4
    if count <= 4096:
        return 2, 1
    return (4, 2) if layout.element.bits == 4 else (4, 1)


def load_kv(cache: Tensor, slots: Tensor, layout: str, page_size: int, out: Tensor) -> None:
    """Launch `load_rows_kernel` over slots."""
    _load_rows(cache, slots, KVLayout.parse(layout), page_size, out)


def load_kv_pages(cache: Tensor, layout: str, page_size: int) -> Tensor:
    """Launch `load_rows_kernel` over every slot in order."""
    out = torch.empty(cache.shape[0] * page_size, LATENT_DIM, dtype=torch.bfloat16, device=cache.device)
    _load_rows(cache, None, KVLayout.parse(layout), page_size, out)
    return out.unflatten(0, (-1, page_size))


def _load_rows(cache: Tensor, slots: Tensor | None, layout: KVLayout, page_size: int, out: Tensor) -> None:
    count = out.shape[0]
    if count == 0:
        return
    tile, warps = _read_tile(count, layout)
    out_words, page_in_words = words(out), page_words(cache)
    with on_device(cache):
        load_rows_kernel[(triton.cdiv(count, tile),)](
            cache,
            cache.stride(0),
            cache.stride(0) // layout.pair_bytes if page_in_words else cache.stride(0),
            slots if slots is not None else out,
            slots.stride(0) if slots is not None else 1,
            cache.shape[0] * page_size,
            out,
            pair_stride(out.stride(0), out_words),
            count,
            **layout_constants(layout, page_size),
            BY_SLOT=slots is not None,
            OUT_WORDS=out_words,
            PAGE_WORDS=page_in_words,
            ROWS=tile,
            num_warps=warps,
            **common_options(cache.device),
        )


def rope_fake_quant(x: Tensor, freqs: Tensor, kind: str, positions: Tensor | None, inverse: bool) -> Tensor:
    """Launch `rope_fake_quant_kernel` over the rows of `x`, flattened."""
    source = x.reshape(-1, x.shape[-1])
    if source.stride(-1) != 1:
        source = source.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    count, width = source.shape
    if count == 0:
        return out
    tokens = freqs.shape[0] if positions is None else positions.shape[0]
    pairs = triton.next_power_of_2(width) // 2
    tile = max(1, 512 // pairs)
    places = positions if positions is not None else freqs
    in_words, freq_words = words(source), words(freqs)
    with on_device(x):
        rope_fake_quant_kernel[(triton.cdiv(count, tile),)](
            source,
            pair_stride(source.stride(0), in_words),
            out,
            freqs,
            pair_stride(freqs.stride(0), freq_words),
            freqs.shape[0],
            places,
            places.stride(0),
            count,
            count // tokens,
            WIDTH=width,
            ROTATED=freqs.shape[1],
            LATENT=kind == "latent",
            INVERSE=inverse,
            BY_POSITION=positions is not None,
            IN_WORDS=in_words,
            FREQ_WORDS=freq_words,
            NARROW=narrow(x.dtype),
            ROWS=tile,
            PAIRS=pairs,
            num_warps=max(1, min(8, tile * pairs // 256)),
            **common_options(x.device),
        )
    return out


# --- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["capacity", "max_positions", "count", "heads", "row_programs", "eps"])
def store_rows_kernel(
    rows,
    rows_stride,
    cache,
    page_stride,
    data_stride,
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
    query,
    query_stride,
    head_stride,
    out,
    out_stride,
    count,
    heads,
    row_programs,
    ENCODING: tl.constexpr,
    PAGE_SHIFT: tl.constexpr,
    DATA_STEP: tl.constexpr,
    SCALE_BASE: tl.constexpr,
    SCALE_STEP: tl.constexpr,
    NORM: tl.constexpr,
    ROTATE: tl.constexpr,
    BY_POSITION: tl.constexpr,
    QUERY: tl.constexpr,
    LATENT: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    PAGE_WORDS: tl.constexpr,
    WEIGHT_WORDS: tl.constexpr,
    FREQ_WORDS: tl.constexpr,
    QUERY_WORDS: tl.constexpr,
    OUT_WORDS: tl.constexpr,
    NARROW: tl.constexpr,
    ROWS: tl.constexpr,
    QUERY_TAILS: tl.constexpr,
    CAST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Norm, rotate, quantize and write ROWS rows; programs from `row_programs` on rotate query tails in place.

    With LATENT the normed rows are also returned in `out`, slot 0 is padding, and fp8 pages hold fp4 numerics.
    """
    dev.begin(OVERLAP)
    if QUERY:
        if tl.program_id(0) >= row_programs:
            item = (tl.program_id(0) - row_programs).to(tl.int64) * QUERY_TAILS + tl.arange(0, QUERY_TAILS)
            rotate_tails(
                query, query_stride, head_stride, item, item < count.to(tl.int64) * heads, heads, freqs, freqs_stride,
                max_positions, positions, positions_stride, FREQ_WORDS, QUERY_WORDS, CAST,
            )  # fmt: skip
            return
    dtype: tl.constexpr = rows.dtype.element_ty
    # where a row's own bits are not kept, a stored bf16 NaN has the same bits on every device
    KEPT: tl.constexpr = dtype == tl.bfloat16 and not NORM and not ROTATE
    SETTLE_NAN: tl.constexpr = not KEPT and (ENCODING == "bf16" or ENCODING == "v4")
    ROUND: tl.constexpr = LATENT or ENCODING != "v4"
    FIRST_SLOT: tl.constexpr = 1 if LATENT else 0
    at = dev.pair_pointer(rows, ROW_WORDS)
    weights = dev.pair_pointer(weight, WEIGHT_WORDS)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < count
    # half rows, the first halves of all rows before the second ones, so that one warp holds a whole row
    piece = tl.arange(0, 2 * ROWS)
    piece_row = tl.program_id(0).to(tl.int64) * ROWS + piece % ROWS
    piece_live = piece_row < count
    first = piece // ROWS * 128
    pair = first[:, None] + tl.arange(0, 128)[None, :]
    re, im = dev.load_pairs(at, (piece_row * rows_stride)[:, None], pair, piece_live[:, None], dtype, ROW_WORDS)
    slot = tl.load(slots + piece_row * slots_stride, mask=piece_live, other=-1).to(tl.int64)
    if ROTATE:
        # the last 64 values once more, alone: rotating whole rows would cost more than reading these again
        last = 224 + tl.arange(0, 32)[None, :]
        tail_re, tail_im = dev.load_pairs(at, (row * rows_stride)[:, None], last, live[:, None], dtype, ROW_WORDS)
        tail_slot = tl.load(slots + row * slots_stride, mask=live, other=-1).to(tl.int64)
        cos, sin = angles(
            freqs, freqs_stride, max_positions, positions, positions_stride, row, live, BY_POSITION, FREQ_WORDS
        )
    if NORM:
        kind: tl.constexpr = weight.dtype.element_ty
        weight_re, weight_im = dev.load_pairs(weights, 0, pair, pair >= 0, kind, WEIGHT_WORDS)
        total = tl.sum(tl.reshape(tl.sum(re * re + im * im, axis=1), [2, ROWS]), axis=0)
        scale = dev.rsqrt_rn(total * (1.0 / 512) + eps)
        both = tl.reshape(tl.broadcast_to(scale[None, :], [2, ROWS]), [2 * ROWS])[:, None]
        re, im = re * both * weight_re, im * both * weight_im
        if LATENT:
            word = dev.join_bf16(re, im, CAST)
            to, step = dev.pair_pointer(out, OUT_WORDS), (piece_row * out_stride)[:, None]
            dev.store_bf16_words(to, step, pair, word, piece_live[:, None], OUT_WORDS)
            re, im = dev.split_bf16(word)
        elif ENCODING != "v4":
            re, im = dev.round_pairs(re, im, tl.bfloat16, CAST)
    if SETTLE_NAN:
        re, im = dev.settle_nan(re), dev.settle_nan(im)
    write_pairs(
        re, im, first, 224 if ROTATE else 256, cache, page_stride, data_stride, slot,
        (slot >= FIRST_SLOT) & (slot < capacity), ENCODING, PAGE_SHIFT, DATA_STEP, SCALE_BASE, SCALE_STEP, PAGE_WORDS,
        LATENT, NARROW, CAST,
    )  # fmt: skip
    if ROTATE:
        re, im = tail_re, tail_im
        if NORM:
            weight_re, weight_im = dev.load_pairs(weights, 0, last, last >= 0, kind, WEIGHT_WORDS)
            re, im = re * scale[:, None] * weight_re, im * scale[:, None] * weight_im
            if ROUND:
                re, im = dev.round_pairs(re, im, tl.bfloat16, CAST)
        re, im = dev.rotate(re, im, cos, sin)
        if not NORM:
            re, im = dev.round_pairs(re, im, dtype, CAST)
        elif ROUND:
            re, im = dev.round_pairs(re, im, tl.bfloat16, CAST)
        if SETTLE_NAN:
            re, im = dev.settle_nan(re), dev.settle_nan(im)
        write_pairs(
            re, im, tl.full([ROWS], 224, tl.int32), 256, cache, page_stride, data_stride, tail_slot,
            (tail_slot >= FIRST_SLOT) & (tail_slot < capacity), ENCODING, PAGE_SHIFT, DATA_STEP, SCALE_BASE, SCALE_STEP,
            PAGE_WORDS, LATENT, NARROW, CAST,
        )  # fmt: skip


@triton.jit
def rotate_tails(
    query, query_stride, head_stride, item, live, heads, freqs, freqs_stride, max_positions, positions,
    positions_stride, FREQ_WORDS: tl.constexpr, QUERY_WORDS: tl.constexpr, CAST: tl.constexpr,
):  # fmt: skip
    """Rotate the last 64 values of bf16 query heads in place; `item` counts heads of all rows."""
    row = item // heads
    cos, sin = angles(freqs, freqs_stride, max_positions, positions, positions_stride, row, live, True, FREQ_WORDS)
    at = dev.pair_pointer(query, QUERY_WORDS)
    step = (row * query_stride + (item % heads) * head_stride)[:, None]
    pair = 224 + tl.arange(0, 32)[None, :]
    re, im = dev.load_pairs(at, step, pair, live[:, None], tl.bfloat16, QUERY_WORDS)
    re, im = dev.rotate(re, im, cos, sin)
    dev.store_pairs(at, step, pair, re, im, live[:, None], tl.bfloat16, QUERY_WORDS, CAST)


@triton.jit(do_not_specialize=["capacity", "count"])
def load_rows_kernel(
    cache,
    page_stride,
    data_stride,
    slots,
    slots_stride,
    capacity,
    out,
    out_stride,
    count,
    ENCODING: tl.constexpr,
    PAGE_SHIFT: tl.constexpr,
    DATA_STEP: tl.constexpr,
    SCALE_BASE: tl.constexpr,
    SCALE_STEP: tl.constexpr,
    BY_SLOT: tl.constexpr,
    OUT_WORDS: tl.constexpr,
    PAGE_WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    CAST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Read ROWS rows as bf16; a slot outside the cache reads zeros."""
    dev.begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < count
    if BY_SLOT:
        slot = tl.load(slots + row * slots_stride, mask=live, other=-1).to(tl.int64)
    else:
        slot = row
    re, im = read_pairs(
        cache, page_stride, data_stride, slot, live & (slot >= 0) & (slot < capacity), ENCODING, PAGE_SHIFT, DATA_STEP,
        SCALE_BASE, SCALE_STEP, PAGE_WORDS, ROWS,
    )  # fmt: skip
    at = dev.pair_pointer(out, OUT_WORDS)
    dev.store_pairs(
        at, (row * out_stride)[:, None], tl.arange(0, 256)[None, :], re, im, live[:, None], tl.bfloat16, OUT_WORDS, CAST
    )


@triton.jit(do_not_specialize=["max_positions", "count", "per_token"])
def rope_fake_quant_kernel(
    x,
    x_stride,
    out,
    freqs,
    freqs_stride,
    max_positions,
    positions,
    positions_stride,
    count,
    per_token,
    WIDTH: tl.constexpr,
    ROTATED: tl.constexpr,
    LATENT: tl.constexpr,
    INVERSE: tl.constexpr,
    BY_POSITION: tl.constexpr,
    IN_WORDS: tl.constexpr,
    FREQ_WORDS: tl.constexpr,
    NARROW: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    CAST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Rotate the last ROTATED values of ROWS rows of WIDTH values, then quantize and dequantize them."""
    dev.begin(OVERLAP)
    dtype: tl.constexpr = x.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < count
    pair = tl.arange(0, PAIRS)[None, :]
    mask = live[:, None] & (pair < WIDTH // 2)
    re, im = dev.load_pairs(dev.pair_pointer(x, IN_WORDS), (row * x_stride)[:, None], pair, mask, dtype, IN_WORDS)
    if BY_POSITION:
        at = tl.load(positions + (row // per_token) * positions_stride, mask=live, other=0).to(tl.int64)
        at = tl.where((at >= 0) & (at < max_positions), at, 0)
    else:
        at = row // per_token
    FIRST: tl.constexpr = (WIDTH - ROTATED) // 2
    turned = mask & (pair >= FIRST)
    table = dev.pair_pointer(freqs, FREQ_WORDS)
    cos, sin = dev.load_pairs(table, (at * freqs_stride)[:, None], pair - FIRST, turned, tl.float32, FREQ_WORDS)
    if INVERSE:
        sin = dev.negated(sin)
    turned_re, turned_im = dev.rotate(re, im, cos, sin)
    turned_re, turned_im = dev.round_pairs(turned_re, turned_im, tl.bfloat16, CAST)
    re, im = tl.where(turned, turned_re, re), tl.where(turned, turned_im, im)
    SIZE: tl.constexpr = 8 if LATENT else 16
    re, im = tl.reshape(re, [ROWS, PAIRS // SIZE, SIZE]), tl.reshape(im, [ROWS, PAIRS // SIZE, SIZE])
    if LATENT:
        re, im = quantizers.fake_quant_latent(re, im, NARROW)
    else:
        re, im = quantizers.fake_quant_index(re, im, NARROW)
    re, im = tl.reshape(re, [ROWS, PAIRS]), tl.reshape(im, [ROWS, PAIRS])
    dev.store_pairs(dev.pair_pointer(out, True), (row * (WIDTH // 2))[:, None], pair, re, im, mask, dtype, True, CAST)


# --- what is compiled offline -----------------------------------------------------------------------------------------

_ALIGNED = ("rows", "rows_stride", "cache", "page_stride", "data_stride", "slots", "weight", "freqs", "freqs_stride",
            "positions", "query", "query_stride", "head_stride", "out", "out_stride", "x", "x_stride")  # fmt: skip
ALL_WORDS = dict.fromkeys(("ROW_WORDS", "PAGE_WORDS", "OUT_WORDS", "WEIGHT_WORDS", "FREQ_WORDS", "QUERY_WORDS"), True)
_POINTERS = {"cache": "*u8", "slots": "*i64", "weight": "*bf16", "freqs": "*fp32", "positions": "*i64",
             "query": "*bf16", "out": "*bf16", "rows": "*bf16", "x": "*bf16"}  # fmt: skip


def case_of(
    kernel: Any,
    label: str,
    variant: dict[str, Any],
    warps: int,
    types: dict[str, str] | None = None,
    strides: tuple[str, ...] = (),
    **constexprs: Any,
) -> TargetCase:
    """A case of a kernel, its arguments typed by their names or by `types`; constexprs that it lacks are dropped."""
    constexprs = {k: v for k, v in {**constexprs, **variant["constexprs"]}.items() if k in kernel.arg_names}
    types = {**_POINTERS, "eps": "fp32", **(types or {})}
    signature = {name: types.get(name, "i32") for name in kernel.arg_names if name not in constexprs}
    aligned = tuple(n for n, kind in signature.items() if n in _ALIGNED or n in strides or kind.startswith("*"))
    return TargetCase(kernel, label, signature, constexprs, warps, aligned, targets=variant["targets"])


def _cases() -> list[TargetCase]:
    cases = []
    for layout in (KVLayout.V4, KVLayout.V41, KVLayout.V41_FP4, KVLayout.V41_MXFP4, KVLayout.BF16):
        where = layout_constants(layout, 256)
        for variant in DEVICE_VARIANTS:
            for name, normed in (("store", False), ("norm_rope_store", True)):
                for count in (1, 65536) if layout.element.bits == 4 else (65536,):
                    tile, warps = write_tile(count, normed, False)
                    flags = {"NORM": normed, "ROTATE": normed, "BY_POSITION": normed, "QUERY": normed, "LATENT": False,
                             "NARROW": 0 if normed and layout == KVLayout.V4 else 8}  # fmt: skip
                    numbers = {"ROWS": tile, "QUERY_TAILS": QUERY_TAILS * warps, **flags, **ALL_WORDS, **where}
                    cases.append(case_of(store_rows_kernel, f"{name} {layout} x{tile}", variant, warps, **numbers))
            tile, warps = _read_tile(65536, layout)
            numbers = {"BY_SLOT": True, "ROWS": tile, **ALL_WORDS, **where}
            cases.append(case_of(load_rows_kernel, f"load {layout} x{tile}", variant, warps, **numbers))
    for latent in (False, True):
        for variant in DEVICE_VARIANTS:
            numbers = {"WIDTH": 128, "ROTATED": 64, "LATENT": latent, "INVERSE": False, "BY_POSITION": True,
                       "IN_WORDS": True, "NARROW": 8, "ROWS": 8, "PAIRS": 64, **ALL_WORDS}  # fmt: skip
            cases.append(case_of(rope_fake_quant_kernel, "latent" if latent else "index", variant, 2, **numbers))
    return cases


TARGET_CASES = _cases()
