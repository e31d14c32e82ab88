"""Group quantizers shared by the kernels, twins of `latentkv.numerics.quantize`.

They take pairs `[rows, groups, pairs of a group]`; what pairs are, and NARROW and CAST, says device.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from latentkv.kernels import device as dev

INF_BITS = tl.constexpr(0x7F800000)
ONE_SIXTH = tl.constexpr(0.16666667163372040)  # fp32
ONE_448TH = tl.constexpr(0.0022321429569274187)  # fp32
E2M1_MAX_ALIGNED = tl.constexpr(6.0 * 2.0**-126)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def group_max_bits(re, im):
    """Bits of the largest magnitude of each group; a NaN counts as the largest."""
    if dev.INTERPRETED:  # it has no fast reduction with a NaN rule; integers order NaN above Inf by themselves
        return tl.max(tl.maximum(dev.float_bits(re) & dev.MAGNITUDE, dev.float_bits(im) & dev.MAGNITUDE), axis=2)
    else:
        top = tl.reduce(_larger(tl.abs(re), tl.abs(im)), 2, _larger)
        return dev.float_bits(top) & dev.MAGNITUDE


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
    amax = tl.maximum(dev.bits_float(tl.where(top >= INF_BITS, 0, top)), 1e-4)
    if NARROW:  # the exponent is that of the division for every narrow value
        exponent = dev.ceil_exponent(amax * ONE_448TH)
    else:
        exponent = dev.ceil_exponent(tl.div_rn(amax, tl.full(amax.shape, 448.0, tl.float32)))
    return _scaled_e4m3(re, im, top, exponent, NARROW, CAST)


@triton.jit
def _scaled_e4m3(re, im, top, exponent, NARROW: tl.constexpr, CAST: tl.constexpr):
    bad = top >= INF_BITS
    inverse = dev.power_of_two(254 - tl.minimum(exponent, 253))[:, :, None]
    word = dev.e4m3_pair(re * inverse, im * inverse, NARROW, CAST)
    return tl.where(bad[:, :, None], 0x7F7F, word), tl.where(bad, 255, exponent)


@triton.jit
def latent_scale_code(top, NARROW: tl.constexpr, CAST: tl.constexpr):
    """e4m3 scale byte (int32) of groups of 16, from the bits of their largest magnitude (not NaN)."""
    amax = dev.bits_float(top)
    if CAST == dev.E4M3_CAST and NARROW:
        sixth = tl.maximum(amax * ONE_SIXTH, 0.001953125)
        return dev.e4m3_pair(sixth, sixth, NARROW, CAST) & 0x7F
    if NARROW:  # the rounded scale is that of the division for every narrow value
        sixth = amax * ONE_SIXTH
    else:
        sixth = tl.div_rn(amax, tl.full(amax.shape, 6.0, tl.float32))
    return dev.e4m3_encode(tl.minimum(tl.maximum(sixth, 0.001953125), 448.0), NARROW)


@triton.jit
def reciprocal(x, CAST: tl.constexpr):
    """1 / x of normal numbers, off by a few units in the last place."""
    if CAST == dev.E4M3_CAST:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        return 1.0 / x


@triton.jit
def quantize_v41_fp4(re, im, NARROW: tl.constexpr, CAST: tl.constexpr):
    """e2m1 bytes (uint8) [rows, groups, pairs] and e4m3 scale bytes (int32) [rows, groups] of groups of 16."""
    top = group_max_bits(re, im)
    bad = top > INF_BITS
    scale_code = latent_scale_code(tl.where(bad, 0, top), NARROW, CAST)
    scale = (dev.bits_float(scale_code << 20) * dev.TWO_POW_120)[:, :, None]
    if NARROW:
        byte = dev.e2m1_bytes(re, im, reciprocal(scale, CAST), bad[:, :, None], NARROW, CAST)
    else:
        divisor = tl.broadcast_to(scale, re.shape)
        byte = _compared_bytes(tl.div_rn(re, divisor), tl.div_rn(im, divisor), bad[:, :, None])
    return byte, tl.where(bad, 0x7F, scale_code)


@triton.jit
def power_scale_exponent(top, NARROW: tl.constexpr):
    """Biased exponent (int32) of ceil(max / 6) for groups of 32, from finite magnitude bits."""
    amax = tl.maximum(dev.bits_float(top), E2M1_MAX_ALIGNED)
    if NARROW:
        return dev.ceil_exponent(amax * ONE_SIXTH)
    else:
        return dev.ceil_exponent(tl.div_rn(amax, tl.full(amax.shape, 6.0, tl.float32)))


@triton.jit
def quantize_v41_mxfp4(re, im, NARROW: tl.constexpr, CAST: tl.constexpr):
    """e2m1 bytes (uint8) and ue8m0 scale bytes (int32) of groups of 32."""
    top = group_max_bits(re, im)
    bad = top >= INF_BITS
    exponent = power_scale_exponent(tl.where(bad, 0, top), NARROW)
    inverse = dev.power_of_two(254 - exponent)[:, :, None]
    if NARROW:
        byte = dev.e2m1_bytes(re, im, inverse, bad[:, :, None], NARROW, CAST)
    else:
        byte = _compared_bytes(re * inverse, im * inverse, bad[:, :, None])
    return byte, tl.where(bad, 255, exponent)


@triton.jit
def _compared_bytes(re, im, bad):
    low = dev.e2m1_compare(tl.abs(re)) | ((dev.float_bits(re) >> 28) & 8)
    byte = low | (dev.e2m1_compare(tl.abs(im)) << 4) | ((dev.float_bits(im) >> 24) & 0x80)
    return tl.where(bad, 0, byte).to(tl.uint8)


@triton.jit
def fake_quant_latent(re, im, NARROW: tl.constexpr):
    """Quantize and dequantize groups of 16 with an e4m3 scale; twin of numerics.fake_quant_latent."""
    top = group_max_bits(re, im)
    bad = top > INF_BITS
    scale = dev.e4m3_decode(latent_scale_code(tl.where(bad, 0, top), NARROW, dev.PORTABLE))[:, :, None]
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
    code = latent_scale_code(tl.where(top > INF_BITS, 0, top), 8, dev.E4M3_CAST)
    scale = dev.bits_float(code << 20) * dev.TWO_POW_120
    amax = dev.float_bits(tl.max(tl.reshape(scale, [ROWS, GROUPS // 2, 2]), axis=2) * 6.0)
    exponent = tl.maximum((amax >> 23) - 8 + tl.where((amax & 0x7FFFFF) > 0x600000, 1, 0), 114)
    ratio = tl.reshape(scale, [ROWS, GROUPS // 2, 2]) * dev.power_of_two(254 - exponent)[:, :, None]
    half = (ratio * 128.0).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    half = tl.reshape(half | (half << 16), [ROWS, GROUPS])[:, :, None]
    inverse = (reciprocal(scale, dev.E4M3_CAST) * dev.TWO_POW_M14)[:, :, None]
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
    amax = tl.maximum(dev.bits_float(tl.where(bad, 0, top)), E2M1_MAX_ALIGNED)
    exponent = tl.minimum(tl.maximum(dev.ceil_exponent(amax * ONE_SIXTH), 1), 253)
    scale = dev.power_of_two(exponent)[:, :, None]
    inverse = dev.power_of_two(254 - exponent)[:, :, None]
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
    inverse = dev.power_of_two(254 - exponent)[:, :, None]
    byte = _index_code(re * inverse, HALF_EVEN, NARROW) | (_index_code(im * inverse, HALF_EVEN, NARROW) << 4)
    return tl.where(bad[:, :, None], 0, byte).to(tl.uint8), tl.where(bad, 255, exponent)


@triton.jit
def _index_code(x, HALF_EVEN: tl.constexpr, NARROW: tl.constexpr):
    a = tl.abs(x)
    if NARROW:  # at 2^-126 a code is bits 22.. of the number, and no narrow one near a tie loses bits there
        bits = dev.float_bits(a * dev.TWO_POW_M126) + 0x1FFFFF
        if HALF_EVEN:
            bits += ((bits - 0x1FFFFF) >> 22) & 1
        code = bits >> 22
    elif HALF_EVEN:
        code = dev.e2m1_compare(a)
    else:
        code = tl.where(a > 0.25, 1, 0) + tl.where(a > 0.75, 1, 0) + tl.where(a > 1.25, 1, 0)
        code += tl.where(a > 1.75, 1, 0) + tl.where(a > 2.5, 1, 0) + tl.where(a > 3.5, 1, 0) + tl.where(a > 5.0, 1, 0)
    return tl.where(code != 0, code | ((dev.float_bits(x) >> 28) & 8), 0)


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
    inverse = dev.power_of_two(254 - tl.where(bad, 127, first))[:, :, None]
    byte = _second_code(re, inverse, table) | (_second_code(im, inverse, table) << 4)
    return byte.to(tl.uint8), tl.where(bad, 255, exponent)


@triton.jit
def _entry(like, VALUE: tl.constexpr):
    return tl.full(like.shape, VALUE, tl.uint32)


@triton.jit
def _second_code(x, inverse, table):
    """Signed code (uint32) of a narrow value: its first code, bits 22.. of the quotient at 2^-126, through `table`."""
    bits = dev.float_bits(tl.abs(x * inverse) * dev.TWO_POW_M126)
    first = (bits + 0x1FFFFF + ((bits >> 22) & 1)) >> 20  # times four
    return (table >> (first & 28).to(tl.uint32)) & ((dev.float_bits(x).to(tl.uint32, bitcast=True) >> 28) | 7)


@triton.jit
def _on_grid(quotient, scale, bad, NARROW: tl.constexpr):
    if NARROW:
        code = dev.e2m1_narrow(quotient)
    else:
        code = dev.e2m1_compare(tl.abs(quotient))
    value = dev.e2m1_decode(code) * scale
    # a -0 quotient counts as +0, a negative one that rounds to zero becomes -0
    return tl.where(bad[:, :, None], float("nan"), tl.where(quotient < 0, dev.negated(value), value))
