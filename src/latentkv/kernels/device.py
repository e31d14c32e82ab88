"""Device functions shared by the kernels: codecs in integer arithmetic, norm, rotation.

Each implements one rule of docs/numerics.md and has its twin in `latentkv.numerics`. Kernels that call them are
launched with `enable_fp_fusion=False`.

Rows travel as *pairs*: two fp32 tensors `re` and `im` with the even and the odd values, `[rows, pairs]` or
`[rows, groups, pairs of a group]`. A pair is one 32-bit word of bf16 memory, the two operands of a rotation, and one
byte of e2m1 codes, so nothing has to move between threads. A *narrow* value has 8 or 11 significant bits (bf16, fp16):
shorter encoders are exact for it, as tests/store shows for every value; NARROW is that number of bits, 0 for fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
NAN_BITS = tl.constexpr(0x7FC00000)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
MINUS_INF_ORDER = tl.constexpr(-2139095041)  # `in_order` of -Inf
TWO_POW_120 = tl.constexpr(2.0**120)
TWO_POW_M120 = tl.constexpr(2.0**-120)
TWO_POW_M14 = tl.constexpr(2.0**-14)
TWO_POW_126 = tl.constexpr(2.0**126)
TWO_POW_M126 = tl.constexpr(2.0**-126)
# what CAST allows: nothing, cvt.rn.bf16x2 (any CUDA device), also cvt.rn.satfinite.e4m3x2 (sm_90, where it is proven)
PORTABLE = tl.constexpr(0)
BF16_CAST = tl.constexpr(1)
E4M3_CAST = tl.constexpr(2)
TIE_GUARD = tl.constexpr(512)  # units of 2^-23 around an e2m1 midpoint that count as the tie


# --- launch overlap, bits, casts, pairs -------------------------------------------------------------------------------


@triton.jit
def begin(OVERLAP: tl.constexpr):
    """Wait for what the kernel reads. With OVERLAP (sm_90 and later) its launch ran beside the kernel before it."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def float_bits(x):
    """Bits of fp32 values as int32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def bits_float(bits):
    """fp32 values of int32 bits."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def flipped(bits):
    """Bits of floats as integers of the same order, -0 below +0; it is its own inverse."""
    return bits ^ ((bits >> 31) & MAGNITUDE)


@triton.jit
def in_order(x):
    """int32 in the order of fp32 values; a NaN counts as -Inf."""
    return tl.where(x == x, flipped(float_bits(x)), MINUS_INF_ORDER)


@triton.jit
def negated(x):
    """-x, also of zeros: Triton's minus is 0 - x."""
    return bits_float(float_bits(x) ^ -2147483648)


@triton.jit
def bf16_bits(x):
    """bf16 bits (as int32) of fp32 values, to nearest even; a NaN keeps its upper bits."""
    bits = float_bits(x).to(tl.uint32, bitcast=True)
    nan = (bits >> 16) | tl.where((bits & 0xFFFF) != 0, 0x40, 0)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, nan, rounded).to(tl.int32)


@triton.jit
def settle_nan(x):
    """Every NaN as 0x7FC00000; twin of numerics.canonical_nan."""
    return tl.where(x == x, x, bits_float(tl.full(x.shape, NAN_BITS, tl.int32)))


@triton.jit
def to_bf16(x):
    """fp32 to bf16, to nearest even; the interpreter's own cast truncates."""
    if INTERPRETED:
        return bf16_bits(x).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def to_fp32(x):
    """bf16, fp16 or fp32 to fp32, exactly; the interpreter's own cast flushes subnormal bf16 values."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        return bits_float(x.to(tl.uint16, bitcast=True).to(tl.int32) << 16)
    else:
        return x.to(tl.float32)


@triton.jit
def to_dtype(x, dtype: tl.constexpr):
    """fp32 to bf16, fp16 or fp32, to nearest even."""
    if dtype == tl.bfloat16:
        return to_bf16(x)
    else:
        return x.to(dtype)


@triton.jit
def split_bf16(word):
    """fp32 (re, im) of words of two bf16 values."""
    return bits_float(word << 16), bits_float(word & -65536)


@triton.jit
def split_words(word, dtype: tl.constexpr):
    """fp32 (re, im) of words of two values of `dtype`."""
    if dtype == tl.bfloat16:
        return split_bf16(word)
    elif dtype == tl.float16:
        low = (word & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
        return low.to(tl.float32), (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return bits_float((word & 0xFFFFFFFF).to(tl.int32)), bits_float((word >> 32).to(tl.int32))


@triton.jit
def join_bf16(re, im, CAST: tl.constexpr):
    """Words of two fp32 values rounded to bf16."""
    if CAST == PORTABLE:
        low = to_bf16(re).to(tl.uint16, bitcast=True).to(tl.int32)
        return low | (to_bf16(im).to(tl.uint16, bitcast=True).to(tl.int32) << 16)
    else:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [re, im], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def round_pairs(re, im, dtype: tl.constexpr, CAST: tl.constexpr):
    """Round fp32 pairs to a dtype, kept as fp32."""
    if dtype == tl.bfloat16:
        return split_bf16(join_bf16(re, im, CAST))
    else:
        return re.to(dtype).to(tl.float32), im.to(dtype).to(tl.float32)


@triton.jit
def pair_pointer(base, WORDS: tl.constexpr):
    """`base` as a pointer to pairs (one word each), or as it is where pairs are not aligned words."""
    if WORDS:
        if base.dtype.element_ty.primitive_bitwidth == 16:
            return base.to(tl.pointer_type(tl.int32))
        else:
            return base.to(tl.pointer_type(tl.int64))
    else:
        return base


@triton.jit
def load_pairs(at, step, pair, mask, dtype: tl.constexpr, WORDS: tl.constexpr):
    """Load fp32 (re, im) of pairs.

    `at` is `pair_pointer(base)`; `step` the row's offset in pairs (WORDS) or in values; masked pairs are zero.
    """
    if WORDS:
        return split_words(tl.load(at + step + pair, mask=mask, other=0), dtype)
    else:
        re = tl.load(at + step + 2 * pair, mask=mask, other=0.0)
        im = tl.load(at + step + 2 * pair + 1, mask=mask, other=0.0)
        return to_fp32(re), to_fp32(im)


@triton.jit
def store_pairs(at, step, pair, re, im, mask, dtype: tl.constexpr, WORDS: tl.constexpr, CAST: tl.constexpr):
    """Round fp32 pairs to `dtype` and store them; arguments as in `load_pairs`."""
    if WORDS:
        if dtype == tl.float32:
            low = float_bits(re).to(tl.int64) & 0xFFFFFFFF
            tl.store(at + step + pair, low | (float_bits(im).to(tl.int64) << 32), mask=mask)
        elif dtype == tl.bfloat16:
            tl.store(at + step + pair, join_bf16(re, im, CAST), mask=mask)
        else:
            low = re.to(dtype).to(tl.uint16, bitcast=True).to(tl.int32)
            high = im.to(dtype).to(tl.uint16, bitcast=True).to(tl.int32)
            tl.store(at + step + pair, low | (high << 16), mask=mask)
    else:
        tl.store(at + step + 2 * pair, to_dtype(re, dtype), mask=mask)
        tl.store(at + step + 2 * pair + 1, to_dtype(im, dtype), mask=mask)


@triton.jit
def store_bf16_words(at, step, pair, word, mask, WORDS: tl.constexpr):
    """Store pairs given as `join_bf16`'s words; arguments as in `load_pairs`."""
    if WORDS:
        tl.store(at + step + pair, word, mask=mask)
    else:
        tl.store(at + step + 2 * pair, word.to(tl.int16).to(tl.bfloat16, bitcast=True), mask=mask)
        tl.store(at + step + 2 * pair + 1, (word >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), mask=mask)


# --- e4m3 and ue8m0 ---------------------------------------------------------------------------------------------------


@triton.jit
def ceil_exponent(x):
    """Biased exponent of the smallest power of two >= x, x positive and normal."""
    bits = float_bits(x)
    return (bits >> 23) + tl.where((bits & 0x7FFFFF) != 0, 1, 0)


@triton.jit
def power_of_two(exponent):
    """2^(exponent - 127) of a biased exponent 1..254."""
    return bits_float(exponent << 23)


@triton.jit
def e4m3_encode(x, NARROW: tl.constexpr):
    """e4m3fn byte (as int32) of |x| < 464, to nearest even."""
    if NARROW:
        # at 2^-120 e4m3's subnormals are fp32's, so one rounding at bit 20 serves both ranges
        bits = float_bits(x * TWO_POW_M120).to(tl.uint32, bitcast=True)
        code = (bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20
        return ((code & 0x7F) | ((code >> 4) & 0x80)).to(tl.int32)
    else:
        bits = float_bits(x)
        magnitude = bits & MAGNITUDE
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960
        # 2^14 has an ulp of 2^-9, e4m3's smallest step
        subnormal = float_bits(bits_float(magnitude) + 16384.0) - 0x46800000
        return tl.where(magnitude < 0x3C800000, subnormal, normal) | ((bits >> 24) & 0x80)


@triton.jit
def e4m3_pair(re, im, NARROW: tl.constexpr, CAST: tl.constexpr):
    """e4m3fn bytes of two values of at most 448 as one int32 word, `re` in the low byte."""
    if CAST == E4M3_CAST:
        return tl.inline_asm_elementwise(
            "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;", "=h,f,f", [re, im], dtype=tl.int16, is_pure=True, pack=1
        ).to(tl.int32)
    else:
        return e4m3_encode(re, NARROW) | (e4m3_encode(im, NARROW) << 8)


@triton.jit
def e4m3_decode(code):
    """fp32 values of e4m3fn bytes given as int32; 0x7F and 0xFF are NaN."""
    magnitude = code & 0x7F
    value = bits_float((magnitude << 20) | ((code & 0x80) << 24)) * TWO_POW_120
    return tl.where(magnitude == 0x7F, float("nan"), value)


@triton.jit
def ue8m0_decode(exponent):
    """fp32 values of ue8m0 bytes given as int32: 0 is 2^-127, 255 is NaN."""
    bits = tl.where(exponent == 0, 0x00400000, exponent << 23)
    return bits_float(tl.where(exponent == 255, NAN_BITS, bits))


# --- e2m1 -------------------------------------------------------------------------------------------------------------


@triton.jit
def e2m1_compare(a):
    """e2m1 code 0..7 (as int32) of a >= 0, ties to the even code, saturating at 6, for any fp32."""
    code = tl.where(a > 0.25, 1, 0) + tl.where(a >= 0.75, 1, 0) + tl.where(a > 1.25, 1, 0)
    code += tl.where(a >= 1.75, 1, 0) + tl.where(a > 2.5, 1, 0) + tl.where(a >= 3.5, 1, 0)
    return code + tl.where(a > 5.0, 1, 0)


@triton.jit
def e2m1_narrow(a):
    """e2m1 code 0..7 (as int32) of |a|, ties to the even code, saturating at 6.

    `a` is a narrow value divided by an e4m3 number or a power of two, and may be off by a few units in the last place:
    the exact quotient is a midpoint or at least 2^-12 of its size away from one, so the guard sends a blurred midpoint
    to its even side.
    """
    bits = float_bits(tl.minimum(tl.abs(a), 6.0) * TWO_POW_M126)  # the code is bits 22.. of this number
    return (bits + (0x200000 - TIE_GUARD) + ((bits >> 12) & (2 * TIE_GUARD))) >> 22


# Four pairs to four bytes: both values of a pair in fp16 at 2^-14, where an e2m1 code is bits 9.. of a half (rounding
# to 11 bits makes a blurred midpoint exact), clamped to 6 with the sign kept, rounded, and the nibbles gathered.
_E2M1_PAIRS_SM90: tl.constexpr = tl.constexpr("""{
.reg .b32 a, b, c, d, s, t, six;
mov.b32 six, 0x0E000E00;
cvt.rn.f16x2.f32 a, $5, $1;  and.b32 a, a, $9;   min.xorsign.abs.f16x2 a, a, six;
cvt.rn.f16x2.f32 b, $6, $2;  and.b32 b, b, $10;  min.xorsign.abs.f16x2 b, b, six;
cvt.rn.f16x2.f32 c, $7, $3;  and.b32 c, c, $11;  min.xorsign.abs.f16x2 c, c, six;
cvt.rn.f16x2.f32 d, $8, $4;  and.b32 d, d, $12;  min.xorsign.abs.f16x2 d, d, six;
shr.u32 t, a, 9;  and.b32 t, t, 0x00010001;  add.u32 a, a, t;  add.u32 a, a, 0x00FF00FF;
shr.u32 t, b, 9;  and.b32 t, t, 0x00010001;  add.u32 b, b, t;  add.u32 b, b, 0x00FF00FF;
shr.u32 t, c, 9;  and.b32 t, t, 0x00010001;  add.u32 c, c, t;  add.u32 c, c, 0x00FF00FF;
shr.u32 t, d, 9;  and.b32 t, t, 0x00010001;  add.u32 d, d, t;  add.u32 d, d, 0x00FF00FF;
prmt.b32 a, a, b, 0x7531;
prmt.b32 c, c, d, 0x7531;
shr.u32 s, a, 4;  and.b32 s, s, 0x08080808;  shr.u32 t, a, 1;  and.b32 t, t, 0x07070707;  or.b32 a, s, t;
shr.u32 s, c, 4;  and.b32 s, s, 0x08080808;  shr.u32 t, c, 1;  and.b32 t, t, 0x07070707;  or.b32 c, s, t;
shr.u32 t, a, 4;  or.b32 a, a, t;
shr.u32 t, c, 4;  or.b32 c, c, t;
prmt.b32 $0, a, c, 0x6420;
}""")


@triton.jit
def e2m1_bytes(re, im, inverse, bad, NARROW: tl.constexpr, CAST: tl.constexpr):
    """Bytes (uint8) of two e2m1 codes, signs kept, of narrow pairs times `inverse`, as `e2m1_narrow` takes them.

    Groups that are `bad` get codes 0. Eight significant bits allow the rounding to fp16 of the sm_90 form.
    """
    if CAST == E4M3_CAST and NARROW == 8:
        inverse = inverse * TWO_POW_M14
        keep = tl.broadcast_to(tl.where(bad, 0, -1), re.shape)
        return tl.inline_asm_elementwise(
            _E2M1_PAIRS_SM90, "=r,f,f,f,f,f,f,f,f,r,r,r,r", [re * inverse, im * inverse, keep], tl.uint8, is_pure=True,
            pack=4,
        )  # fmt: skip
    else:
        low = e2m1_narrow(re * inverse) | ((float_bits(re) >> 28) & 8)
        byte = low | (e2m1_narrow(im * inverse) << 4) | ((float_bits(im) >> 24) & 0x80)
        return tl.where(bad, 0, byte).to(tl.uint8)


@triton.jit
def e2m1_decode(code):
    """fp32 values of e2m1 codes 0..15 given as int32; code 8 is -0."""
    return bits_float(((code & 7) << 22) | ((code & 8) << 28)) * TWO_POW_126


# --- norm and rotation ------------------------------------------------------------------------------------------------


@triton.jit
def rsqrt_rn(x):
    """1 / sqrt(x), rounded from a value good to 2^-50 (the hardware's estimate and one fp64 step)."""
    estimate = tl.rsqrt(x)
    y = estimate.to(tl.float64)
    e = 1.0 - x.to(tl.float64) * y * y
    y = y + y * e * (0.5 + 0.375 * e)
    return tl.where((x > 0) & (x < float("inf")), y.to(tl.float32), estimate)


@triton.jit
def sum_rows(x):
    """Sum of each row of [rows, 32] values, neighbours first: an order that no layout changes."""
    ROWS: tl.constexpr = x.shape[0]
    x = tl.sum(tl.reshape(x, [ROWS, 16, 2]), axis=2)
    x = tl.sum(tl.reshape(x, [ROWS, 8, 2]), axis=2)
    x = tl.sum(tl.reshape(x, [ROWS, 4, 2]), axis=2)
    x = tl.sum(tl.reshape(x, [ROWS, 2, 2]), axis=2)
    return tl.sum(x, axis=1)


@triton.jit
def rotate(re, im, cos, sin):
    """Rotate pairs by angles, every product rounded on its own."""
    return re * cos - im * sin, re * sin + im * cos


# --- exponential ------------------------------------------------------------------------------------------------------


@triton.jit
def exp_nonpositive(x):
    """e^x of x <= 0, NaN kept, by the rounded operations of its twin numerics.exp_nonpositive."""
    shifted = x * 1.4426950408889634 + 12582912.0  # 1.5 * 2^23: the sum rounds to an integer, held in its low bits
    n = shifted - 12582912.0
    r = x - n * 0.693145751953125 - n * 1.42860682030941723e-06
    p = r * (1 / 5040) + (1 / 720)
    p = p * r + (1 / 120)
    p = p * r + (1 / 24)
    p = p * r + (1 / 6)
    p = p * r + 0.5
    p = p * r + 1.0
    p = p * r + 1.0
    value = p * bits_float((float_bits(shifted) << 23) + 0x3F800000)
    return tl.where(x < -87.0, 0.0, value)
