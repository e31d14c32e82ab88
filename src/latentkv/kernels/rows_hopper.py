"""Paged rows on Hopper: warps that decode V41 and V41_FP4 rows to bf16 in shared memory, for the kernels of `attend`.

Each block of 64 rows has a buffer, a barrier that says the buffer is full, and one that says it is free. fp4 rows stand
there times 2^-8, so that decoding is one multiplication in bf16. Groups of four warps take turns at the blocks.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

ENCODINGS = ("v41", "v41_fp4")  # of the layouts that are decoded here; the other ones take the portable kernel
# two names of Triton 3.6 are others in 3.9
PUBLIC_VIEW = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))
SHARED_PAIRS = gl.constexpr(gl.NVMMASharedLayout(128, 32, rank=2))
FLAGS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
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
DECODERS = gl.constexpr(4)  # warps of a group
DECODER_REGISTERS = gl.constexpr(104)

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


# --- which rows -------------------------------------------------------------------------------------------------------


@gluon.jit
def blocks_of_split(split, splits, window_width, extra_width, window_count, extra_count):
    """First and last block, and rows that count up to the split's end: of the window, then of the extra rows."""
    window_blocks = gl.cdiv(window_width, 64)
    each = gl.cdiv(window_blocks + gl.cdiv(extra_width, 64), splits)
    near = gl.minimum(split * each, window_blocks)
    near_last = gl.maximum(gl.minimum((split + 1) * each, gl.cdiv(window_count, 64)), near + 1)
    # past the split's own blocks nothing counts: the one padding block of a segment is empty
    window_count = gl.minimum(window_count, gl.minimum((split + 1) * each, window_blocks) * 64)
    far = gl.maximum(split * each - window_blocks, 0)
    far_last = gl.maximum(gl.minimum((split + 1) * each - window_blocks, gl.cdiv(extra_count, 64)), far + 1)
    extra_count = gl.minimum(extra_count, gl.maximum((split + 1) * each - window_blocks, 0) * 64)
    return near, near_last, window_count, far, far_last, extra_count


@gluon.jit
def count_of(lengths, lengths_stride, token, width, LENGTHS: gl.constexpr):
    if LENGTHS:
        length = gl.load(lengths + token * lengths_stride).to(gl.int64)
        return gl.minimum(gl.maximum(length, 0), width).to(gl.int32)
    else:
        return width


# --- decoding ---------------------------------------------------------------------------------------------------------


@gluon.jit
def _codes(
    cache, page_stride, data_stride, slots, capacity, first, count, ENCODING: gl.constexpr, PAGE_SHIFT: gl.constexpr,
    DATA_STEP: gl.constexpr, SCALE_BASE: gl.constexpr, SCALE_STEP: gl.constexpr,
):  # fmt: skip
    """Units of eight bytes of the rows from the `first` on, and each unit's scale byte; zero if a row is not valid."""
    FP4: gl.constexpr = ENCODING == "v41_fp4"
    LAYOUT: gl.constexpr = _FP4_UNITS if FP4 else _FP8_UNITS
    slot, valid = valid_slots(slots, capacity, first, count, 32 if FP4 else 16, gl.SliceLayout(1, LAYOUT))
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
    SCALE_STEP: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    """Decode a block into the buffer of its step, as soon as that is free; codes are read before."""
    first, buffer = block * 64, step % BUFFERS
    SIZE: gl.constexpr = 32 if ENCODING == "v41_fp4" else 16
    _, valid = valid_slots(slots, capacity, first, count, 64, _A_ROW_EACH)
    units, scales = _codes(
        cache, page_stride, data_stride, slots, capacity, first, count, ENCODING, PAGE_SHIFT, DATA_STEP, SCALE_BASE,
        SCALE_STEP,
    )  # fmt: skip
    mbarrier.wait(free.index(buffer), (step // BUFFERS + 1) & 1)  # a new barrier lets the first round pass
    flags.index(buffer).store(valid.to(gl.int32))
    words_of = reinterpreted(rows.index(buffer), gl.int32, [64, 256], SHARED_PAIRS)
    for at in gl.static_range(SIZE, 64, SIZE):
        next_units, next_scales = _codes(
            cache, page_stride, data_stride, slots, capacity, first + at, count, ENCODING, PAGE_SHIFT, DATA_STEP,
            SCALE_BASE, SCALE_STEP,
        )  # fmt: skip
        _decode(words_of, at - SIZE, units, scales, ENCODING)
        units, scales = next_units, next_scales
    _decode(words_of, 64 - SIZE, units, scales, ENCODING)
    hopper.fence_async_shared()
    barrier()
    mbarrier.arrive(full.index(buffer), count=1)


@gluon.jit
def decode_blocks(
    rows, flags, full, free,
    window, window_page_stride, window_data_stride, window_slots, window_capacity, near, near_last,
    window_count, extra, extra_page_stride, extra_data_stride, extra_slots, extra_capacity, far,
    far_last, extra_count,
    WINDOW_ENCODING: gl.constexpr, WINDOW_PAGE_SHIFT: gl.constexpr, WINDOW_DATA_STEP: gl.constexpr,
    WINDOW_SCALE_BASE: gl.constexpr, WINDOW_SCALE_STEP: gl.constexpr, EXTRA_ENCODING: gl.constexpr,
    EXTRA_PAGE_SHIFT: gl.constexpr, EXTRA_DATA_STEP: gl.constexpr, EXTRA_SCALE_BASE: gl.constexpr,
    EXTRA_SCALE_STEP: gl.constexpr, EXTRA: gl.constexpr, BUFFERS: gl.constexpr, GROUPS: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    """Decode every GROUPS-th block from the GROUP-th on: the window's, then the extra rows'."""
    # the slots are then in the L1 cache and the rows on their way to L2
    if GROUP == 0:
        _prefetch(
            window, window_page_stride, window_slots, window_capacity, near, window_count,
            WINDOW_ENCODING, WINDOW_PAGE_SHIFT, WINDOW_DATA_STEP, WINDOW_SCALE_BASE, WINDOW_SCALE_STEP,
        )  # fmt: skip
    if EXTRA and GROUP == GROUPS - 1:
        _prefetch(
            extra, extra_page_stride, extra_slots, extra_capacity, far, extra_count,
            EXTRA_ENCODING, EXTRA_PAGE_SHIFT, EXTRA_DATA_STEP, EXTRA_SCALE_BASE, EXTRA_SCALE_STEP,
        )  # fmt: skip
    step = GROUP
    for block in range(near + GROUP, near_last, GROUPS):
        _fill(
            rows, flags, full, free, step, window, window_page_stride, window_data_stride, window_slots,
            window_capacity, block, window_count,
            WINDOW_ENCODING, WINDOW_PAGE_SHIFT, WINDOW_DATA_STEP, WINDOW_SCALE_BASE, WINDOW_SCALE_STEP, BUFFERS,
        )  # fmt: skip
        step += GROUPS
    if EXTRA:
        for block in range(far + step - (near_last - near), far_last, GROUPS):
            _fill(
                rows, flags, full, free, step, extra, extra_page_stride, extra_data_stride, extra_slots,
                extra_capacity, block, extra_count,
                EXTRA_ENCODING, EXTRA_PAGE_SHIFT, EXTRA_DATA_STEP, EXTRA_SCALE_BASE, EXTRA_SCALE_STEP, BUFFERS,
            )  # fmt: skip
            step += GROUPS


@gluon.jit
def valid_slots(slots, capacity, first, count, SIZE: gl.constexpr, layout: gl.constexpr):
    """SIZE slots from the `first` on, 0 in place of those that are not valid, and which are."""
    place = first + gl.arange(0, SIZE, layout)
    slot = gl.load(slots + place, mask=place < count, other=-1)
    valid = (slot >= 0) & (slot < capacity)
    return gl.where(valid, slot, 0), valid


@gluon.jit
def reinterpreted(memory, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """Shared memory seen with another type, shape and layout."""
    if PUBLIC_VIEW:
        return memory.reinterpret(dtype, shape, layout)
    else:
        return memory._reinterpret(dtype, shape, layout)


@gluon.jit
def _prefetch(
    cache, page_stride, slots, capacity, block, count, ENCODING: gl.constexpr, PAGE_SHIFT: gl.constexpr,
    DATA_STEP: gl.constexpr, SCALE_BASE: gl.constexpr, SCALE_STEP: gl.constexpr,
):  # fmt: skip
    SECTORS: gl.constexpr = 8 if ENCODING == "v41_fp4" else 16
    for first in range(block * 64, gl.minimum(count, block * 64 + _PREFETCHED), 256):
        slot, valid = valid_slots(slots, capacity, first, count, 256, gl.SliceLayout(1, _SECTORS))
        page, offset = (slot >> PAGE_SHIFT).to(gl.int64), slot & ((1 << PAGE_SHIFT) - 1)
        sector = 32 * gl.arange(0, SECTORS, gl.SliceLayout(0, _SECTORS))
        at = cache + (page * page_stride + offset * DATA_STEP)[:, None] + sector[None, :]
        wanted = valid[:, None].to(gl.int32) + 0 * sector[None, :]
        gl.inline_asm_elementwise(_TO_L2, "=r,l,r", [at, wanted], gl.int32, is_pure=False, pack=1)
        slot, valid = valid_slots(slots, capacity, first, count, 256, _A_ROW_EACH)
        page, offset = (slot >> PAGE_SHIFT).to(gl.int64), slot & ((1 << PAGE_SHIFT) - 1)
        at = cache + page * page_stride + (SCALE_BASE + offset * SCALE_STEP)
        gl.inline_asm_elementwise(_TO_L2, "=r,l,r", [at, valid.to(gl.int32)], gl.int32, is_pure=False, pack=1)
