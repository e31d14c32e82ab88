"""Stage `attend` on Hopper: the same function as `attend.sparse_mla_kernel`, scheduled by hand with Gluon.

Plain Triton gives both warpgroups the whole score tile, spills, and decodes while the tensor cores wait. Here a program
takes 64 heads of one query. Four warps decode rows into one of two buffers (rows_hopper.py); eight warps multiply, each
half of them with half of a block's rows and then for half of the output. Scores and probabilities make up for the 2^-8
in fp4 rows, exactly.
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
    barrier,
    blocks_of_split,
    count_of,
    decode_blocks,
)

HEADS, WARPS = 64, 8
_LOG2E = gl.constexpr(1.4426950408889634)

_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16]))
_OUTPUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16]))
_DENSE = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0]))
_VARYING = ["heads", "window_width", "window_capacity", "extra_width", "extra_capacity", "max_positions", "tokens",
            "splits"]  # fmt: skip


@gluon.jit(do_not_specialize=_VARYING)
def sparse_mla_hopper_kernel(
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
    """Attend with 64 heads of one query over one split of its rows, in blocks of 64 rows.

    Arguments as in `attend.sparse_mla_kernel`, data strides in units of eight bytes. A split has blocks of both kinds
    or is padded with an empty one.
    """
    gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, is_pure=False, pack=1)
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], gl.int32, is_pure=False, pack=1)
    head_blocks = gl.cdiv(heads, 64)
    token = (gl.program_id(0) // head_blocks).to(gl.int64)
    first_head = (gl.program_id(0) % head_blocks) * 64
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
    queries = gl.allocate_shared_memory(gl.bfloat16, [64, 512], SHARED)
    rows = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 512], SHARED)
    shares = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SHARED)
    flags = gl.allocate_shared_memory(gl.int32, [2, 64], FLAGS)  # whether a row is valid
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for buffer in gl.static_range(2):
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
                    2, 1, 0,
                ),
            ),
        ],
        [DECODERS],
        [DECODER_REGISTERS],
    )  # fmt: skip


# --- the eight warps that multiply ------------------------------------------------------------------------------------


@gluon.jit
def _multiply(
    query, query_stride, head_stride, heads, token, first_head, split, near_blocks, blocks,
    queries, rows, shares, flags, full, free, scale, sink, freqs, freqs_stride, max_positions,
    positions, positions_stride, out, lse, tokens, empty_lse,
    WINDOW_ENCODING: gl.constexpr, EXTRA_ENCODING: gl.constexpr, SINK: gl.constexpr, ROTATE: gl.constexpr,
):  # fmt: skip
    head = first_head + gl.arange(0, 64, gl.SliceLayout(1, _DENSE))
    at = query + token * query_stride + (head.to(gl.int64) * head_stride)[:, None]
    queries.store(
        gl.load(at + gl.arange(0, 512, gl.SliceLayout(0, _DENSE))[None, :], mask=(head < heads)[:, None], other=0.0)
    )
    hopper.fence_async_shared()
    barrier()
    mbarrier.wait(full.index(0), 0)
    nothing = gl.zeros([64, 64], gl.float32, _SCORES)
    scored = hopper.warpgroup_mma(queries, rows.index(0).permute((1, 0)), nothing, use_acc=False, is_async=True)
    score = hopper.warpgroup_mma_wait(0, deps=(scored,))

    top = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, _SCORES))
    total = gl.zeros([64], gl.float32, gl.SliceLayout(1, _SCORES))
    output = gl.zeros([64, 512], gl.float32, _OUTPUT)
    # rows of fp4 stand there times 2^-8
    up: gl.constexpr = 256.0 if WINDOW_ENCODING == "v41_fp4" else 1.0
    up_later: gl.constexpr = 256.0 if EXTRA_ENCODING == "v41_fp4" else 1.0
    for step in range(blocks - 1):
        factor = gl.where(step < near_blocks, up, up_later)
        pending, top, total = _add(score, top, total, output, rows, shares, flags, step, scale, factor)
        score, output = _score(pending, queries, rows, full, free, step + 1)
    factor = gl.where(blocks - 1 < near_blocks, up, up_later)
    pending, top, total = _add(score, top, total, output, rows, shares, flags, blocks - 1, scale, factor)
    output = hopper.warpgroup_mma_wait(0, deps=(pending,))

    head = first_head + gl.arange(0, 64, gl.SliceLayout(1, _SCORES))
    item = token * heads + head
    weight = 1.0 / gl.where(total == 0, 1.0, total)
    log_sum = gl.where(total == 0, float("-inf"), top + gl.log(total))
    if SINK:
        logit = gl.load(sink + head, mask=head < heads, other=0.0)
        weight *= gl.where(total == 0, 0.0, 1.0 / (1.0 + gl.exp2((logit - log_sum) * _LOG2E)))
    output = output * gl.convert_layout(weight, gl.SliceLayout(1, _OUTPUT))[:, None]
    if ROTATE:
        place = gl.load(positions + token * positions_stride).to(gl.int64)
        place = gl.where((place >= 0) & (place < max_positions), place, 0)
        output = _turn_back(output, freqs + place * freqs_stride)
    to = (split.to(gl.int64) * tokens + token) * heads
    gl.store(
        lse + split.to(gl.int64) * tokens * heads + item, gl.where(total == 0, empty_lse, log_sum), mask=head < heads
    )
    if out.dtype.element_ty == gl.float32:
        head = first_head + gl.arange(0, 64, gl.SliceLayout(1, _OUTPUT))
        place = gl.arange(0, 512, gl.SliceLayout(0, _OUTPUT))
        gl.store(out + ((to + head) * 512)[:, None] + place[None, :], output, mask=(head < heads)[:, None])
    else:  # through shared memory: a register tile's rows are 16 bytes wide
        barrier()  # the other warpgroup may still read its rows
        rows.index(0).store(output.to(gl.bfloat16))
        barrier()
        head = first_head + gl.arange(0, 64, gl.SliceLayout(1, _DENSE))
        place = gl.arange(0, 512, gl.SliceLayout(0, _DENSE))
        at = out + ((to + head) * 512)[:, None] + place[None, :]
        gl.store(at, rows.index(0).load(_DENSE), mask=(head < heads)[:, None])


@gluon.jit
def _softmax(score, top, total, valid, scale, up):
    """bf16 shares of a block times `up`, the new maximum and sum, and by what earlier ones shrink."""
    score = gl.where(valid[None, :], score * (scale * up), float("-inf"))
    higher = gl.maximum(top, gl.max(score, axis=1))
    base = gl.where(higher == float("-inf"), 0.0, higher)  # no valid row yet
    shrink = gl.exp2((top - base) * _LOG2E)
    share = gl.exp2((score - base[:, None]) * _LOG2E)
    total = total * shrink + gl.sum(share, axis=1)
    return (share * up).to(gl.bfloat16), higher, shrink, total


@gluon.jit
def _add(score, top, total, output, rows, shares, flags, step, scale, up):
    """Start adding a block to the output."""
    valid = flags.index(step % 2).load(gl.SliceLayout(0, _SCORES)) != 0
    share, top, shrink, total = _softmax(score, top, total, valid, scale, up)
    shares.store(share)
    output = output * gl.convert_layout(shrink, gl.SliceLayout(1, _OUTPUT))[:, None]
    hopper.fence_async_shared()
    barrier()
    return hopper.warpgroup_mma(shares, rows.index(step % 2), output, is_async=True), top, total


@gluon.jit
def _score(pending, queries, rows, full, free, step):
    """Score the next block behind the product that is under way, and hand that one's buffer back."""
    mbarrier.wait(full.index(step % 2), (step // 2) & 1)
    nothing = gl.zeros([64, 64], gl.float32, _SCORES)
    scored = hopper.warpgroup_mma(queries, rows.index(step % 2).permute((1, 0)), nothing, use_acc=False, is_async=True)
    output = hopper.warpgroup_mma_wait(1, deps=(pending,))
    barrier()
    mbarrier.arrive(free.index((step - 1) % 2), count=1)
    score = hopper.warpgroup_mma_wait(0, deps=(scored,))
    return score, output


@gluon.jit
def _turn_back(output, table):
    """Rotate the last 64 values back; `table` holds the position's cos and sin in pairs."""
    re, im = gl.split(gl.reshape(output, [64, 256, 2]))
    pair = gl.arange(0, 256, gl.SliceLayout(0, re.type.layout))
    turned = pair >= 224
    cos = gl.load(table + 2 * (pair - 224), mask=turned, other=1.0)[None, :]
    sin = gl.load(table + 2 * (pair - 224) + 1, mask=turned, other=0.0)[None, :]
    both = gl.join(re * cos + im * sin, im * cos - re * sin)
    return gl.convert_layout(gl.reshape(both, [64, 512]), _OUTPUT)
