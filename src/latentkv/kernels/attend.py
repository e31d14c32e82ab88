"""Stage `attend` in Triton: sparse attention over paged latent rows, and merging of partial results.

One program holds some heads of one query and walks over its rows in blocks: read, dequantize to bf16, two matrix
products, an online softmax. Rows, queries and results travel as pairs (see device.py): the products over even and odd
values add up, and the inverse rotation at the end turns registers that sit side by side.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from latentkv.kernels import attend_hopper
from latentkv.kernels import device as dev
from latentkv.kernels.launch import (
    DEVICE_VARIANTS,
    PORTABLE,
    TargetCase,
    common_options,
    is_hopper,
    is_rdna,
    layout_constants,
    on_device,
    page_words,
    pair_stride,
    words,
)
from latentkv.kernels.rows import read_pairs
from latentkv.kernels.store import case_of
from latentkv.layout import LATENT_DIM, KVLayout

BF16, F32 = torch.bfloat16, torch.float32
LOG2E = tl.constexpr(1.4426950408889634)
LOWEST_SCORE = tl.constexpr(-3.4028234663852886e38)
BEFORE_3_7 = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)
MERGED_ROWS = 4
SPILLED_CONSTANTS = 64  # of the Hopper kernel, read in its loops: 51 with Triton 3.9; 3.6 spills four, outside them
FEWEST_HOPPER_HEADS = 16  # a tile of 64 heads, three quarters empty, is still the faster one


def sparse_mla(
    query: Tensor,
    window: Tensor,
    window_slots: Tensor,
    window_lengths: Tensor | None,
    window_layout: str,
    window_page_size: int,
    extra: Tensor | None,
    extra_slots: Tensor | None,
    extra_lengths: Tensor | None,
    extra_layout: str,
    extra_page_size: int,
    scale: float,
    sink: Tensor | None,
    freqs: Tensor | None,
    positions: Tensor | None,
    empty_lse: float,
    splits: int = 1,
) -> tuple[Tensor, Tensor]:
    """Launch `sparse_mla_kernel` once, or into partial results that `merge_kernel` joins."""
    tokens, heads = query.shape[:2]
    out = torch.empty(tokens, heads, LATENT_DIM, dtype=BF16, device=query.device)
    lse = torch.empty(tokens, heads, dtype=F32, device=query.device)
    if tokens == 0:
        return out, lse
    partial = splits > 1
    outs = torch.empty(splits, tokens, heads, LATENT_DIM, dtype=F32, device=query.device) if partial else out
    lses = torch.empty(splits, tokens, heads, dtype=F32, device=query.device) if partial else lse
    in_words = words(query)
    ending = (None, None, None) if partial else (sink, freqs, positions)
    near = _Segment(window, window_slots, window_lengths, KVLayout.parse(window_layout), window_page_size)
    if extra is None or extra_slots is None:  # the same cache and none of its rows
        far = replace(near, slots=window_slots[:, :0], lengths=None)
    else:
        far = _Segment(extra, extra_slots, extra_lengths, KVLayout.parse(extra_layout), extra_page_size)
    last = (outs, lses, tokens, splits, float("-inf") if partial else empty_lse)
    flags = {"SINK": ending[0] is not None, "ROTATE": ending[1] is not None}
    with on_device(query):
        if is_hopper(query.device) and heads >= FEWEST_HOPPER_HEADS and near.fits_hopper() and far.fits_hopper():
            flags["EXTRA"] = far.slots.shape[1] > 0
            where = {**near.constants("WINDOW"), **far.constants("EXTRA")}
            attend_hopper.sparse_mla_hopper_kernel[(tokens * triton.cdiv(heads, attend_hopper.HEADS), splits)](
                query,
                query.stride(0),
                query.stride(1),
                heads,
                *near.arguments(8),
                *far.arguments(8),
                scale,
                *_ending(query, *ending, in_pairs=False),
                *last,
                **{k: v for k, v in where.items() if k in attend_hopper.sparse_mla_hopper_kernel.arg_names},
                **flags,
                num_warps=attend_hopper.WARPS,
                enable_fp_fusion=False,
                launch_pdl=True,
            )
        else:
            shape = tile(heads, near.layout, is_rdna(query.device))
            sparse_mla_kernel[(tokens * triton.cdiv(heads, shape["HEADS"]), splits)](
                query,
                pair_stride(query.stride(0), in_words),
                pair_stride(query.stride(1), in_words),
                heads,
                *near.arguments(near.layout.pair_bytes),
                *far.arguments(far.layout.pair_bytes),
                scale,
                *_ending(query, *ending),
                *last,
                **near.constants("WINDOW"),
                **far.constants("EXTRA"),
                **flags,
                QUERY_WORDS=in_words,
                FREQ_WORDS=freqs is None or words(freqs),
                **shape,
                num_stages=1,
                **common_options(query.device),
            )
    if partial:
        _merge(outs, lses, sink, freqs, positions, empty_lse, out, lse)
    return out, lse


def merge_partials(outs: Tensor, lses: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """Launch `merge_kernel`."""
    out = torch.empty(outs.shape[1:], dtype=BF16, device=outs.device)
    lse = torch.empty(lses.shape[1:], dtype=F32, device=outs.device)
    if lse.numel():
        _merge(outs, lses, sink, None, None, float("-inf"), out, lse)
    return out, lse


def _merge(
    outs: Tensor,
    lses: Tensor,
    sink: Tensor | None,
    freqs: Tensor | None,
    positions: Tensor | None,
    empty_lse: float,
    out: Tensor,
    lse: Tensor,
) -> None:
    splits, tokens, heads = lses.shape
    in_words = words(outs)
    options = common_options(outs.device)
    options |= merge_options(options["CAST"])
    with on_device(outs):
        merge_kernel[(triton.cdiv(tokens * heads, MERGED_ROWS),)](
            outs,
            *(pair_stride(outs.stride(i), in_words) for i in range(3)),
            lses,
            *(lses.stride(i) for i in range(3)),
            *_ending(outs, sink, freqs, positions),
            out,
            lse,
            splits,
            tokens * heads,
            heads,
            empty_lse,
            SINK=sink is not None,
            ROTATE=freqs is not None,
            OUT_WORDS=in_words,
            FREQ_WORDS=freqs is None or words(freqs),
            ROWS=MERGED_ROWS,
            num_warps=4,
            **options,
        )


def merge_options(cast: int) -> dict[str, int]:
    """NVIDIA: left alone, the assembler takes 56 registers and spills for it on sm_100."""
    return {} if cast == PORTABLE else {"maxnreg": 96}


def tile(heads: int, layout: KVLayout, rdna: bool) -> dict[str, Any]:
    """Heads and rows of a block, and warps: never chosen by the batch, so that bits do not depend on it.

    RDNA's matrix operands fill the registers: its shapes are those that do not spill, and load the query once a block;
    Triton 3.6 does not spill with fewer heads and a query that stays.
    """
    reload = rdna and not BEFORE_3_7
    if reload:
        block, warps = (16, 8) if layout == KVLayout.BF16 else (32, 16)
    elif rdna:
        block, warps = 16, 16
    else:
        block, warps = 16 if heads <= 16 else 32, 8
    return {"HEADS": block, "ROWS": 16, "RELOAD": reload, "num_warps": warps}


@dataclass(frozen=True)
class _Segment:
    cache: Tensor
    slots: Tensor
    lengths: Tensor | None
    layout: KVLayout
    page_size: int

    def fits_hopper(self) -> bool:
        """Whether `attend_hopper` decodes the layout, rows begin at multiples of 16, and a page is below 2^31 bytes."""
        aligned = self.cache.data_ptr() % 16 == 0 and self.cache.stride(0) % 16 == 0
        small = self.page_size * self.layout.row_bytes < 2**31
        return aligned and small and self.layout.split.name in attend_hopper.ENCODINGS

    def arguments(self, unit: int) -> tuple[Any, ...]:
        """In the kernel's order, `unit` bytes being what it reads at a time; without lengths, theirs are never read."""
        cache, slots = self.cache, self.slots
        data_stride = cache.stride(0) // unit if page_words(cache) else cache.stride(0)
        counts = slots if self.lengths is None else self.lengths
        widths = slots.shape[1], cache.shape[0] * self.page_size
        return cache, cache.stride(0), data_stride, slots, slots.stride(0), counts, counts.stride(0), *widths

    def constants(self, name: str) -> dict[str, Any]:
        """The segment's constexprs."""
        found = {"LENGTHS": self.lengths is not None, "PAGE_WORDS": page_words(self.cache)}
        found.update(layout_constants(self.layout, self.page_size))
        return {f"{name}_{key}": value for key, value in found.items()}


def _ending(
    x: Tensor, sink: Tensor | None, freqs: Tensor | None, positions: Tensor | None, in_pairs: bool = True
) -> tuple[Any, ...]:
    """Arguments of sink and rotation; absent ones are never read."""
    found = (x if sink is None else sink,)
    if freqs is None or positions is None:
        return (*found, x, 0, 0, x, 0)
    stride = pair_stride(freqs.stride(0), in_pairs and words(freqs))
    return (*found, freqs, stride, freqs.shape[0], positions, positions.stride(0))


# --- kernels ----------------------------------------------------------------------------------------------------------

_VARYING = ["heads", "window_width", "window_capacity", "extra_width", "extra_capacity", "max_positions", "tokens",
            "splits", "count"]  # fmt: skip


@triton.jit(do_not_specialize=_VARYING)
def sparse_mla_kernel(
    query,
    query_stride,
    head_stride,
    heads,
    window,
    window_page_stride,
    window_data_stride,
    window_slots,
    window_slots_stride,
    window_lengths,
    window_lengths_stride,
    window_width,
    window_capacity,
    extra,
    extra_page_stride,
    extra_data_stride,
    extra_slots,
    extra_slots_stride,
    extra_lengths,
    extra_lengths_stride,
    extra_width,
    extra_capacity,
    scale,
    sink,
    freqs,
    freqs_stride,
    max_positions,
    positions,
    positions_stride,
    out,
    lse,
    tokens,
    splits,
    empty_lse,
    WINDOW_ENCODING: tl.constexpr,
    WINDOW_PAGE_SHIFT: tl.constexpr,
    WINDOW_DATA_STEP: tl.constexpr,
    WINDOW_SCALE_BASE: tl.constexpr,
    WINDOW_SCALE_STEP: tl.constexpr,
    WINDOW_LENGTHS: tl.constexpr,
    WINDOW_PAGE_WORDS: tl.constexpr,
    EXTRA_ENCODING: tl.constexpr,
    EXTRA_PAGE_SHIFT: tl.constexpr,
    EXTRA_DATA_STEP: tl.constexpr,
    EXTRA_SCALE_BASE: tl.constexpr,
    EXTRA_SCALE_STEP: tl.constexpr,
    EXTRA_LENGTHS: tl.constexpr,
    EXTRA_PAGE_WORDS: tl.constexpr,
    SINK: tl.constexpr,
    ROTATE: tl.constexpr,
    QUERY_WORDS: tl.constexpr,
    FREQ_WORDS: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    RELOAD: tl.constexpr,
    CAST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Attend with HEADS heads of one query over one split of its rows, in blocks of ROWS rows."""
    dev.begin(OVERLAP)
    blocks = tl.cdiv(heads, HEADS)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    head = (tl.program_id(0) % blocks) * HEADS + tl.arange(0, HEADS)
    live = head < heads
    pair = tl.arange(0, 256)[None, :]
    step = (token * query_stride + head.to(tl.int64) * head_stride)[:, None]
    at = dev.pair_pointer(query, QUERY_WORDS)
    query_re, query_im = dev.load_pairs(at, step, pair, live[:, None], tl.bfloat16, QUERY_WORDS)
    query_re, query_im = operand(query_re), operand(query_im)
    first, last = split_of(window_width, extra_width, splits, ROWS)
    window_blocks = tl.cdiv(window_width, ROWS)

    top = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    re = tl.zeros([HEADS, 256], tl.float32)
    im = tl.zeros([HEADS, 256], tl.float32)
    count = count_of(window_lengths, window_lengths_stride, token, window_width, WINDOW_LENGTHS)
    for block in range(
        tl.minimum(first, window_blocks), tl.minimum(tl.minimum(last, window_blocks), tl.cdiv(count, ROWS))
    ):
        valid, row_re, row_im = rows_of(
            window, window_page_stride, window_data_stride, window_slots, window_slots_stride, window_capacity, token,
            block, count, WINDOW_ENCODING, WINDOW_PAGE_SHIFT, WINDOW_DATA_STEP, WINDOW_SCALE_BASE, WINDOW_SCALE_STEP,
            WINDOW_PAGE_WORDS, ROWS,
        )  # fmt: skip
        top, total, re, im = attend_rows(
            query_re, query_im, at, step, live, valid, row_re, row_im, scale, top, total, re, im, RELOAD, QUERY_WORDS
        )
    count = count_of(extra_lengths, extra_lengths_stride, token, extra_width, EXTRA_LENGTHS)
    for block in range(tl.maximum(first - window_blocks, 0), tl.minimum(last - window_blocks, tl.cdiv(count, ROWS))):
        valid, row_re, row_im = rows_of(
            extra, extra_page_stride, extra_data_stride, extra_slots, extra_slots_stride, extra_capacity, token,
            block, count, EXTRA_ENCODING, EXTRA_PAGE_SHIFT, EXTRA_DATA_STEP, EXTRA_SCALE_BASE, EXTRA_SCALE_STEP,
            EXTRA_PAGE_WORDS, ROWS,
        )  # fmt: skip
        top, total, re, im = attend_rows(
            query_re, query_im, at, step, live, valid, row_re, row_im, scale, top, total, re, im, RELOAD, QUERY_WORDS
        )

    inverse = (1.0 / tl.where(total == 0, 1.0, total))[:, None]
    item = token * heads + head
    log_sum = tl.where(total == 0, float("-inf"), top + tl.log(total))
    finish(
        re * inverse, im * inverse, log_sum, head, token + tl.zeros([HEADS], tl.int64), live, sink, freqs, freqs_stride,
        max_positions, positions, positions_stride, out, lse, tl.program_id(1).to(tl.int64) * tokens * heads + item,
        empty_lse, SINK, ROTATE, FREQ_WORDS, CAST,
    )  # fmt: skip


@triton.jit
def split_of(window_width, extra_width, splits, ROWS: tl.constexpr):
    """First block of this program's split, and the one past its last: window blocks first, then extra blocks."""
    blocks = tl.cdiv(window_width, ROWS) + tl.cdiv(extra_width, ROWS)
    each = tl.cdiv(blocks, splits)
    return tl.program_id(1) * each, (tl.program_id(1) + 1) * each


@triton.jit
def count_of(lengths, lengths_stride, token, width, LENGTHS: tl.constexpr):
    """How many slots of a token count."""
    if LENGTHS:
        length = tl.load(lengths + token * lengths_stride).to(tl.int64)
        return tl.minimum(tl.maximum(length, 0), width).to(tl.int32)
    else:
        return width


@triton.jit
def rows_of(
    cache,
    page_stride,
    data_stride,
    slots,
    slots_stride,
    capacity,
    token,
    block,
    count,
    ENCODING: tl.constexpr,
    PAGE_SHIFT: tl.constexpr,
    DATA_STEP: tl.constexpr,
    SCALE_BASE: tl.constexpr,
    SCALE_STEP: tl.constexpr,
    PAGE_WORDS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Which rows of a block are valid, and their pairs as operands [ROWS, 256]; the others are zero."""
    place = block * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slots + token * slots_stride + place, mask=place < count, other=-1).to(tl.int64)
    valid = (slot >= 0) & (slot < capacity)
    re, im = read_pairs(
        cache, page_stride, data_stride, slot, valid, ENCODING, PAGE_SHIFT, DATA_STEP, SCALE_BASE, SCALE_STEP,
        PAGE_WORDS, ROWS,
    )  # fmt: skip
    return valid, operand(re), operand(im)


@triton.jit
def query_part(at, step, live, SECOND: tl.constexpr, QUERY_WORDS: tl.constexpr):
    """The query's even or odd values once more, as an operand."""
    re, im = dev.load_pairs(at, step, tl.arange(0, 256)[None, :], live[:, None], tl.bfloat16, QUERY_WORDS)
    if SECOND:
        return operand(im)
    else:
        return operand(re)


@triton.jit
def operand(x):
    """fp32 values that bf16 holds exactly, as an operand of `product`."""
    if dev.INTERPRETED:
        return x
    else:
        return x.to(tl.bfloat16)


@triton.jit
def product(a, b, total):
    """total + a @ b of operands, in fp32."""
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def attend_rows(
    query_re,
    query_im,
    at,
    step,
    live,
    valid,
    row_re,
    row_im,
    scale,
    top,
    total,
    re,
    im,
    RELOAD: tl.constexpr,
    QUERY_WORDS: tl.constexpr,
):
    """One block's step of the online softmax; `re` and `im` are not yet divided by `total`."""
    if RELOAD:  # where two operands of 256 values a lane leave no registers
        query_re = query_part(at, step, live, False, QUERY_WORDS)
    score = product(query_re, tl.trans(row_re), tl.zeros([query_re.shape[0], row_re.shape[0]], tl.float32))
    if RELOAD:
        tl.debug_barrier()
        query_im = query_part(at, step, live, True, QUERY_WORDS)
    score = product(query_im, tl.trans(row_im), score) * scale
    # -inf is for rows that do not count: a row whose score fp32 does not hold still counts
    score = tl.where(valid[None, :], tl.where(score < LOWEST_SCORE, LOWEST_SCORE, score), float("-inf"))
    higher = tl.maximum(top, tl.max(score, axis=1))
    base = tl.where(higher == float("-inf"), 0.0, higher)  # no valid row yet
    shrink = tl.exp2((top - base) * LOG2E)
    share = tl.exp2((score - base[:, None]) * LOG2E)
    total = total * shrink + tl.sum(share, axis=1)
    share = operand(dev.to_fp32(dev.to_bf16(share)))
    re = product(share, row_re, re * shrink[:, None])
    im = product(share, row_im, im * shrink[:, None])
    return higher, total, re, im


@triton.jit
def finish(
    re,
    im,
    lse,
    head,
    token,
    live,
    sink,
    freqs,
    freqs_stride,
    max_positions,
    positions,
    positions_stride,
    out,
    lses,
    item,
    empty_lse,
    SINK: tl.constexpr,
    ROTATE: tl.constexpr,
    FREQ_WORDS: tl.constexpr,
    CAST: tl.constexpr,
):
    """Apply the sink, rotate the tail back, round, and store at `item`."""
    if SINK:
        logit = tl.load(sink + head, mask=live, other=0.0)
        share = 1.0 / (1.0 + tl.exp2((logit - lse) * LOG2E))
        share = tl.where(lse == float("-inf"), 0.0, share)[:, None]
        re, im = re * share, im * share
    pair = tl.arange(0, 256)[None, :]
    if ROTATE:
        at = tl.load(positions + token * positions_stride, mask=live, other=0).to(tl.int64)
        at = tl.where((at >= 0) & (at < max_positions), at, 0)
        turned = live[:, None] & (pair >= 224)
        table = dev.pair_pointer(freqs, FREQ_WORDS)
        cos, sin = dev.load_pairs(table, (at * freqs_stride)[:, None], pair - 224, turned, tl.float32, FREQ_WORDS)
        turned_re, turned_im = dev.rotate(re, im, cos, dev.negated(sin))
        re, im = tl.where(pair < 224, re, turned_re), tl.where(pair < 224, im, turned_im)
    kind: tl.constexpr = out.dtype.element_ty
    dev.store_pairs(dev.pair_pointer(out, True), (item * 256)[:, None], pair, re, im, live[:, None], kind, True, CAST)
    tl.store(lses + item, tl.where(lse == float("-inf"), empty_lse, lse), mask=live)


@triton.jit(do_not_specialize=_VARYING)
def merge_kernel(
    outs,
    split_stride,
    token_stride,
    head_stride,
    lses,
    lses_split_stride,
    lses_token_stride,
    lses_head_stride,
    sink,
    freqs,
    freqs_stride,
    max_positions,
    positions,
    positions_stride,
    out,
    lse,
    splits,
    count,
    heads,
    empty_lse,
    SINK: tl.constexpr,
    ROTATE: tl.constexpr,
    OUT_WORDS: tl.constexpr,
    FREQ_WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    CAST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Weigh the partial results of ROWS heads by their share of the softmax, in order."""
    dev.begin(OVERLAP)
    item = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = item < count
    token, head = item // heads, item % heads
    pair = tl.arange(0, 256)[None, :]
    from_lse = lses + token * lses_token_stride + head * lses_head_stride
    top = tl.full([ROWS], float("-inf"), tl.float32)
    for _ in range(splits):  # pointers advance: int32 may not hold a split times its stride
        one = tl.load(from_lse, mask=live, other=0.0)
        from_lse += lses_split_stride
        top = tl.maximum(top, tl.where(one == float("inf"), float("-inf"), one))
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([ROWS], tl.float32)
    re = tl.zeros([ROWS, 256], tl.float32)
    im = tl.zeros([ROWS, 256], tl.float32)
    at = dev.pair_pointer(outs, OUT_WORDS)
    step = (token * token_stride + head * head_stride)[:, None]
    from_lse = lses + token * lses_token_stride + head * lses_head_stride
    for _ in range(splits):
        one = tl.load(from_lse, mask=live, other=0.0)
        from_lse += lses_split_stride
        empty = tl.abs(one) == float("inf")
        weight = tl.where(empty, 0.0, tl.exp2((one - base) * LOG2E))
        used = (live & (empty == 0))[:, None]
        kind: tl.constexpr = outs.dtype.element_ty
        part_re, part_im = dev.load_pairs(at, step, pair, used, kind, OUT_WORDS)
        at += split_stride
        total += weight
        re += weight[:, None] * part_re
        im += weight[:, None] * part_im
    inverse = (1.0 / tl.where(total == 0, 1.0, total))[:, None]
    finish(
        re * inverse, im * inverse, tl.where(total == 0, float("-inf"), top + tl.log(total)), head, token, live, sink,
        freqs, freqs_stride, max_positions, positions, positions_stride, out, lse, item, empty_lse, SINK, ROTATE,
        FREQ_WORDS, CAST,
    )  # fmt: skip


# --- what is compiled offline -----------------------------------------------------------------------------------------

_PAIRS = ((KVLayout.V41, KVLayout.V41_FP4), (KVLayout.V4, KVLayout.V4), (KVLayout.V41_MXFP4, KVLayout.V41_MXFP4),
          (KVLayout.BF16, KVLayout.BF16))  # fmt: skip
_HOPPER_PAIRS = ((KVLayout.V41, KVLayout.V41_FP4), (KVLayout.V41, KVLayout.V41), (KVLayout.V41_FP4, KVLayout.V41_FP4))
_TYPES = {"window": "*u8", "extra": "*u8", "window_slots": "*i32", "extra_slots": "*i32", "window_lengths": "*i32",
          "extra_lengths": "*i32", "scale": "fp32", "sink": "*fp32", "lse": "*fp32", "lses": "*fp32", "outs": "*fp32",
          "empty_lse": "fp32"}  # fmt: skip
_STRIDES = ("window_page_stride", "window_data_stride", "window_slots_stride", "extra_page_stride",
            "extra_data_stride", "extra_slots_stride", "split_stride", "token_stride")  # fmt: skip


def _constants(near: KVLayout, far: KVLayout) -> dict[str, Any]:
    found: dict[str, Any] = {f"WINDOW_{k}": v for k, v in layout_constants(near, 256).items()}
    found.update({f"EXTRA_{k}": v for k, v in layout_constants(far, 256).items()})
    found.update({f"{s}_{k}": True for s in ("WINDOW", "EXTRA") for k in ("LENGTHS", "PAGE_WORDS")})
    return found


def _cases() -> list[TargetCase]:
    cases = []
    flags = {"SINK": True, "ROTATE": True, "QUERY_WORDS": True, "FREQ_WORDS": True, "OUT_WORDS": True}
    options = {"enable_fp_fusion": False, "num_stages": 1}
    for near, far in _PAIRS:
        where = _constants(near, far)
        for variant in DEVICE_VARIANTS:
            rdna = "gfx1201" in variant["targets"]
            for heads in (64,) if rdna else (16, 64):
                shape = tile(heads, near, rdna)
                label, warps = f"sparse_mla {near} + {far} x{shape['HEADS']}", shape.pop("num_warps")
                case = case_of(sparse_mla_kernel, label, variant, warps, _TYPES, _STRIDES, **shape, **flags, **where)
                cases.append(replace(case, options=options))
    hopper = next(v for v in DEVICE_VARIANTS if v["targets"] == ("sm90",))
    for near, far in _HOPPER_PAIRS:
        where = _constants(near, far)
        for partial in (False, True):
            types = {**_TYPES, "out": "*fp32" if partial else "*bf16"}
            label = f"sparse_mla {near} + {far} x64" + (" partial" if partial else "")
            numbers = {**where, "EXTRA": True, "SINK": not partial, "ROTATE": not partial}
            kernel, strides = attend_hopper.sparse_mla_hopper_kernel, (*_STRIDES, "query_stride", "head_stride")
            case = case_of(kernel, label, hopper, attend_hopper.WARPS, types, strides, **numbers)
            cases.append(replace(case, spills_allowed=SPILLED_CONSTANTS))
    for variant in DEVICE_VARIANTS:
        types = {**_TYPES, "out": "*bf16"}
        case = case_of(merge_kernel, "merge", variant, 4, types, _STRIDES, ROWS=MERGED_ROWS, **flags)
        cases.append(replace(case, options={**case.options, **merge_options(variant["constexprs"]["CAST"])}))
    return cases


TARGET_CASES = _cases()
