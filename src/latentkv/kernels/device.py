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
INF_BITS = tl.constexpr(0x7F800000)
NAN_BITS = tl.constexpr(0x7FC00000)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
MINUS_INF_ORDER = tl.constexpr(-2139095041)  # `in_order` of -Inf
TWO_POW_120 = tl.constexpr(2.0**120)
TWO_POW_M120 = tl.constexpr(2.0**-120)
TWO_POW_M14 = tl.constexpr(2.0**-14)
TWO_POW_126 = tl.constexpr(2.0**126)
TWO_POW_M126 = tl.constexpr(2.0**-126)
ONE_SIXTH = tl.constexpr(0.16666667163372040)  # fp32
ONE_448TH = tl.constexpr(0.0022321429569274187)  # fp32
E2M1_MAX_ALIGNED = tl.constexpr(6.0 * 2.0**-126)
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


# --- group quantizers of pairs [rows, groups, pairs of a group], twins of numerics.quantize ---------------------------


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def group_max_bits(re, im):
    """Bits of the largest magnitude of each group; a NaN counts as the largest."""
    if INTERPRETED:  # it has no fast reduction with a NaN rule; integers order NaN above Inf by themselves
        return tl.max(tl.maximum(float_bits(re) & MAGNITUDE, float_bits(im) & MAGNITUDE), axis=2)
    else:
        top = tl.reduce(_larger(tl.abs(re), tl.abs(im)), 2, _larger)
        return float_bits(top) & MAGNITUDE


@triton.jit
def quantize_v41(re, im, NARROW: tl.constexpr, CAST: tl.constexpr):
    """e4m3 words [rows, groups, pairs] and ue8m0 bytes [rows, groups] of groups of 32 (int32 both)."""
    top = group_max_bits(re, im)
    exponent = (top >> 23) - 8 + tl.where((top & 0x7FFFFF) > 0x600000, 1, 0)
    return _scaled_e4m3(re, im, top, tl.maximum(exponent, 114), NARROW, CAST)


@triton.jit
def quantize_v4(re, im, NARROW: tl.constexpr, CAST: tl.constexpr):
    """e4m3 words and ue8m0 bytes of groups of 64 (int32 both); the floor acts before the division."""
    top = group_max_bits(re, im)
    amax = tl.maximum(bits_float(tl.where(top >= INF_BITS, 0, top)), 1e-4)
    if NARROW:  # the exponent is that of the division for every narrow value
        exponent = ceil_exponent(amax * ONE_448TH)
    else:
        exponent = ceil_exponent(tl.div_rn(amax, tl.full(amax.shape, 448.0, tl.float32)))
    return _scaled_e4m3(re, im, top, exponent, NARROW, CAST)


@triton.jit
def _scaled_e4m3(re, im, top, exponent, NARROW: tl.constexpr, CAST: tl.constexpr):
    bad = top >= INF_BITS
    inverse = power_of_two(254 - tl.minimum(exponent, 253))[:, :, None]
    word = e4m3_pair(re * inverse, im * inverse, NARROW, CAST)
    return tl.where(bad[:, :, None], 0x7F7F, word), tl.where(bad, 255, exponent)


@triton.jit
def latent_scale_code(top, NARROW: tl.constexpr, CAST: tl.constexpr):
    """e4m3 scale byte (int32) of groups of 16, from the bits of their largest magnitude (not NaN)."""
    amax = bits_float(top)
    if CAST == E4M3_CAST and NARROW:
        sixth = tl.maximum(amax * ONE_SIXTH, 0.001953125)
        return e4m3_pair(sixth, sixth, NARROW, CAST) & 0x7F
    if NARROW:  # the rounded scale is that of the division for every narrow value
        sixth = amax * ONE_SIXTH
    else:
        sixth = tl.div_rn(amax, tl.full(amax.shape, 6.0, tl.float32))
    return e4m3_encode(tl.minimum(tl.maximum(sixth, 0.001953125), 448.0), NARROW)


@triton.jit
def reciprocal(x, CAST: tl.constexpr):
    """1 / x of normal numbers, off by a few units in the last place."""
    if CAST == E4M3_CAST:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        return 1.0 / x


@triton.jit
def quantize_v41_fp4(re, im, NARROW: tl.constexpr, CAST: tl.constexpr):
    """e2m1 bytes (uint8) [rows, groups, pairs] and e4m3 scale bytes (int32) [rows, groups] of groups of 16."""
    top = group_max_bits(re, im)
    bad = top > INF_BITS
    scale_code = latent_scale_code(tl.where(bad, 0, top), NARROW, CAST)
    scale = (bits_float(scale_code << 20) * TWO_POW_120)[:, :, None]
    if NARROW:
        byte = e2m1_bytes(re, im, reciprocal(scale, CAST), bad[:, :, None], NARROW, CAST)
    else:
        divisor = tl.broadcast_to(scale, re.shape)
        byte = _compared_bytes(tl.div_rn(re, divisor), tl.div_rn(im, divisor), bad[:, :, None])
    return byte, tl.where(bad, 0x7F, scale_code)


@triton.jit
def power_scale_exponent(top, NARROW: tl.constexpr):
    """Biased exponent (int32) of ceil(max / 6) for groups of 32, from finite magnitude bits."""
    amax = tl.maximum(bits_float(top), E2M1_MAX_ALIGNED)
    if NARROW:
        return ceil_exponent(amax * ONE_SIXTH)
    else:
        return ceil_exponent(tl.div_rn(amax, tl.full(amax.shape, 6.0, tl.float32)))


@triton.jit
def quantize_v41_mxfp4(re, im, NARROW: tl.constexpr, CAST: tl.constexpr):
    """e2m1 bytes (uint8) and ue8m0 scale bytes (int32) of groups of 32."""
    top = group_max_bits(re, im)
    bad = top >= INF_BITS
    exponent = power_scale_exponent(tl.where(bad, 0, top), NARROW)
    inverse = power_of_two(254 - exponent)[:, :, None]
    if NARROW:
        byte = e2m1_bytes(re, im, inverse, bad[:, :, None], NARROW, CAST)
    else:
        byte = _compared_bytes(re * inverse, im * inverse, bad[:, :, None])
    return byte, tl.where(bad, 255, exponent)


@triton.jit
def _compared_bytes(re, im, bad):
    low = e2m1_compare(tl.abs(re)) | ((float_bits(re) >> 28) & 8)
    byte = low | (e2m1_compare(tl.abs(im)) << 4) | ((float_bits(im) >> 24) & 0x80)
    return tl.where(bad, 0, byte).to(tl.uint8)


@triton.jit
def fake_quant_latent(re, im, NARROW: tl.constexpr):
    """Quantize and dequantize groups of 16 with an e4m3 scale; twin of numerics.fake_quant_latent."""
    top = group_max_bits(re, im)
    bad = top > INF_BITS
    scale = e4m3_decode(latent_scale_code(tl.where(bad, 0, top), NARROW, PORTABLE))[:, :, None]
    if NARROW:
        inverse = 1.0 / scale
        re, im = re * inverse, im * inverse
    else:
        divisor = tl.broadcast_to(scale, re.shape)
        re, im = tl.div_rn(re, divisor), tl.div_rn(im, divisor)
    return _on_grid(re, scale, bad, NARROW), _on_grid(im, scale, bad, NARROW)


# Two values times the inverse scale on e2m1's grid, as in `_E2M1_PAIRS_SM90`, then times $4 * 2^7 and in e4m3. Adding
# +0 in the product makes -0 a +0 and keeps the sign of what only rounds to zero.
_E2M1_TO_E4M3_SM90: tl.constexpr = tl.constexpr("""{
.reg .f32 x, y;
.reg .b32 a, t, six, step;
mov.b32 six, 0x0E000E00;  mov.b32 step, 0x58005800;
fma.rn.f32 x, $1, $3, 0f00000000;  fma.rn.f32 y, $2, $3, 0f00000000;
cvt.rn.f16x2.f32 a, y, x;  min.xorsign.abs.f16x2 a, a, six;
shr.u32 t, a, 9;  and.b32 t, t, 0x00010001;  add.u32 a, a, t;  add.u32 a, a, 0x00FF00FF;  and.b32 a, a, 0xFE00FE00;
mul.rn.f16x2 a, a, step;  mul.rn.f16x2 a, a, $4;
cvt.rn.satfinite.e4m3x2.f16x2 $0, a;
}""")


@triton.jit
def quantize_latent_v41(re, im):
    """`quantize_v41` of `fake_quant_latent` of bf16 pairs [rows, groups of 16, 8], in the sm_90 form of both.

    A group's largest quantized magnitude is six times its scale, or so small that the exponent is 114 anyway.
    """
    ROWS: tl.constexpr = re.shape[0]
    GROUPS: tl.constexpr = re.shape[1]
    top = group_max_bits(re, im)
    bad = tl.max(tl.reshape((top > INF_BITS).to(tl.int32), [ROWS, GROUPS // 2, 2]), axis=2)
    code = latent_scale_code(tl.where(top > INF_BITS, 0, top), 8, E4M3_CAST)
    scale = bits_float(code << 20) * TWO_POW_120
    amax = float_bits(tl.max(tl.reshape(scale, [ROWS, GROUPS // 2, 2]), axis=2) * 6.0)
    exponent = tl.maximum((amax >> 23) - 8 + tl.where((amax & 0x7FFFFF) > 0x600000, 1, 0), 114)
    ratio = tl.reshape(scale, [ROWS, GROUPS // 2, 2]) * power_of_two(254 - exponent)[:, :, None]
    half = (ratio * 128.0).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    half = tl.reshape(half | (half << 16), [ROWS, GROUPS])[:, :, None]
    inverse = (reciprocal(scale, E4M3_CAST) * TWO_POW_M14)[:, :, None]
    word = tl.inline_asm_elementwise(
        _E2M1_TO_E4M3_SM90, "=h,f,f,f,r",
        [re, im, tl.broadcast_to(inverse, re.shape), tl.broadcast_to(half, re.shape)], tl.int16, is_pure=True, pack=1,
    ).to(tl.int32)  # fmt: skip
    word = tl.reshape(word, [ROWS, GROUPS // 2, 16])
    return tl.where(bad[:, :, None] != 0, 0x7F7F, word), tl.where(bad != 0, 255, exponent)


@triton.jit
def fake_quant_index(re, im, NARROW: tl.constexpr):
    """Quantize and dequantize groups of 32 with a power-of-two scale; twin of numerics.fake_quant_index."""
    top = group_max_bits(re, im)
    bad = top >= INF_BITS
    amax = tl.maximum(bits_float(tl.where(bad, 0, top)), E2M1_MAX_ALIGNED)
    exponent = tl.minimum(tl.maximum(ceil_exponent(amax * ONE_SIXTH), 1), 253)
    scale = power_of_two(exponent)[:, :, None]
    inverse = power_of_two(254 - exponent)[:, :, None]
    return _on_grid(re * inverse, scale, bad, NARROW), _on_grid(im * inverse, scale, bad, NARROW)


@triton.jit
def quantize_index(re, im, HALF_EVEN: tl.constexpr, NARROW: tl.constexpr):
    """Pack stage alone: e2m1 bytes (uint8) and ue8m0 bytes (int32) of groups of 32. A zero has no sign.

    Twin of numerics.quantize_index.
    """
    top = group_max_bits(re, im)
    bad = top >= INF_BITS
    # 6 is 1.5 * 2^2: the exponent of ceil(max / 6) steps where the mantissa exceeds 1.5, also after rounded division
    exponent = tl.maximum(((tl.where(bad, 0, top) + 0x3FFFFF) >> 23) - 2, 114)
    inverse = power_of_two(254 - exponent)[:, :, None]
    byte = _index_code(re * inverse, HALF_EVEN, NARROW) | (_index_code(im * inverse, HALF_EVEN, NARROW) << 4)
    return tl.where(bad[:, :, None], 0, byte).to(tl.uint8), tl.where(bad, 255, exponent)


@triton.jit
def _index_code(x, HALF_EVEN: tl.constexpr, NARROW: tl.constexpr):
    a = tl.abs(x)
    if NARROW:  # at 2^-126 a code is bits 22.. of the number, and no narrow one near a tie loses bits there
        bits = float_bits(a * TWO_POW_M126) + 0x1FFFFF
        if HALF_EVEN:
            bits += ((bits - 0x1FFFFF) >> 22) & 1
        code = bits >> 22
    elif HALF_EVEN:
        code = e2m1_compare(a)
    else:
        code = tl.where(a > 0.25, 1, 0) + tl.where(a > 0.75, 1, 0) + tl.where(a > 1.25, 1, 0)
        code += tl.where(a > 1.75, 1, 0) + tl.where(a > 2.5, 1, 0) + tl.where(a > 3.5, 1, 0) + tl.where(a > 5.0, 1, 0)
    return tl.where(code != 0, code | ((float_bits(x) >> 28) & 8), 0)


@triton.jit
def quantize_index_twice(re, im):
    """`quantize_index` of `fake_quant_index` of bf16 pairs, ties to even, in one step.

    The second stage sees values of the first one's grid, the largest 3, 4 or 6 times its scale, so that all it does
    follows from how far the two exponents are apart: -1 where the largest became 3, more below the floor 114, else 0.
    Each distance is a table from first to second codes, eight nibbles of a word, bit 3 set where the sign is kept.
    """
    top = group_max_bits(re, im)
    bad = top >= 0x7F600000  # from 1.75 * 2^127 on, which the first stage rounds to infinity
    first = tl.maximum(((top + 0x3FFFFF) >> 23) - 2, 1)
    exponent = tl.maximum(((top + 0x200000) >> 23) - 2, 114)  # 3.5 becomes 4, and 3.5 is 1.75 * 2
    apart = tl.where(bad, 9, exponent - first)
    table = tl.where(apart == 4, _entry(apart, 0x90000000), _entry(apart, 0))
    table = tl.where(apart == 3, _entry(apart, 0xA9900000), table)
    table = tl.where(apart == 2, _entry(apart, 0xBAA99000), table)
    table = tl.where(apart == 1, _entry(apart, 0xDCBAA900), table)
    table = tl.where(apart == 0, _entry(apart, 0xFEDCBA90), table)
    table = tl.where(apart < 0, _entry(apart, 0x00FEDCA0), table)[:, :, None]
    inverse = power_of_two(254 - tl.where(bad, 127, first))[:, :, None]
    byte = _second_code(re, inverse, table) | (_second_code(im, inverse, table) << 4)
    return byte.to(tl.uint8), tl.where(bad, 255, exponent)


@triton.jit
def _entry(like, VALUE: tl.constexpr):
    return tl.full(like.shape, VALUE, tl.uint32)


@triton.jit
def _second_code(x, inverse, table):
    """Signed code (uint32) of a narrow value: its first code, bits 22.. of the quotient at 2^-126, through `table`."""
    bits = float_bits(tl.abs(x * inverse) * TWO_POW_M126)
    first = (bits + 0x1FFFFF + ((bits >> 22) & 1)) >> 20  # times four
    return (table >> (first & 28).to(tl.uint32)) & ((float_bits(x).to(tl.uint32, bitcast=True) >> 28) | 7)


@triton.jit
def _on_grid(quotient, scale, bad, NARROW: tl.constexpr):
    if NARROW:
        code = e2m1_narrow(quotient)
    else:
        code = e2m1_compare(tl.abs(quotient))
    value = e2m1_decode(code) * scale
    # a -0 quotient counts as +0, a negative one that rounds to zero becomes -0
    return tl.where(bad[:, :, None], float("nan"), tl.where(quotient < 0, negated(value), value))


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
def rms_scale(re, im, eps, WIDTH: tl.constexpr):
    """1 / sqrt(mean(x^2) + eps) of each row of pairs [rows, WIDTH / 2]."""
    return rsqrt_rn(tl.sum(re * re + im * im, axis=1) * (1.0 / WIDTH) + eps)


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
