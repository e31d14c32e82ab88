"""Stage `attend` on Hopper for few heads: the same function as `attend.sparse_mla_kernel`, scheduled with Gluon.

What takes time is decoding rows, for which `attend_hopper` has four warps, and its output fills the registers of eight.
Here rows times heads and values times heads are the products, whose tiles are small: four warps multiply, and three
groups of four decode, each into a buffer of its own.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from latentkv.kernels.rows_hopper import (
    DECODER_REGISTERS,
    DECODERS,
    FLAGS,
    SHARED,
    SHARED_PAIRS,
    barrier,
    blocks_of_split,
    count_of,
    decode_blocks,
    reinterpreted,
)

HEADS, WARPS = 16, 4
_HEADS = gl.constexpr(HEADS)
_GROUPS = gl.constexpr(3)  # of decoding warps, and buffers
_LOG2E = gl.constexpr(1.4426950408889634)

_TILE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16]))  # of rows or values, by heads
_DENSE = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))
_VARYING = ["heads", "window_width", "window_capacity", "extra_width", "extra_capacity", "max_positions", "tokens",
            "splits"]  # fmt: skip


@gluon.jit(do_not_specialize=_VARYING)
def sparse_mla_narrow_kernel(
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
    WINDOW_ENCODING: gl.constexpr,
    WINDOW_PAGE_SHIFT: gl.constexpr,
    WINDOW_DATA_STEP: gl.constexpr,
    WINDOW_SCALE_BASE: gl.constexpr,
    WINDOW_SCALE_STEP: gl.constexpr,
    WINDOW_LENGTHS: gl.constexpr,
    EXTRA_ENCODING: gl.constexpr,
    EXTRA_PAGE_SHIFT: gl.constexpr,
    EXTRA_DATA_STEP: gl.constexpr,
    EXTRA_SCALE_BASE: gl.constexpr,
    EXTRA_SCALE_STEP: gl.constexpr,
    EXTRA_LENGTHS: gl.constexpr,
    EXTRA: gl.constexpr,
    SINK: gl.constexpr,
    ROTATE: gl.constexpr,
):
    """Attend with 16 heads of one query over one split of its rows, in blocks of 64 rows.

    Arguments as in `attend_hopper.sparse_mla_hopper_kernel`.
    """
    gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, is_pure=False, pack=1)
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], gl.int32, is_pure=False, pack=1)
    head_blocks = gl.cdiv(heads, _HEADS)
    token = (gl.program_id(0) // head_blocks).to(gl.int64)
    first_head = (gl.program_id(0) % head_blocks) * _HEADS
    split = gl.program_id(1)

    window_slots += token * window_slots_stride
    extra_slots += token * extra_slots_stride
    window_count = count_of(window_lengths, window_lengths_stride, token, window_width, WINDOW_LENGTHS)
    extra_count = count_of(extra_lengths, extra_lengths_stride, token, extra_width, EXTRA_LENGTHS)
    near, near_last, window_count, far, far_last, extra_count = blocks_of_split(
        split, splits, window_width, extra_width, window_count, extra_count
    )
    if EXTRA:
        blocks = near_last - near + far_last - far
    else:
        blocks = near_last - near
    queries = gl.allocate_shared_memory(gl.bfloat16, [_HEADS, 512], SHARED)
    rows = gl.allocate_shared_memory(gl.bfloat16, [_GROUPS, 64, 512], SHARED)
    shares = gl.allocate_shared_memory(gl.bfloat16, [_HEADS, 64], SHARED)
    flags = gl.allocate_shared_memory(gl.int32, [_GROUPS, 64], FLAGS)  # whether a row is valid
    full = gl.allocate_shared_memory(gl.int64, [_GROUPS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [_GROUPS, 1], mbarrier.MBarrierLayout())
    for buffer in gl.static_range(_GROUPS):
        mbarrier.init(full.index(buffer), count=1)
        mbarrier.init(free.index(buffer), count=1)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    query, query_stride, head_stride, heads, token, first_head, split, near_last - near, blocks,
                    queries, rows, shares, flags, full, free, scale, sink, freqs, freqs_stride, max_positions,
                    positions, positions_stride, out, lse, tokens, empty_lse,
                    WINDOW_ENCODING, EXTRA_ENCODING, SINK, ROTATE,
                ),
            ),
            (
                decode_blocks,
                (
                    rows, flags, full, free,
                    window, window_page_stride, window_data_stride, window_slots, window_capacity, near, near_last,
                    window_count, extra, extra_page_stride, extra_data_stride, extra_slots, extra_capacity, far,
                    far_last, extra_count,
                    WINDOW_ENCODING, WINDOW_PAGE_SHIFT, WINDOW_DATA_STEP, WINDOW_SCALE_BASE, WINDOW_SCALE_STEP,
                    EXTRA_ENCODING, EXTRA_PAGE_SHIFT, EXTRA_DATA_STEP, EXTRA_SCALE_BASE, EXTRA_SCALE_STEP, EXTRA,
                    _GROUPS, _GROUPS, 0,
                ),
            ),
            (
                decode_blocks,
                (
                    rows, flags, full, free,
                    window, window_page_stride, window_data_stride, window_slots, window_capacity, near, near_last,
                    window_count, extra, extra_page_stride, extra_data_stride, extra_slots, extra_capacity, far,
                    far_last, extra_count,
                    WINDOW_ENCODING, WINDOW_PAGE_SHIFT, WINDOW_DATA_STEP, WINDOW_SCALE_BASE, WINDOW_SCALE_STEP,
                    EXTRA_ENCODING, EXTRA_PAGE_SHIFT, EXTRA_DATA_STEP, EXTRA_SCALE_BASE, EXTRA_SCALE_STEP, EXTRA,
                    _GROUPS, _GROUPS, 1,
                ),
            ),
            (
                decode_blocks,
                (
                    rows, flags, full, free,
                    window, window_page_stride, window_data_stride, window_slots, window_capacity, near, near_last,
                    window_count, extra, extra_page_stride, extra_data_stride, extra_slots, extra_capacity, far,
                    far_last, extra_count,
                    WINDOW_ENCODING, WINDOW_PAGE_SHIFT, WINDOW_DATA_STEP, WINDOW_SCALE_BASE, WINDOW_SCALE_STEP,
                    EXTRA_ENCODING, EXTRA_PAGE_SHIFT, EXTRA_DATA_STEP, EXTRA_SCALE_BASE, EXTRA_SCALE_STEP, EXTRA,
                    _GROUPS, _GROUPS, 2,
                ),
            ),
        ],
        [DECODERS] * 3,
        [DECODER_REGISTERS] * 3,
    )  # fmt: skip


@gluon.jit
def _multiply(
    query, query_stride, head_stride, heads, token, first_head, split, near_blocks, blocks,
    queries, rows, shares, flags, full, free, scale, sink, freqs, freqs_stride, max_positions,
    positions, positions_stride, out, lse, tokens, empty_lse,
    WINDOW_ENCODING: gl.constexpr, EXTRA_ENCODING: gl.constexpr, SINK: gl.constexpr, ROTATE: gl.constexpr,
):  # fmt: skip
    """Four warps' work: scores, the online softmax, the output and its end."""
    head = first_head + gl.arange(0, _HEADS, gl.SliceLayout(1, _DENSE))
    at = query + token * query_stride + (head.to(gl.int64) * head_stride)[:, None]
    queries.store(
        gl.load(at + gl.arange(0, 512, gl.SliceLayout(0, _DENSE))[None, :], mask=(head < heads)[:, None], other=0.0)
    )
    hopper.fence_async_shared()
    barrier()
    top = gl.full([_HEADS], float("-inf"), gl.float32, gl.SliceLayout(0, _TILE))
    total = gl.zeros([_HEADS], gl.float32, gl.SliceLayout(0, _TILE))
    output = gl.zeros([512, _HEADS], gl.float32, _TILE)
    # rows of fp4 stand there times 2^-8
    up: gl.constexpr = 256.0 if WINDOW_ENCODING == "v41_fp4" else 1.0
    up_later: gl.constexpr = 256.0 if EXTRA_ENCODING == "v41_fp4" else 1.0
    for step in range(blocks):
        buffer = step % _GROUPS
        factor = gl.where(step < near_blocks, up, up_later)
        mbarrier.wait(full.index(buffer), (step // _GROUPS) & 1)
        nothing = gl.zeros([64, _HEADS], gl.float32, _TILE)
        scored = hopper.warpgroup_mma(
            rows.index(buffer), queries.permute((1, 0)), nothing, use_acc=False, is_async=True
        )
        score = hopper.warpgroup_mma_wait(0, deps=(scored,))
        valid = flags.index(buffer).load(gl.SliceLayout(1, _TILE)) != 0
        score = gl.where(valid[:, None], score * (scale * factor), float("-inf"))
        higher = gl.maximum(top, gl.max(score, axis=0))
        base = gl.where(higher == float("-inf"), 0.0, higher)  # no valid row yet
        shrink = gl.exp2((top - base) * _LOG2E)
        share = gl.exp2((score - base[None, :]) * _LOG2E)
        shares.permute((1, 0)).store((share * factor).to(gl.bfloat16))
        total = total * shrink + gl.sum(share, axis=0)
        top = higher
        output = output * shrink[None, :]
        hopper.fence_async_shared()
        barrier()
        added = hopper.warpgroup_mma(rows.index(buffer).permute((1, 0)), shares.permute((1, 0)), output, is_async=True)
        output = hopper.warpgroup_mma_wait(0, deps=(added,))
        barrier()
        mbarrier.arrive(free.index(buffer), count=1)

    head = first_head + gl.arange(0, _HEADS, gl.SliceLayout(0, _TILE))
    to = split.to(gl.int64) * tokens * heads + token * heads
    weight = 1.0 / gl.where(total == 0, 1.0, total)
    log_sum = gl.where(total == 0, float("-inf"), top + gl.log(total))
    if SINK:
        logit = gl.load(sink + head, mask=head < heads, other=0.0)
        weight *= gl.where(total == 0, 0.0, 1.0 / (1.0 + gl.exp2((logit - log_sum) * _LOG2E)))
    gl.store(lse + to + head, gl.where(total == 0, empty_lse, log_sum), mask=head < heads)
    # a thread's registers hold values of several heads: through shared memory to heads by values
    turned = reinterpreted(rows.index(0), gl.float32, [32, 512], SHARED_PAIRS).slice(0, _HEADS)
    turned.permute((1, 0)).store(output * weight[None, :])
    barrier()
    output = turned.load(_DENSE)
    if ROTATE:
        place = gl.load(positions + token * positions_stride).to(gl.int64)
        place = gl.where((place >= 0) & (place < max_positions), place, 0)
        output = _turn_back(output, freqs + place * freqs_stride)
    head = first_head + gl.arange(0, _HEADS, gl.SliceLayout(1, _DENSE))
    place = gl.arange(0, 512, gl.SliceLayout(0, _DENSE))
    at = out + ((to + head) * 512)[:, None] + place[None, :]
    gl.store(at, output.to(out.dtype.element_ty), mask=(head < heads)[:, None])


@gluon.jit
def _turn_back(output, table):
    """Rotate the last 64 values back; `table` holds the position's cos and sin in pairs."""
    re, im = gl.split(gl.reshape(output, [_HEADS, 256, 2]))
    pair = gl.arange(0, 256, gl.SliceLayout(0, re.type.layout))
    turned = pair >= 224
    cos = gl.load(table + 2 * (pair - 224), mask=turned, other=1.0)[None, :]
    sin = gl.load(table + 2 * (pair - 224) + 1, mask=turned, other=0.0)[None, :]
    both = gl.join(re * cos + im * sin, im * cos - re * sin)
    return gl.convert_layout(gl.reshape(both, [_HEADS, 512]), _DENSE)
