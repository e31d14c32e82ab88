"""The row formats once more, from the specification: ml_dtypes' numbers, exact powers of two, plain addresses."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import ml_dtypes
import numpy as np

Array = np.ndarray
F32 = np.float32


@dataclass(frozen=True)
class Form:
    """One line of the specification's table of layouts."""

    element: str
    group: int
    data_bytes: int
    scale_bytes: int
    page_unit: int
    tail: int = 0
    interleaved: bool = False

    @property
    def row_bytes(self) -> int:
        return self.data_bytes + self.scale_bytes

    def page_bytes(self, page_size: int) -> int:
        used = page_size * self.row_bytes
        return used if self.interleaved else -(-used // self.page_unit) * self.page_unit

    def addresses(self, slot: int, page_size: int, page_stride: int) -> tuple[int, int]:
        """Bytes of a slot's data and scales from the cache's start."""
        page, offset = slot // page_size, slot % page_size
        start = page * page_stride
        if self.interleaved:
            return start + offset * self.row_bytes, start + offset * self.row_bytes + self.data_bytes
        return start + offset * self.data_bytes, start + page_size * self.data_bytes + offset * self.scale_bytes


FORMS = {
    "v4": Form("e4m3", 64, 576, 8, 576, tail=64),
    "v41": Form("e4m3", 32, 512, 16, 512),
    "v41_fp4": Form("e2m1", 16, 256, 32, 256),
    "v41_mxfp4": Form("e2m1", 32, 256, 16, 256),
    "bf16": Form("bf16", 512, 1024, 0, 1024),
    "v41_interleaved": Form("e4m3", 32, 512, 16, 512, interleaved=True),
    "v41_fp4_interleaved": Form("e2m1", 16, 256, 32, 256, interleaved=True),
}


# --- numbers ----------------------------------------------------------------------------------------------------------


def _values(kind: type, codes: int) -> Array:
    return np.arange(codes, dtype=np.uint8).view(kind).astype(np.float64)


E4M3_VALUES = _values(ml_dtypes.float8_e4m3fn, 127)  # codes 0..126: the finite magnitudes, ascending
E2M1_VALUES = _values(ml_dtypes.float4_e2m1fn, 8)


def nearest(x: Array, values: Array) -> Array:
    """Codes of the nearest of ascending `values` to |x|, ties to the even code, with the sign bit above them."""
    a = np.abs(x.astype(np.float64))
    middles = (values[:-1] + values[1:]) / 2
    below, up_to = np.searchsorted(middles, a, "left"), np.searchsorted(middles, a, "right")
    code = np.where(below == up_to, below, below + below % 2)  # on a middle, `below` and `below + 1` are as near
    return (code | np.where(np.signbit(x), len(values) + len(values) % 2, 0)).astype(np.uint8)


def ceil_log2(x: Fraction) -> int:
    """The smallest e with 2^e >= x > 0, exactly."""
    e = x.numerator.bit_length() - x.denominator.bit_length() - 1
    while Fraction(2) ** e < x:
        e += 1
    return e


FLOOR = Fraction(float(F32(1e-4)))


def scale_exponent(layout: str, amax: float) -> int:
    """Biased exponent of a group's power-of-two scale, from exact rationals."""
    exact = Fraction(float(amax))
    if layout == "v41":
        return 127 + ceil_log2(max(exact / 448, FLOOR))
    if layout == "v4":
        return 127 + ceil_log2(max(exact, FLOOR) / 448)
    return min(max(127 + ceil_log2(max(exact, 6 * Fraction(2) ** -126) / 6), 1), 254)


def latent_scale(amax: Array) -> Array:
    """e4m3 scale bytes of groups' largest magnitudes; the division is fp32's."""
    with np.errstate(invalid="ignore"):
        sixth = np.minimum(np.maximum(amax.astype(F32) / F32(6), F32(2.0**-9)), F32(448))
    return nearest(sixth, E4M3_VALUES)


def quantize(x: Array, layout: str) -> tuple[Array, Array]:
    """Codes like `x` and scale bytes `[..., groups]` of fp32 values `[..., groups * group]`."""
    layout = layout.removesuffix("_interleaved")
    form = FORMS[layout]
    groups = x.reshape(*x.shape[:-1], -1, form.group)
    amax = np.abs(groups).max(-1)
    finite = np.isfinite(amax)
    if layout == "v41_fp4":
        numbers = ~np.isnan(amax)
        scale = np.where(numbers, latent_scale(np.where(numbers, amax, 0)), 0x7F).astype(np.uint8)
        with np.errstate(invalid="ignore", over="ignore"):
            ratio = groups.astype(F32) / E4M3_VALUES[np.where(numbers, scale, 1)].astype(F32)[..., None]
        codes = np.where(numbers[..., None], nearest(np.nan_to_num(ratio), E2M1_VALUES), 0)
        return codes.reshape(x.shape).astype(np.uint8), scale
    known, place = np.unique(np.where(finite, amax, 0), return_inverse=True)
    exponent = np.array([scale_exponent(layout, a) for a in known], np.int64)[place.reshape(amax.shape)]
    values, bad_code = (E2M1_VALUES, 0) if form.element == "e2m1" else (E4M3_VALUES, 0x7F)
    scaled = np.where(finite[..., None], groups, 0).astype(np.float64) / 2.0 ** (exponent[..., None] - 127.0)
    codes = np.where(finite[..., None], nearest(scaled, values), bad_code)
    return codes.reshape(x.shape).astype(np.uint8), np.where(finite, exponent, 255).astype(np.uint8)


def dequantize(codes: Array, scale: Array, layout: str) -> Array:
    """fp64 values of codes `[..., n]` and scale bytes `[..., groups]`."""
    layout = layout.removesuffix("_interleaved")
    form = FORMS[layout]
    kind = ml_dtypes.float4_e2m1fn if form.element == "e2m1" else ml_dtypes.float8_e4m3fn
    factor = scale.view(ml_dtypes.float8_e4m3fn if layout == "v41_fp4" else ml_dtypes.float8_e8m0fnu)
    values = codes.view(kind).astype(np.float64).reshape(*codes.shape[:-1], -1, form.group)
    return (values * factor.astype(np.float64)[..., None]).reshape(codes.shape)


def fake_quant(x: Array, kind: str) -> Array:
    """fp32 values on the grid of their group: "latent" as V41_FP4, "index" per 32 with a power-of-two scale."""
    size = 16 if kind == "latent" else 32
    groups = x.reshape(*x.shape[:-1], -1, size)
    amax = np.abs(groups).max(-1)
    usable = ~np.isnan(amax) if kind == "latent" else np.isfinite(amax)
    if kind == "latent":
        scale = E4M3_VALUES[latent_scale(np.where(usable, amax, 0))]
    else:
        sixth = (np.maximum(np.where(usable, amax, 0), F32(6 * 2.0**-126)) * F32(1 / 6)).astype(F32)
        mantissa, exponent = np.frexp(sixth.astype(np.float64))
        scale = 2.0 ** (exponent - (mantissa == 0.5))
    with np.errstate(invalid="ignore", over="ignore"):
        ratio = (groups.astype(F32) / scale[..., None].astype(F32)).astype(F32)
    ratio = np.where(usable[..., None], ratio, 0)
    grid = E2M1_VALUES[nearest(np.abs(ratio), E2M1_VALUES)] * scale[..., None]
    grid = np.where(ratio < 0, -grid, grid).astype(F32)  # -0 becomes 0, a negative that rounds to zero -0
    return np.where(usable[..., None], grid, np.nan).astype(F32).reshape(x.shape)


# --- bytes of rows ----------------------------------------------------------------------------------------------------


def encode(rows: Array, layout: str) -> tuple[Array, Array]:
    """Data bytes `[n, data_bytes]` and scale bytes `[n, scale_bytes]` of finished fp32 rows `[n, 512]`."""
    form = FORMS[layout]
    if form.element == "bf16":
        return bf16_bytes(rows), np.zeros((len(rows), 0), np.uint8)
    head = rows[:, : 512 - form.tail]
    codes, scale = quantize(head, layout)
    if form.element == "e2m1":
        codes = codes[:, 0::2] | (codes[:, 1::2] << 4)
    data = np.concatenate((codes, bf16_bytes(rows[:, 512 - form.tail :])), 1)
    return data, np.pad(scale, ((0, 0), (0, form.scale_bytes - scale.shape[1])))


def decode(data: Array, scale: Array, layout: str) -> Array:
    """bf16 values, as fp32 `[n, 512]`, of data and scale bytes."""
    form = FORMS[layout]
    if form.element == "bf16":
        return np.ascontiguousarray(data).view(ml_dtypes.bfloat16).astype(F32)
    width = 512 - form.tail
    if form.element == "e2m1":
        codes = np.stack((data & 15, data >> 4), -1).reshape(len(data), width)
    else:
        codes = np.ascontiguousarray(data[:, :width])
    values = dequantize(codes, np.ascontiguousarray(scale[:, : width // form.group]), layout)
    head = round_to(values, "bfloat16")
    if not form.tail:
        return head
    return np.concatenate((head, np.ascontiguousarray(data[:, width:]).view(ml_dtypes.bfloat16).astype(F32)), 1)


def bf16_bytes(x: Array) -> Array:
    """Bytes of values rounded to bf16."""
    return np.ascontiguousarray(x.astype(ml_dtypes.bfloat16)).view(np.uint8)


def write(slab: Array, start: int, stride: int, pages: int, rows: Array, slots: Array, layout: str, size: int) -> None:
    """Write finished fp32 rows to their slots in the bytes of a buffer whose page 0 begins at `start`."""
    form = FORMS[layout]
    data, scale = encode(rows, layout)
    for n, slot in enumerate(slots.tolist()):
        if 0 <= slot < pages * size:
            data_at, scale_at = (start + at for at in form.addresses(slot, size, stride))
            slab[data_at : data_at + form.data_bytes] = data[n]
            slab[scale_at : scale_at + form.scale_bytes] = scale[n]


# --- what happens to a row before -------------------------------------------------------------------------------------


def round_to(x: Array, dtype: str) -> Array:
    """fp32 values rounded to "bfloat16", "float16" or "float32"."""
    kind = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": F32}[dtype]
    with np.errstate(over="ignore"):
        return x.astype(F32).astype(kind).astype(F32)


def rotate(x: Array, angles: Array, *, inverse: bool = False) -> Array:
    """Adjacent pairs of fp32 `[..., w]` turned by (cos, sin) pairs; every product and sum is rounded to fp32."""
    out = np.empty_like(x, dtype=F32)
    with np.errstate(over="ignore", invalid="ignore"):
        for j in range(0, x.shape[-1], 2):
            re, im, c, s = x[..., j], x[..., j + 1], angles[..., j], angles[..., j + 1]
            s = -s if inverse else s
            out[..., j] = (re * c).astype(F32) - (im * s).astype(F32)
            out[..., j + 1] = (re * s).astype(F32) + (im * c).astype(F32)
    return out


def norm(x: Array, weight: Array, eps: float) -> Array:
    """`x * rsqrt(mean(x^2) + eps) * weight`, for rows whose squares sum exactly; the root is fp64's, rounded once."""
    total = (x.astype(np.float64) ** 2).sum(-1, keepdims=True)
    mean = (total / x.shape[-1]).astype(F32) + F32(eps)
    factor = (1 / np.sqrt(mean.astype(np.float64))).astype(F32)
    return (x.astype(F32) * factor).astype(F32) * weight.astype(F32)
