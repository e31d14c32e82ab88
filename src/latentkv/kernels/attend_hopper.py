"""Stage `attend` on Hopper: the same function as `attend.sparse_mla_kernel`, scheduled by hand with Gluon.

Plain Triton gives both warpgroups the whole score tile, spills, and decodes while the tensor cores wait. Here a program
takes 64 heads of one query. Four warps read the rows' codes and decode them into one of two buffers; eight warps
multiply, each half of them with half of a block's rows and then for half of the output. fp4 rows stand in shared memory
times 2^-8, so that decoding is one multiplication in bf16; scores and probabilities make up for it, exactly.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

HEADS, WARPS = 64, 8
ENCODINGS = ("v41", "v41_fp4")  # of the layouts that are decoded here; the other ones take the portable kernel
# two names of Triton 3.6 are others in 3.9
_PUBLIC_VIEW = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
_LOG2E = gl.constexpr(1.4426950408889634)
_LOWEST_SCORE = gl.constexpr(-3.4028234663852886e38)

_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16]))
_OUTPUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16]))
_SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))
_SHARED_PAIRS = gl.constexpr(gl.NVMMASharedLayout(128, 32, rank=2))
_DENSE = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0]))
_FLAGS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
# units of eight bytes, of 32 rows (fp4) or 16 (fp8): two side by side a thread, eight rows a warp, so that neither
# memory sees a conflict
_FP4_UNITS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 8], [0, 16]], [[1, 0], [2, 0], [4, 0], [0, 2], [0, 4]], [[8, 0], [16, 0]], [], [32, 32]
    )
)
_FP8_UNITS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 8], [0, 16]], [[1, 0], [2, 0], [4, 0], [0, 2], [0, 4]], [[8, 0], [0, 32]], [], [16, 64]
    )
)
_DECODERS = gl.constexpr(4)  # warps
_DECODER_REGISTERS = gl.constexpr(104)

# Eight words of two bf16 values from sixteen e2m1 codes ($8) times a pair of equal scales ($9): a code's three lower
# bits, at 8..6 of a bf16 number, are its value times 2^-126.
_NIBBLES = gl.constexpr(
    "{.reg .b32 w, v, a, s, u, t;\nmov.b64 {w, v}, $8;\nshr.u32 u, w, 4;\nshr.u32 t, v, 4;\n"
    + "".join(
        f"prmt.b32 a, {word}, {upper}, {0x4000 + 0x1010 * byte};\nshl.b32 s, a, 4;\nshr.u32 a, a, 2;\n"
        f"and.b32 a, a, 0x01C001C0;\nlop3.b32 a, s, 0x80008000, a, 0xEA;\nmul.rn.bf16x2 ${4 * half + byte}, a, $9;\n"
        for half, (word, upper) in enumerate((("w", "u"), ("v", "t")))
        for byte in range(4)
    )
    + "}"
)
# Four words from eight e4m3 codes ($4) and a pair of scales ($5): a code's lower bits, at 10..4, are its value times
# 2^-120. A NaN code makes the four values around it NaN; a score and with it the row's head is NaN either way.
_BYTES = gl.constexpr(
    "{.reg .b32 w, v, a, b, s, up;\n.reg .pred p;\nmov.b64 {w, v}, $4;\nmov.b32 up, 0x7B807B80;\n"
    + "".join(
        f"and.b32 a, {word}, 0x7F7F7F7F;\nadd.u32 a, a, 0x01010101;\nand.b32 a, a, 0x80808080;\n"
        "setp.ne.u32 p, a, 0;\nselp.b32 s, 0x7FC07FC0, $5, p;\n"
        + "".join(
            f"prmt.b32 a, {word}, 0, {select};\nshr.u32 b, a, 4;\nand.b32 b, b, 0x07F007F0;\n"
            "lop3.b32 a, a, 0x80008000, b, 0xEA;\nmul.rn.bf16x2 a, a, up;\n"
            f"mul.rn.bf16x2 ${2 * half + place}, a, s;\n"
            for place, select in enumerate((0x1404, 0x3424))
        )
        for half, word in enumerate(("w", "v"))
    )
    + "}"
)
# have the sector at $1 brought to the L2 cache, where $2 is not 0
_TO_L2 = gl.constexpr("{.reg .pred p;\nsetp.ne.s32 p, $2, 0;\n@p prefetch.global.L2 [$1];\nmov.b32 $0, 0;\n}")
_SECTORS = gl.constexpr(gl.BlockedLayout([1, 1], [4, 8], [4, 1], [1, 0]))
_A_ROW_EACH = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
_PREFETCHED = gl.constexpr(1024)  # rows a segment; all programs' together must fit the cache

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

    window_blocks = gl.cdiv(window_width, 64)
    each = gl.cdiv(window_blocks + gl.cdiv(extra_width, 64), splits)
    window_slots += token * window_slots_stride
    extra_slots += token * extra_slots_stride
    window_count = _count_of(window_lengths, window_lengths_stride, token, window_width, WINDOW_LENGTHS)
    extra_count = _count_of(extra_lengths, extra_lengths_stride, token, extra_width, EXTRA_LENGTHS)
    near = gl.minimum(split * each, window_blocks)
    near_last = gl.maximum(gl.minimum((split + 1) * each, gl.cdiv(window_count, 64)), near + 1)
    # past the split's own blocks nothing counts: the one padding block of a segment is empty
    window_count = gl.minimum(window_count, gl.minimum((split + 1) * each, window_blocks) * 64)
    far = gl.maximum(split * each - window_blocks, 0)
    far_last = gl.maximum(gl.minimum((split + 1) * each - window_blocks, gl.cdiv(extra_count, 64)), far + 1)
    extra_count = gl.minimum(extra_count, gl.maximum((split + 1) * each - window_blocks, 0) * 64)

    if EXTRA:
        blocks = near_last - near + far_last - far
    else:
        blocks = near_last - near
    queries = gl.allocate_shared_memory(gl.bfloat16, [64, 512], _SHARED)
    rows = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 512], _SHARED)
    shares = gl.allocate_shared_memory(gl.bfloat16, [64, 64], _SHARED)
    flags = gl.allocate_shared_memory(gl.int32, [2, 64], _FLAGS)  # whether a row is valid
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
                _decode_all,
                (
                    rows, flags, full, free,
                    window, window_page_stride, window_data_stride, window_slots, window_capacity, near, near_last,
                    window_count, extra, extra_page_stride, extra_data_stride, extra_slots, extra_capacity, far,
                    far_last, extra_count,
                    WINDOW_ENCODING, WINDOW_PAGE_SHIFT, WINDOW_DATA_STEP, WINDOW_SCALE_BASE, WINDOW_SCALE_STEP,
                    EXTRA_ENCODING, EXTRA_PAGE_SHIFT, EXTRA_DATA_STEP, EXTRA_SCALE_BASE, EXTRA_SCALE_STEP, EXTRA,
                ),
            ),
        ],
        [_DECODERS],
        [_DECODER_REGISTERS],
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
    _barrier()
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
        _barrier()  # the other warpgroup may still read its rows
        rows.index(0).store(output.to(gl.bfloat16))
        _barrier()
        head = first_head + gl.arange(0, 64, gl.SliceLayout(1, _DENSE))
        place = gl.arange(0, 512, gl.SliceLayout(0, _DENSE))
        at = out + ((to + head) * 512)[:, None] + place[None, :]
        gl.store(at, rows.index(0).load(_DENSE), mask=(head < heads)[:, None])


@gluon.jit
def _softmax(score, top, total, valid, scale, up):
    """bf16 shares of a block times `up`, the new maximum and sum, and by what earlier ones shrink."""
    score = score * (scale * up)
    score = gl.where(valid[None, :], gl.where(score < _LOWEST_SCORE, _LOWEST_SCORE, score), float("-inf"))
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
    _barrier()
    return hopper.warpgroup_mma(shares, rows.index(step % 2), output, is_async=True), top, total


@gluon.jit
def _score(pending, queries, rows, full, free, step):
    """Score the next block behind the product that is under way, and hand that one's buffer back."""
    mbarrier.wait(full.index(step % 2), (step // 2) & 1)
    nothing = gl.zeros([64, 64], gl.float32, _SCORES)
    scored = hopper.warpgroup_mma(queries, rows.index(step % 2).permute((1, 0)), nothing, use_acc=False, is_async=True)
    output = hopper.warpgroup_mma_wait(1, deps=(pending,))
    _barrier()
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


# --- the four warps that decode ---------------------------------------------------------------------------------------


@gluon.jit
def _codes(
    cache, page_stride, data_stride, slots, capacity, first, count, ENCODING: gl.constexpr, PAGE_SHIFT: gl.constexpr,
    DATA_STEP: gl.constexpr, SCALE_BASE: gl.constexpr, SCALE_STEP: gl.constexpr,
):  # fmt: skip
    """Units of eight bytes of the rows from the `first` on, and each unit's scale byte; zero if a row is not valid."""
    FP4: gl.constexpr = ENCODING == "v41_fp4"
    LAYOUT: gl.constexpr = _FP4_UNITS if FP4 else _FP8_UNITS
    slot, valid = _valid_slots(slots, capacity, first, count, 32 if FP4 else 16, gl.SliceLayout(1, LAYOUT))
    page, offset = (slot >> PAGE_SHIFT).to(gl.int64), (slot & ((1 << PAGE_SHIFT) - 1)).to(gl.int32)
    unit = gl.arange(0, 32 if FP4 else 64, gl.SliceLayout(0, LAYOUT))[None, :]
    at = cache.to(gl.pointer_type(gl.int64), bitcast=True)
    at = at + (page * data_stride + offset * (DATA_STEP // 8))[:, None] + unit
    units = gl.load(at, mask=valid[:, None], other=0)
    scales = cache + (page * page_stride + SCALE_BASE + offset * SCALE_STEP)[:, None]
    if FP4:
        scales = gl.load(scales + unit, mask=valid[:, None], other=0)
    else:
        scales = gl.load(scales + unit // 4, mask=valid[:, None], other=0)
    return units, scales


@gluon.jit
def _decode(words_of, first: gl.constexpr, units, scales, ENCODING: gl.constexpr):
    """Write rows as bf16 to shared memory, from row `first` of the block on; fp4 rows times 2^-8."""
    code = scales.to(gl.int32)
    if ENCODING == "v41_fp4":
        value = (((code & 0x7F) << 20) | ((code & 0x80) << 24)).to(gl.float32, bitcast=True) * 2.0**120 * 2.0**118
        bits = gl.where((code & 0x7F) == 0x7F, 0x7FC0, (value.to(gl.int32, bitcast=True) >> 16) & 0xFFFF)
        a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
            _NIBBLES, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,l,r", [units, bits | (bits << 16)], (gl.int32,) * 8,
            is_pure=True, pack=1,
        )  # fmt: skip
        even = gl.join(gl.join(a, e), gl.join(c, g))
        odd = gl.join(gl.join(b, f), gl.join(d, h))
    else:
        bits = gl.where(code == 255, 0x7FC0, gl.where(code == 0, 0x0040, code << 7))
        a, b, c, d = gl.inline_asm_elementwise(
            _BYTES, "=&r,=&r,=&r,=&r,l,r", [units, bits | (bits << 16)], (gl.int32,) * 4, is_pure=True, pack=1
        )
        even, odd = gl.join(a, c), gl.join(b, d)
    ROWS: gl.constexpr = 32 if ENCODING == "v41_fp4" else 16
    words_of.slice(first, ROWS).store(gl.reshape(gl.join(even, odd), [ROWS, 256]))


@gluon.jit
def _fill(
    rows, flags, full, free, step, cache, page_stride, data_stride, slots, capacity, block, count,
    ENCODING: gl.constexpr, PAGE_SHIFT: gl.constexpr, DATA_STEP: gl.constexpr, SCALE_BASE: gl.constexpr,
    SCALE_STEP: gl.constexpr,
):  # fmt: skip
    """Decode a block into the buffer of its step, as soon as that is free; codes are read before."""
    first, buffer = block * 64, step % 2
    SIZE: gl.constexpr = 32 if ENCODING == "v41_fp4" else 16
    _, valid = _valid_slots(slots, capacity, first, count, 64, _A_ROW_EACH)
    units, scales = _codes(
        cache, page_stride, data_stride, slots, capacity, first, count, ENCODING, PAGE_SHIFT, DATA_STEP, SCALE_BASE,
        SCALE_STEP,
    )  # fmt: skip
    mbarrier.wait(free.index(buffer), (step // 2 + 1) & 1)  # a new barrier lets the first round pass
    flags.index(buffer).store(valid.to(gl.int32))
    if _PUBLIC_VIEW:
        words_of = rows.index(buffer).reinterpret(gl.int32, [64, 256], _SHARED_PAIRS)
    else:
        words_of = rows.index(buffer)._reinterpret(gl.int32, [64, 256], _SHARED_PAIRS)
    for at in gl.static_range(SIZE, 64, SIZE):
        next_units, next_scales = _codes(
            cache, page_stride, data_stride, slots, capacity, first + at, count, ENCODING, PAGE_SHIFT, DATA_STEP,
            SCALE_BASE, SCALE_STEP,
        )  # fmt: skip
        _decode(words_of, at - SIZE, units, scales, ENCODING)
        units, scales = next_units, next_scales
    _decode(words_of, 64 - SIZE, units, scales, ENCODING)
    hopper.fence_async_shared()
    _barrier()
    mbarrier.arrive(full.index(buffer), count=1)


@gluon.jit
def _decode_all(
    rows, flags, full, free,
    window, window_page_stride, window_data_stride, window_slots, window_capacity, near, near_last,
    window_count, extra, extra_page_stride, extra_data_stride, extra_slots, extra_capacity, far,
    far_last, extra_count,
    WINDOW_ENCODING: gl.constexpr, WINDOW_PAGE_SHIFT: gl.constexpr, WINDOW_DATA_STEP: gl.constexpr,
    WINDOW_SCALE_BASE: gl.constexpr, WINDOW_SCALE_STEP: gl.constexpr, EXTRA_ENCODING: gl.constexpr,
    EXTRA_PAGE_SHIFT: gl.constexpr, EXTRA_DATA_STEP: gl.constexpr, EXTRA_SCALE_BASE: gl.constexpr,
    EXTRA_SCALE_STEP: gl.constexpr, EXTRA: gl.constexpr,
):  # fmt: skip
    # the slots are then in the L1 cache and the rows on their way to L2
    _prefetch(
        window, window_page_stride, window_slots, window_capacity, near, window_count,
        WINDOW_ENCODING, WINDOW_PAGE_SHIFT, WINDOW_DATA_STEP, WINDOW_SCALE_BASE, WINDOW_SCALE_STEP,
    )  # fmt: skip
    if EXTRA:
        _prefetch(
            extra, extra_page_stride, extra_slots, extra_capacity, far, extra_count,
            EXTRA_ENCODING, EXTRA_PAGE_SHIFT, EXTRA_DATA_STEP, EXTRA_SCALE_BASE, EXTRA_SCALE_STEP,
        )  # fmt: skip
    step = 0
    for block in range(near, near_last):
        _fill(
            rows, flags, full, free, step, window, window_page_stride, window_data_stride, window_slots,
            window_capacity, block, window_count,
            WINDOW_ENCODING, WINDOW_PAGE_SHIFT, WINDOW_DATA_STEP, WINDOW_SCALE_BASE, WINDOW_SCALE_STEP,
        )  # fmt: skip
        step += 1
    if EXTRA:
        for block in range(far, far_last):
            _fill(
                rows, flags, full, free, step, extra, extra_page_stride, extra_data_stride, extra_slots,
                extra_capacity, block, extra_count,
                EXTRA_ENCODING, EXTRA_PAGE_SHIFT, EXTRA_DATA_STEP, EXTRA_SCALE_BASE, EXTRA_SCALE_STEP,
            )  # fmt: skip
            step += 1


@gluon.jit
def _count_of(lengths, lengths_stride, token, width, LENGTHS: gl.constexpr):
    if LENGTHS:
        length = gl.load(lengths + token * lengths_stride).to(gl.int64)
        return gl.minimum(gl.maximum(length, 0), width).to(gl.int32)
    else:
        return width


@gluon.jit
def _valid_slots(slots, capacity, first, count, SIZE: gl.constexpr, layout: gl.constexpr):
    """SIZE slots from the `first` on, 0 in place of those that are not valid, and which are."""
    place = first + gl.arange(0, SIZE, layout)
    slot = gl.load(slots + place, mask=place < count, other=-1)
    valid = (slot >= 0) & (slot < capacity)
    return gl.where(valid, slot, 0), valid


@gluon.jit
def _prefetch(
    cache, page_stride, slots, capacity, block, count, ENCODING: gl.constexpr, PAGE_SHIFT: gl.constexpr,
    DATA_STEP: gl.constexpr, SCALE_BASE: gl.constexpr, SCALE_STEP: gl.constexpr,
):  # fmt: skip
    SECTORS: gl.constexpr = 8 if ENCODING == "v41_fp4" else 16
    for first in range(block * 64, gl.minimum(count, block * 64 + _PREFETCHED), 256):
        slot, valid = _valid_slots(slots, capacity, first, count, 256, gl.SliceLayout(1, _SECTORS))
        page, offset = (slot >> PAGE_SHIFT).to(gl.int64), slot & ((1 << PAGE_SHIFT) - 1)
        sector = 32 * gl.arange(0, SECTORS, gl.SliceLayout(0, _SECTORS))
        at = cache + (page * page_stride + offset * DATA_STEP)[:, None] + sector[None, :]
        wanted = valid[:, None].to(gl.int32) + 0 * sector[None, :]
        gl.inline_asm_elementwise(_TO_L2, "=r,l,r", [at, wanted], gl.int32, is_pure=False, pack=1)
        slot, valid = _valid_slots(slots, capacity, first, count, 256, _A_ROW_EACH)
        page, offset = (slot >> PAGE_SHIFT).to(gl.int64), slot & ((1 << PAGE_SHIFT) - 1)
        at = cache + page * page_stride + (SCALE_BASE + offset * SCALE_STEP)
        gl.inline_asm_elementwise(_TO_L2, "=r,l,r", [at, valid.to(gl.int32)], gl.int32, is_pure=False, pack=1)
