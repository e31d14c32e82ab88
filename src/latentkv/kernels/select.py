"""Stage `select` in Triton: index logits over pages; schedules and top-k have files of their own."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from latentkv.kernels import device as dev
from latentkv.kernels import schedule, topk
from latentkv.kernels.launch import (
    DEVICE_VARIANTS,
    E4M3_CAST,
    TargetCase,
    common_options,
    is_hopper,
    is_rdna,
    on_device,
    wave_size,
)
from latentkv.kernels.schedule import decode_schedule, prefill_schedule
from latentkv.kernels.topk import select_blocks, select_topk, select_topk_in_blocks

__all__ = [
    "decode_schedule",
    "index_logits",
    "prefill_schedule",
    "select_blocks",
    "select_topk",
    "select_topk_in_blocks",
]

# e4m3 bytes of the low and of the high nibbles of a word: sign to bit 7, the other bits to 4..2
_E4M3_OF_A_WORD: tl.constexpr = tl.constexpr("""{
.reg .b32 s, t;
and.b32 t, $2, 0x07070707;  shl.b32 t, t, 2;  and.b32 s, $2, 0x08080808;  shl.b32 s, s, 4;  or.b32 $0, s, t;
shr.u32 t, $2, 2;  and.b32 t, t, 0x1C1C1C1C;  and.b32 s, $2, 0x80808080;  or.b32 $1, s, t;
}""")
# enough programs to fill a device, few enough that a program's query is read for many keys
BLOCKS_A_PROGRAM, PROGRAMS = 32, 660
MOST_HEADS, MOST_ROWS = 64, 4  # a program
ROWS_A_LAUNCH = 32768  # CUDA's second grid axis ends at 65535
KEYS_AT_ONCE = 64  # never more than a page: the rows of one matrix instruction of four warps


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
    """Launch `index_logits_kernel`: a program takes a run of keys, and a row or several that share them."""
    rows, heads = weights.shape
    width = out.shape[1]
    if rows == 0 or width == 0:
        return
    batches, columns = page_table.shape
    rows_a_batch = max(1, rows // max(1, batches))
    if rows > ROWS_A_LAUNCH:
        each = rows_a_batch if row_to_batch is None else 1
        for first, last in _parts(rows, each):
            of_part = slice(first // each, triton.cdiv(last, each)) if row_to_batch is None else slice(None)
            index_logits(
                query[first * query.shape[0] // rows : last * query.shape[0] // rows],
                query_scale[first * query_scale.shape[0] // rows : last * query_scale.shape[0] // rows],
                weights[first:last], payload, scale, page_table[of_part], lengths[first:last],
                None if row_to_batch is None else row_to_batch[first:last], schedule, fill, query_layout, layout,
                page_size, out[first:last],
            )  # fmt: skip
        return
    options = common_options(out.device)
    blocks = triton.cdiv(width, KEYS_AT_ONCE)
    padded, together = triton.next_power_of_2(heads), 1
    # rows of a batch follow one another; elsewhere the wider tile does not fit 128 lanes' registers
    shares = out.device.type == "cpu" or is_hopper(out.device) or wave_size(out.device) == 64
    if row_to_batch is None and shares:
        most = min(MOST_ROWS, MOST_HEADS // padded)
        while rows_a_batch % (2 * together) == 0 and 2 * together <= most:
            together *= 2
    padded = max(padded, 16 // together)
    rows //= together
    run = max(1, min(BLOCKS_A_PROGRAM, blocks * rows // PROGRAMS))
    scales = scale if scale is not None else payload
    of_rows = row_to_batch if row_to_batch is not None else lengths
    with on_device(out):
        index_logits_kernel[(triton.cdiv(blocks, run), rows)](
            query.view(torch.uint8),
            query_scale.view(torch.uint8),
            weights,
            weights.stride(0),
            payload,
            payload.stride(0),
            scales,
            scales.stride(0),
            page_table,
            page_table.stride(0),
            lengths,
            lengths.stride(0),
            of_rows,
            of_rows.stride(0),
            out,
            out.stride(0),
            payload.shape[0],
            batches,
            rows_a_batch,
            columns * page_size,
            width,
            run,
            HEADS=heads,
            PADDED=padded,
            TOGETHER=together,
            LAYOUT=layout,
            PAGE_SHIFT=page_size.bit_length() - 1,
            WORDS=payload.data_ptr() % 4 == 0 and payload.stride(0) % 4 == 0,
            FLYDSL=query_layout == "flydsl",
            BY_ROW=row_to_batch is not None,
            FILL=fill,
            DOT=_operand(out.device, options["CAST"]),
            BLOCK=KEYS_AT_ONCE,
            AHEAD=not is_rdna(out.device),
            num_warps=_warps(heads, wave_size(out.device), is_hopper(out.device)),
            num_stages=1,  # the copies of a pipeline cost more than what occupancy hides anyway
            **options,
        )


def _parts(rows: int, each: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows for a launch each: of whole sequences of `each` rows, or of a part of one."""
    if each <= ROWS_A_LAUNCH:
        step = ROWS_A_LAUNCH // each * each
        yield from ((first, min(first + step, rows)) for first in range(0, rows, step))
        return
    for begin in range(0, rows, each):
        for first in range(begin, begin + each, ROWS_A_LAUNCH):
            yield first, min(first + ROWS_A_LAUNCH, begin + each)


def _warps(heads: int, wave: int, hopper: bool) -> int:
    """Warps a program: 64 heads spill in 128 lanes on gfx1201 and sm_100, in 512 on gfx9; sm_90 exchanges in 256."""
    return 4 if heads <= 32 or wave == 64 or hopper else 8


def _operand(device: torch.device, cast: int) -> str:
    """Element type of the matrix operands; every choice is exact."""
    if device.type == "cpu":
        return "fp32"
    return "e4m3" if cast == E4M3_CAST else "bf16"


@triton.jit(do_not_specialize=["num_pages", "batches", "rows_a_batch", "capacity", "width", "run"])
def index_logits_kernel(
    query,
    query_scale,
    weights,
    weights_stride,
    payload,
    payload_stride,
    scale,
    scale_stride,
    page_table,
    table_stride,
    lengths,
    lengths_stride,
    row_to_batch,
    batch_stride,
    out,
    out_stride,
    num_pages,
    batches,
    rows_a_batch,
    capacity,
    width,
    run,
    HEADS: tl.constexpr,
    PADDED: tl.constexpr,
    TOGETHER: tl.constexpr,
    LAYOUT: tl.constexpr,
    PAGE_SHIFT: tl.constexpr,
    WORDS: tl.constexpr,
    FLYDSL: tl.constexpr,
    BY_ROW: tl.constexpr,
    FILL: tl.constexpr,
    DOT: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
    CAST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Logits of TOGETHER rows of one batch entry for `run` blocks of BLOCK keys."""
    dev.begin(OVERLAP)
    row = tl.program_id(1).to(tl.int64) * TOGETHER
    if BY_ROW:
        batch = tl.load(row_to_batch + row * batch_stride).to(tl.int64)
    else:
        batch = row // rows_a_batch
    each = row + tl.arange(0, TOGETHER)
    length = tl.load(lengths + each * lengths_stride).to(tl.int64)
    length = tl.where((batch >= 0) & (batch < batches), length, 0)
    length = tl.minimum(tl.minimum(length, capacity), width)
    longest = tl.max(length)
    table = page_table + tl.where((batch >= 0) & (batch < batches), batch, 0) * table_stride
    logits = out + each * out_stride
    first = tl.program_id(0).to(tl.int64) * run * BLOCK
    last = tl.minimum(first + run * BLOCK, width)
    if first < longest:
        lane = tl.arange(0, TOGETHER * PADDED)
        head = lane % PADDED
        at = weights + (row + lane // PADDED) * weights_stride + head
        weight = dev.to_fp32(tl.load(at, mask=head < HEADS, other=0.0))
        c0, e0 = _query_group(query, query_scale, row, 0, HEADS, PADDED, TOGETHER, FLYDSL)
        c1, e1 = _query_group(query, query_scale, row, 1, HEADS, PADDED, TOGETHER, FLYDSL)
        c2, e2 = _query_group(query, query_scale, row, 2, HEADS, PADDED, TOGETHER, FLYDSL)
        c3, e3 = _query_group(query, query_scale, row, 3, HEADS, PADDED, TOGETHER, FLYDSL)
        end = tl.minimum(last, longest)
        where = (payload, payload_stride, scale, scale_stride, table, num_pages, logits, length, first, end)
        # a head whose four exponents lie close together takes them into its values, exactly: e4m3 holds 2^-8 .. 2^6 of
        # an e2m1 value, and so the products with query scales leave the loop
        top = tl.maximum(tl.maximum(e0, e1), tl.maximum(e2, e3))
        low = tl.minimum(tl.minimum(e0, e1), tl.minimum(e2, e3))
        anchor = top - 6
        if tl.max(tl.where((top == 255) | (top < 7), 255, top - low)) <= 14:
            q0, q1 = _query_operand(c0, e0 - anchor, DOT), _query_operand(c1, e1 - anchor, DOT)
            q2, q3 = _query_operand(c2, e2 - anchor, DOT), _query_operand(c3, e3 - anchor, DOT)
            weight = weight * dev.ue8m0_decode(anchor)
            _score(
                q0, q1, q2, q3, weight, weight, weight, weight, weight, *where,
                True, LAYOUT, PAGE_SHIFT, WORDS, DOT, BLOCK, AHEAD,
            )  # fmt: skip
        else:  # rare: few keys at once, so that the registers it takes are not the kernel's
            FEW: tl.constexpr = 16 if DOT == "e4m3" else 32
            WIDE: tl.constexpr = "bf16" if DOT == "e4m3" else DOT
            r0, r1 = _query_operand(c0, 0, WIDE), _query_operand(c1, 0, WIDE)
            r2, r3 = _query_operand(c2, 0, WIDE), _query_operand(c3, 0, WIDE)
            s0, s1 = dev.ue8m0_decode(e0), dev.ue8m0_decode(e1)
            s2, s3 = dev.ue8m0_decode(e2), dev.ue8m0_decode(e3)
            _score(r0, r1, r2, r3, s0, s1, s2, s3, weight, *where, False, LAYOUT, PAGE_SHIFT, WORDS, WIDE, FEW, False)
    if FILL:
        begin = tl.maximum(first, tl.min(length))
        for block in range(tl.cdiv(last - begin, BLOCK)):
            key = begin + block * BLOCK + tl.arange(0, BLOCK)
            empty = (key < last)[:, None] & (key[:, None] >= length[None, :])
            tl.store(logits[None, :] + key[:, None], float("-inf"), mask=empty)


@triton.jit
def _score(
    q0, q1, q2, q3, s0, s1, s2, s3, weight, payload, payload_stride, scale, scale_stride, table, num_pages, logits,
    length, first, end, FOLDED: tl.constexpr, LAYOUT: tl.constexpr, PAGE_SHIFT: tl.constexpr, WORDS: tl.constexpr,
    DOT: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Write the logits of keys first ..< end, a block in a page at a time; FOLDED queries carry their own scales."""
    # with AHEAD a block's codes are on their way while the one before is scored, and its page's id one block earlier
    keys = (payload, payload_stride, scale, scale_stride, num_pages)
    page = _page_of(table, first, end, PAGE_SHIFT)
    k0, k1, k2, k3, e = _key_block(*keys, page, first, end, LAYOUT, PAGE_SHIFT, WORDS, BLOCK)
    page = _page_of(table, first + BLOCK, end, PAGE_SHIFT)
    for block in range(tl.cdiv(end - first, BLOCK)):
        start = first + block * BLOCK
        if AHEAD:
            n0, n1, n2, n3, f = _key_block(*keys, page, start + BLOCK, end, LAYOUT, PAGE_SHIFT, WORDS, BLOCK)
            page = _page_of(table, start + 2 * BLOCK, end, PAGE_SHIFT)
        # a group's dot is exact, and so is its product with powers of two: only the three additions round
        total = _group_dot(k0, q0, DOT, BLOCK) * _factor(e, s0, 0, FOLDED, DOT)
        total = tl.fma(_group_dot(k1, q1, DOT, BLOCK), _factor(e, s1, 1, FOLDED, DOT), total)
        total = tl.fma(_group_dot(k2, q2, DOT, BLOCK), _factor(e, s2, 2, FOLDED, DOT), total)
        total = tl.fma(_group_dot(k3, q3, DOT, BLOCK), _factor(e, s3, 3, FOLDED, DOT), total)
        term = tl.maximum(total, 0.0, propagate_nan=tl.PropagateNan.ALL) * weight[None, :]
        key = start + tl.arange(0, BLOCK)
        seen = key[:, None] < tl.minimum(length, end)[None, :]
        rows: tl.constexpr = length.shape[0]
        tl.store(logits[None, :] + key[:, None], _fold(term, BLOCK, rows, weight.shape[0] // rows), mask=seen)
        if AHEAD:
            k0, k1, k2, k3, e = n0, n1, n2, n3, f
        else:
            k0, k1, k2, k3, e = _key_block(*keys, page, start + BLOCK, end, LAYOUT, PAGE_SHIFT, WORDS, BLOCK)
            page = _page_of(table, start + 2 * BLOCK, end, PAGE_SHIFT)


@triton.jit
def _page_of(table, start, end, PAGE_SHIFT: tl.constexpr):
    """The page of a block's keys; -1 past the end."""
    return tl.load(table + (start >> PAGE_SHIFT), mask=start < end, other=-1).to(tl.int64)


@triton.jit
def _factor(exponents, query_scale, GROUP: tl.constexpr, FOLDED: tl.constexpr, DOT: tl.constexpr):
    key_scale = dev.ue8m0_decode((exponents >> (8 * GROUP)) & 0xFF)
    if DOT == "e4m3":
        key_scale = key_scale * 64.0  # key operands carry 2^-6
    if FOLDED:
        return tl.broadcast_to(key_scale[:, None], [key_scale.shape[0], query_scale.shape[0]])
    else:
        return key_scale[:, None] * query_scale[None, :]


@triton.jit
def _fold(x, KEYS: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr):
    """Each row's sums over its heads by adding the upper half to the lower until one is left; +0 keeps a -0 away."""
    if HEADS == 1:
        return tl.reshape(x, [KEYS, ROWS]) + 0.0
    else:
        halves = tl.sum(tl.reshape(x, [KEYS, ROWS, 2, HEADS // 2]), axis=2)
        return _fold(tl.reshape(halves, [KEYS, ROWS * HEADS // 2]), KEYS, ROWS, HEADS // 2)


@triton.jit
def _query_group(
    query, query_scale, row, GROUP: tl.constexpr, HEADS: tl.constexpr, PADDED: tl.constexpr, TOGETHER: tl.constexpr,
    FLYDSL: tl.constexpr,
):  # fmt: skip
    """e2m1 codes [all heads, 32], low nibbles first, and exponents of one group; absent heads are zero."""
    lane = tl.arange(0, TOGETHER * PADDED)
    row += lane // PADDED
    head = lane % PADDED
    at = query + (row * HEADS + head)[:, None] * 64 + GROUP * 16 + tl.arange(0, 16)[None, :]
    packed = tl.load(at, mask=head[:, None] < HEADS, other=0).to(tl.int32)
    if FLYDSL:
        at = query_scale + row * 256 + GROUP * 64 + (head % 16) * 4 + head // 16
    else:
        at = query_scale + (row * HEADS + head) * 4 + GROUP
    exponent = tl.load(at, mask=head < HEADS, other=127).to(tl.int32)
    codes = tl.permute(tl.join(packed & 0xF, packed >> 4), [0, 2, 1])
    return tl.reshape(codes, [TOGETHER * PADDED, 32]), exponent


@triton.jit
def _query_operand(codes, shift, DOT: tl.constexpr):
    """Matrix operand [32, all heads] of e2m1 codes times 2^shift, `shift` -8 .. 6 a head."""
    factor = dev.power_of_two(tl.full([codes.shape[0]], 127, tl.int32) + shift)
    values = dev.e2m1_decode(codes) * factor[:, None]
    if DOT == "e4m3":
        return tl.trans(values.to(tl.float8e4nv))
    elif DOT == "bf16":
        return tl.trans(dev.to_bf16(values))
    else:
        return tl.trans(values)


@triton.jit
def _key_block(
    payload, payload_stride, scale, scale_stride, num_pages, page, start, end, LAYOUT: tl.constexpr,
    PAGE_SHIFT: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Words [BLOCK, 4] of four groups and of exponents [BLOCK]; keys that are not stored are zero."""
    offset = tl.arange(0, BLOCK)
    inside = (page >= 0) & (page < num_pages)
    stored = start + offset < tl.where(inside, end, 0)
    page = tl.where(inside, page, 0)
    payload += page * payload_stride
    slot = (offset + (start & ((1 << PAGE_SHIFT) - 1))).to(tl.int32)
    if LAYOUT == "fused":
        exponents = _word(payload + (64 << PAGE_SHIFT), slot, stored, WORDS)
    elif LAYOUT == "split64":
        exponents = _gathered(scale + page * scale_stride, (slot % 16) * 4 + slot // 16, stored, 64)
    else:
        exponents = _gathered(scale + page * scale_stride, (slot // 8) * 32 + slot % 8, stored, 8)
    k0 = _key_group(payload, slot, stored, 0, LAYOUT, WORDS)
    k1 = _key_group(payload, slot, stored, 1, LAYOUT, WORDS)
    k2 = _key_group(payload, slot, stored, 2, LAYOUT, WORDS)
    k3 = _key_group(payload, slot, stored, 3, LAYOUT, WORDS)
    return k0, k1, k2, k3, exponents


@triton.jit
def _key_group(payload, slot, stored, GROUP: tl.constexpr, LAYOUT: tl.constexpr, WORDS: tl.constexpr):
    if LAYOUT == "fused":
        at = slot * 16 + GROUP * 4
    elif LAYOUT == "split64":
        at = GROUP * 256 + slot * 4
    else:
        at = (slot // 8) * 128 + ((slot % 4) * 4 + GROUP) * 8 + (slot % 8) // 4 * 4
    return _word(payload, at[:, None] + tl.arange(0, 4)[None, :], stored[:, None], WORDS)


@triton.jit
def _word(base, at, mask, WORDS: tl.constexpr):
    """Words number `at` from a pointer to bytes, which is aligned if WORDS."""
    if WORDS:
        return tl.load(base.to(tl.pointer_type(tl.int32), bitcast=True) + at, mask=mask, other=0)
    else:
        return _gathered(base, at * 4, mask, 1)


@triton.jit
def _gathered(base, at, mask, STEP: tl.constexpr):
    """A word of the bytes at `at`, `at` + STEP and so on."""
    word = tl.load(base + at, mask=mask, other=0).to(tl.int32)
    for byte in tl.static_range(1, 4):
        word |= tl.load(base + (at + byte * STEP), mask=mask, other=0).to(tl.int32) << (8 * byte)
    return word


@triton.jit
def _group_dot(words, q, DOT: tl.constexpr, ROWS: tl.constexpr):
    """fp32 [ROWS, heads] of packed keys [ROWS, 4] and a query operand [32, heads]; exact."""
    return tl.dot(_key_operand(words, DOT, ROWS), q, input_precision="ieee", out_dtype=tl.float32)


@triton.jit
def _key_operand(words, DOT: tl.constexpr, ROWS: tl.constexpr):
    """Matrix operand [ROWS, 32] of e2m1 words [ROWS, 4]: the low nibbles of all bytes first, then the high ones."""
    shift = 8 * tl.arange(0, 4)[None, None, :]
    if DOT == "e4m3":
        # an e2m1 code moved by two bits is the e4m3 code of 2^-6 times its value
        low, high = tl.inline_asm_elementwise(
            _E4M3_OF_A_WORD, "=&r,=r,r", [words], (tl.int32, tl.int32), is_pure=True, pack=1
        )
        low, high = (low[:, :, None] >> shift).to(tl.uint8), (high[:, :, None] >> shift).to(tl.uint8)
        codes = tl.join(tl.reshape(low, [ROWS, 16]), tl.reshape(high, [ROWS, 16]))
        return tl.reshape(tl.permute(codes, [0, 2, 1]), [ROWS, 32]).to(tl.float8e4nv, bitcast=True)
    else:
        packed = tl.reshape(words[:, :, None] >> shift, [ROWS, 16])
        codes = tl.join(packed & 0xF, (packed >> 4) & 0xF)
        values = dev.e2m1_decode(tl.reshape(tl.permute(codes, [0, 2, 1]), [ROWS, 32]))
        if DOT == "bf16":
            return dev.to_bf16(values)
        else:
            return values


# --- what is compiled offline -----------------------------------------------------------------------------------------


_SHARING = (("sm90",), ("gfx950", "gfx942"))  # targets whose programs take several rows


def _cases() -> list[TargetCase]:
    names = index_logits_kernel.arg_names
    pointers = {"query": "*u8", "query_scale": "*u8", "weights": "*bf16", "payload": "*u8", "scale": "*u8",
                "page_table": "*i32", "lengths": "*i32", "row_to_batch": "*i32", "out": "*fp32"}  # fmt: skip
    aligned = ("query", "query_scale", "weights", "weights_stride", "payload", "payload_stride", "scale",
               "scale_stride", "page_table", "table_stride", "lengths", "out", "out_stride")  # fmt: skip
    cases = []
    for layout, heads, together, flydsl in (
        ("fused", 32, 1, False),
        ("fused", 32, 2, False),
        ("split64", 64, 1, True),
        ("split8", 16, 1, False),
    ):
        for variant in DEVICE_VARIANTS:
            if together > 1 and variant["targets"] not in _SHARING:
                continue
            constexprs = {
                "HEADS": heads, "PADDED": heads, "TOGETHER": together, "LAYOUT": layout, "PAGE_SHIFT": 6, "WORDS": True,
                "FLYDSL": flydsl,
                "BY_ROW": False, "FILL": True, "BLOCK": KEYS_AT_ONCE,
                "DOT": "e4m3" if variant["targets"] == ("sm90",) else "bf16",
                "AHEAD": variant["targets"] != ("gfx1201",),
                **variant["constexprs"],
            }  # fmt: skip
            signature = {name: pointers.get(name, "i32") for name in names if name not in constexprs}
            options = {"enable_fp_fusion": False, "num_stages": 1}
            label = f"logits {layout} H{heads}" + (f" x {together} rows" if together > 1 else "")
            cases.append(
                TargetCase(
                    index_logits_kernel,
                    label,
                    signature,
                    constexprs,
                    _warps(heads, variant.get("wave", 32), variant["targets"] == ("sm90",)),
                    aligned,
                    options,
                    targets=variant["targets"],
                )
            )
    return cases


TARGET_CASES = _cases() + schedule.CASES + topk.CASES
