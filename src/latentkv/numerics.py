"""The number formats and rounding rules, in plain PyTorch: the normative definition of every stored byte.

e2m1 and ue8m0 are the OCP MX formats; e4m3 is OCP's E4M3FN on every device, never FNUZ. All inputs are fp32 (bf16 and
fp16 widen exactly), all rounding is to nearest even, and no product is contracted into an addition. docs/numerics.md
states the rules in words.
"""

from __future__ import annotations

import torch
from torch import Tensor

from latentkv.layout import INDEX_DIM, INDEX_GROUP, KVLayout

E4M3_MAX = 448.0
E4M3_MIN_SUBNORMAL = 2.0**-9
E4M3_NAN = 0x7F
E2M1_MAX = 6.0
UE8M0_NAN = 255
V41_MIN_EXPONENT = 114  # 2^-13: the floor 1e-4 on amax / 448, rounded up to a power of two
SCALE_FLOOR = 1e-4

_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


# --- e2m1 -------------------------------------------------------------------------------------------------------------


def e2m1_encode(x: Tensor, *, round_half_even: bool = True, keep_negative_zero: bool = True) -> Tensor:
    """Encode fp32 values as e2m1 codes 0..15, saturating at 6.

    Args:
        x: fp32, any shape. NaN becomes code 0.
        round_half_even: ties to the even code; otherwise ties toward zero (DeepSeek-V4's C4 indexer).
        keep_negative_zero: whether a negative value that rounds to zero, and -0, become code 8 (else 0).

    Returns:
        uint8 codes of the shape of `x`.
    """
    a = x.abs()
    if round_half_even:
        tests = (a > 0.25, a >= 0.75, a > 1.25, a >= 1.75, a > 2.5, a >= 3.5, a > 5.0)
    else:
        tests = (a > 0.25, a > 0.75, a > 1.25, a > 1.75, a > 2.5, a > 3.5, a > 5.0)
    code = torch.zeros_like(x, dtype=torch.uint8)
    for test in tests:
        code += test
    negative = torch.signbit(x) & ~torch.isnan(x)
    if not keep_negative_zero:
        negative &= code != 0
    return code | (negative.to(torch.uint8) << 3)


def e2m1_decode(codes: Tensor) -> Tensor:
    """Decode e2m1 codes 0..15 to fp32; code 8 is -0."""
    table = torch.tensor(_E2M1_VALUES + tuple(-v for v in _E2M1_VALUES), device=codes.device)
    return table[codes.long()]


def pack_nibbles(codes: Tensor) -> Tensor:
    """Pack codes `[..., 2n]` into bytes `[..., n]`, the even value in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Unpack bytes `[..., n]` into codes `[..., 2n]`, the low nibble first."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


# --- e4m3 and ue8m0 ---------------------------------------------------------------------------------------------------


def e4m3_encode(x: Tensor) -> Tensor:
    """Encode fp32 values as e4m3fn bytes, saturating at 448; NaN becomes 0x7F."""
    bits = x.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    # normal: round the 23-bit mantissa to 3 bits, rebias 127 -> 7
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # subnormal: 2^14 has an ulp of 2^-9, e4m3's smallest step, so the addition rounds to it
    subnormal = (magnitude.view(torch.float32) + 2.0**14).view(torch.int32) - 0x46800000
    code = torch.where(magnitude < 0x3C800000, subnormal, normal).clamp_(max=0x7E)
    code = torch.where(torch.isnan(x), E4M3_NAN, code | ((bits >> 24) & 0x80))
    return code.to(torch.uint8)


def e4m3_decode(code: Tensor) -> Tensor:
    """Decode e4m3fn bytes to fp32; 0x7F and 0xFF are NaN."""
    return code.view(torch.float8_e4m3fn).to(torch.float32)


def ue8m0_decode(exponent: Tensor) -> Tensor:
    """Decode ue8m0 bytes to fp32 powers of two: 0 is 2^-127, 255 is NaN."""
    e = exponent.to(torch.int32)
    bits = torch.where(e == 0, 0x00400000, torch.where(e == UE8M0_NAN, 0x7FC00000, e << 23))
    return bits.view(torch.float32)


def _ceil_exponent(x: Tensor) -> Tensor:
    """Biased exponent of the smallest power of two >= x, from the bits of positive fp32 values."""
    bits = x.view(torch.int32)
    return (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(torch.int32)


def _times_inverse_scale(x: Tensor, exponent: Tensor) -> Tensor:
    """`x * 2^(127 - exponent)`, exact unless the product is subnormal; `exponent` 1..253."""
    return x * ((254 - exponent) << 23).view(torch.float32)


# --- latent rows ------------------------------------------------------------------------------------------------------


def quantize(x: Tensor, layout: KVLayout) -> tuple[Tensor, Tensor]:
    """Quantize the quantized part of latent rows.

    Args:
        x: fp32 `[..., layout.quantized_values]` (or any multiple of the group size).
        layout: V4, V41, V41_FP4 or V41_MXFP4.

    Returns:
        codes uint8 of the shape of `x` (e4m3 bytes or e2m1 codes 0..15) and scale bytes uint8
        `[..., groups]`. A NaN or Inf poisons its own group: scale 255 with every e4m3 byte 0x7F (every e2m1 code 0);
        in V41_FP4 a NaN gives scale 0x7F with codes 0 and an Inf saturates.

    Semantics: FlashMLA's V4 / V4.1 rows; the treatment of non-finite values is this library's.
    """
    x = x.unflatten(-1, (-1, layout.group_size))
    amax = x.abs().amax(-1, keepdim=True)  # NaN wins
    codes, scale = _ROW_QUANTIZERS[layout.split.name](x, amax)
    return codes.flatten(-2), scale.squeeze(-1).to(torch.uint8)


def dequantize(codes: Tensor, scale: Tensor, layout: KVLayout) -> Tensor:
    """Undo `quantize`: fp32 values of codes and scale bytes; a group with a NaN scale is NaN throughout."""
    values = e2m1_decode(codes) if layout.element.bits == 4 else e4m3_decode(codes)
    factor = e4m3_decode(scale) if layout.scale.value == "e4m3" else ue8m0_decode(scale)
    return (values.unflatten(-1, (-1, layout.group_size)) * factor.unsqueeze(-1)).flatten(-2)


def _quantize_v41(x: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    bits = amax.view(torch.int32)
    # 448 = 1.75 * 2^8: one step more when the mantissa exceeds 1.75
    exponent = ((bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(torch.int32)).clamp(min=V41_MIN_EXPONENT)
    return _poison_ue8m0(e4m3_encode(_times_inverse_scale(x, exponent.clamp(max=253))), exponent, amax, E4M3_NAN)


def _quantize_v4(x: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    # the floor acts before the division here, unlike in V41
    exponent = _ceil_exponent(amax.clamp(min=SCALE_FLOOR) / E4M3_MAX).clamp(max=254)
    return _poison_ue8m0(e4m3_encode(_times_inverse_scale(x, exponent.clamp(max=253))), exponent, amax, E4M3_NAN)


def _quantize_mxfp4(x: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    exponent = _ceil_exponent(amax.clamp(min=E2M1_MAX * 2.0**-126) / E2M1_MAX).clamp(1, 254)
    return _poison_ue8m0(e2m1_encode(_times_inverse_scale(x, exponent.clamp(max=253))), exponent, amax, 0)


def _poison_ue8m0(codes: Tensor, exponent: Tensor, amax: Tensor, code: int) -> tuple[Tensor, Tensor]:
    bad = ~torch.isfinite(amax)
    return torch.where(bad, code, codes), torch.where(bad, UE8M0_NAN, exponent)


def _quantize_fp4(x: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    scale = _latent_scale(amax)
    codes = e2m1_encode(x / e4m3_decode(scale))  # correctly rounded: a reciprocal would cross ties
    return torch.where(torch.isnan(amax), 0, codes), scale


def _latent_scale(amax: Tensor) -> Tensor:
    return e4m3_encode((amax / E2M1_MAX).clamp(E4M3_MIN_SUBNORMAL, E4M3_MAX))


_ROW_QUANTIZERS = {
    "v4": _quantize_v4,
    "v41": _quantize_v41,
    "v41_fp4": _quantize_fp4,
    "v41_mxfp4": _quantize_mxfp4,
}


def fake_quant_latent(x: Tensor) -> Tensor:
    """Quantize and dequantize per 16 values with an e4m3 scale, as V41_FP4 rows do.

    Args:
        x: fp32 `[..., 16 * k]`.

    Returns:
        fp32 of the same shape. -0 becomes +0; a negative that rounds to zero becomes -0; a NaN spreads over its group.

    Semantics: sglang's `rope_tail_fake_quant_fp4` with `compressed_kv`.
    """
    x = x.unflatten(-1, (-1, 16))
    amax = x.abs().amax(-1, keepdim=True)
    return _on_grid(x, e4m3_decode(_latent_scale(amax)), torch.isnan(amax))


def _on_grid(x: Tensor, scale: Tensor, bad: Tensor) -> Tensor:
    s = x / scale
    q = e2m1_decode(e2m1_encode(s.abs()))
    return torch.where(bad, torch.nan, torch.where(s < 0, -q, q) * scale).flatten(-2)


# --- index keys and queries -------------------------------------------------------------------------------------------


def fake_quant_index(x: Tensor) -> Tensor:
    """First FP4 stage of the indexer: quantize and dequantize per 32 values with a power-of-two scale.

    Args:
        x: fp32 `[..., 32 * k]`.

    Returns:
        fp32 of the same shape, exact in bf16 where finite. A NaN or Inf makes its group NaN.

    Semantics: DeepSeek-V4.1's index path, before the values are packed by `quantize_index`.
    """
    x = x.unflatten(-1, (-1, INDEX_GROUP))
    amax = x.abs().amax(-1, keepdim=True)
    sixth = torch.tensor(1.0 / 6.0, dtype=torch.float32, device=x.device)
    exponent = _ceil_exponent(amax.clamp(min=E2M1_MAX * 2.0**-126) * sixth).clamp(1, 253)
    return _on_grid(x, (exponent << 23).view(torch.float32), ~torch.isfinite(amax))


def quantize_index(x: Tensor, *, round_half_even: bool = True) -> tuple[Tensor, Tensor]:
    """Second FP4 stage of the indexer: e2m1 codes with one exponent byte per 32 values.

    Args:
        x: fp32 `[..., 128]`.
        round_half_even: False rounds ties toward zero, as DeepSeek-V4's C4 indexer does.

    Returns:
        payload int8 `[..., 64]` (even value in the low nibble) and scale int32 `[...]`, whose byte c, counted from the
        lowest, is the exponent of group c. Zero is always code 0. A NaN or Inf in a group gives exponent 255, codes 0.
    """
    x = x.unflatten(-1, (-1, INDEX_GROUP))
    amax = x.abs().amax(-1, keepdim=True)
    exponent = _ceil_exponent((amax / E2M1_MAX).clamp(min=SCALE_FLOOR)).clamp(1, 254)
    scaled = _times_inverse_scale(x, exponent.clamp(max=253))
    codes = e2m1_encode(scaled, round_half_even=round_half_even, keep_negative_zero=False)
    codes, exponent = _poison_ue8m0(codes, exponent, amax, 0)
    payload = pack_nibbles(codes.flatten(-2)).view(torch.int8)
    scale = exponent.squeeze(-1).to(torch.uint8).contiguous().view(torch.int32).squeeze(-1)
    return payload, scale


def dequantize_index(payload: Tensor, scale: Tensor) -> Tensor:
    """fp32 `[..., 128]` of a packed index payload `[..., 64]` and its scale words int32 `[...]`."""
    values = e2m1_decode(unpack_nibbles(payload.view(torch.uint8))).unflatten(-1, (-1, INDEX_GROUP))
    exponents = scale.contiguous().unsqueeze(-1).view(torch.uint8)
    return (values * ue8m0_decode(exponents).unsqueeze(-1)).reshape(*payload.shape[:-1], INDEX_DIM)


# --- norm and rotation ------------------------------------------------------------------------------------------------


def round_bf16(x: Tensor) -> Tensor:
    """Round fp32 values to bf16, kept as fp32."""
    return x.to(torch.bfloat16).to(torch.float32)


def bf16_bytes(x: Tensor) -> Tensor:
    """Little-endian bf16 bytes `[..., 2n]` of fp32 values `[..., n]`, to nearest even; a NaN keeps its upper bits."""
    bits = x.view(torch.int32)
    nan = (bits >> 16) | ((bits & 0xFFFF) != 0).to(torch.int32) << 6
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    code = torch.where(torch.isnan(x), nan, rounded)
    return torch.stack((code & 0xFF, (code >> 8) & 0xFF), -1).to(torch.uint8).flatten(-2)


def canonical_nan(x: Tensor) -> Tensor:
    """`x` with every NaN replaced by 0x7FC00000: arithmetic leaves device-specific NaN bits behind."""
    return torch.where(torch.isnan(x), torch.nan, x)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x * rsqrt(mean(x^2) + eps) * weight` in fp32 over the last dimension, not yet rounded.

    The reciprocal square root is correctly rounded; squares are rounded before they are summed.
    """
    x = x.to(torch.float32)
    mean = (x * x).sum(-1, keepdim=True) * (1.0 / x.shape[-1])
    return x * (mean + eps).double().rsqrt().float() * weight.to(torch.float32)


def rotate(x: Tensor, freqs: Tensor, *, inverse: bool = False) -> Tensor:
    """Rotate adjacent pairs (2j, 2j + 1) of the last dimension by (cos, sin) pairs.

    Args:
        x: fp32 `[..., width]`, width even.
        freqs: fp32 broadcastable to `x`, cos and sin interleaved.
        inverse: rotate by the conjugate.

    Returns:
        fp32 like `x`, not yet rounded; every product is rounded on its own.
    """
    re, im = x[..., 0::2], x[..., 1::2]
    c, s = freqs[..., 0::2], freqs[..., 1::2]
    if inverse:
        s = -s
    return torch.stack((re * c - im * s, re * s + im * c), dim=-1).flatten(-2)


_EXP_POLYNOMIAL = (1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0)
EXP_UNDERFLOW = -87.0


def exp_nonpositive(x: Tensor) -> Tensor:
    """e^x of fp32 x <= 0 by one fixed sequence of rounded operations, so that every device gives the same bits.

    The result is within 1.25 units in the last place; below -87 it is 0. NaN stays NaN.
    """
    safe = x.clamp(min=EXP_UNDERFLOW)
    n = (safe * 1.4426950408889634).round()
    r = safe - n * 0.693145751953125 - n * 1.42860682030941723e-06  # ln 2 in two parts; the first product is exact
    p = torch.full_like(r, _EXP_POLYNOMIAL[0])
    for coefficient in _EXP_POLYNOMIAL[1:]:
        p = p * r + coefficient
    scale = ((torch.where(torch.isnan(n), 0.0, n).to(torch.int32) + 127) << 23).view(torch.float32)
    return torch.where(x < EXP_UNDERFLOW, 0.0, p * scale)


def freqs_at(freqs: Tensor, positions: Tensor) -> Tensor:
    """Rows `[n, width]` of a (cos, sin) table at positions; one outside the table reads row 0."""
    inside = (positions >= 0) & (positions < freqs.shape[0])
    return freqs[torch.where(inside, positions, 0).long()]


def yarn_freqs(
    max_positions: int,
    *,
    theta: float,
    width: int = 64,
    factor: float = 1.0,
    original_positions: int = 65536,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
) -> Tensor:
    """The rotation table of a layer: fp32 `[max_positions, width]`, (cos, sin) interleaved.

    Args:
        max_positions: rows.
        theta: base of the frequencies.
        width: rotated values.
        factor: YaRN's context extension; 1 leaves the plain table.
        original_positions: context length before the extension.
        beta_fast: rotations above which a frequency is kept.
        beta_slow: rotations below which it is divided by `factor`.

    Semantics: DeepSeek's YaRN ramp without a magnitude scale (YaRN, arXiv 2309.00071).
    """
    import math

    freqs = 1.0 / theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    if factor != 1.0:

        def dim_of(rotations: float) -> float:
            return width * math.log(original_positions / (rotations * 2 * math.pi)) / (2 * math.log(theta))

        low = max(math.floor(dim_of(beta_fast)), 0)
        high = min(math.ceil(dim_of(beta_slow)), width - 1)
        ramp = ((torch.arange(width // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
        freqs = freqs / factor * ramp + freqs * (1 - ramp)
    angle = torch.outer(torch.arange(max_positions, dtype=torch.float32), freqs)
    return torch.stack((angle.cos(), angle.sin()), dim=-1).flatten(1)
