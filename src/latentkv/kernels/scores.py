"""Scores of the gate in Triton: sqrt(softplus(x)) as a cheap upper bound, as the reference rounds it, and in fp64."""

# mypy: disable-error-code="assignment"
from __future__ import annotations

import triton
import triton.language as tl

from latentkv.kernels import device as dev

FLT_MAX = tl.constexpr(3.4028234663852886e38)
LOG2E_32 = tl.constexpr(1.4426950216293335)  # fp32(log2 e)
LN2_32 = tl.constexpr(0.6931471824645996)  # fp32(ln 2)
LOG2E = tl.constexpr(1.4426950408889634)
LOG2E_HIGH = tl.constexpr(1.442695040255785)  # its upper 29 bits, whose product with an fp32 number is exact
LOG2E_LOW = tl.constexpr(6.331784189566044e-10)  # the rest
LN2 = tl.constexpr(0.6931471805599453)
# the bound's slack: of the hardware's exp2, log2 and sqrt, which are good to 2^-22
LOOSE_LN2 = tl.constexpr(0.6931471805599453 * (1.0 + 2.0**-18))
SLACK = tl.constexpr(2.0**-20)


_BOUND_CUDA: tl.constexpr = tl.constexpr("""{
.reg .f32 t;
mul.f32 t, $1, 0f3FB8AA3B;
ex2.approx.ftz.f32 t, t;
add.f32 t, t, 0f3F800000;
lg2.approx.ftz.f32 t, t;
fma.rn.f32 t, t, 0f3F317244, 0f35800000;
sqrt.approx.ftz.f32 $0, t;
}""")  # the portable form of `score_bound`, without its care for subnormal numbers


@triton.jit
def score_bound(x, CAST: tl.constexpr):
    """At least the score of either form, and up to x = 88 little above it; then +Inf. NaN of NaN."""
    if CAST == dev.PORTABLE:
        return tl.sqrt(tl.log2(1.0 + tl.exp2(x * LOG2E_32)) * LOOSE_LN2 + SLACK)
    else:
        return tl.inline_asm_elementwise(_BOUND_CUDA, "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def exact_score(x, LOG1P: tl.constexpr):
    """sqrt(softplus(x)), each operation of reference.route.gate_scores correctly rounded; and in fp64, zero where that
    is. NaN of NaN."""
    x = tl.where(x == float("inf"), FLT_MAX, x)
    low = tl.minimum(tl.maximum(x, -200.0), 32.0)  # beyond, nothing changes, and exponents stay in range
    if LOG1P:
        power = exp2_64(low.to(tl.float64) * LOG2E_HIGH, low.to(tl.float64) * LOG2E_LOW)
        rounded = power.to(tl.float32).to(tl.float64)
        log = log1p_64(rounded)
        soft = log.to(tl.float32)
    else:
        y = low * LOG2E_32
        power = exp2_64(y.to(tl.float64), 0.0)
        rounded = (1.0 + power.to(tl.float32)).to(tl.float64) - 1.0
        log = log1p_64(rounded)
        soft = (log * LOG2E).to(tl.float32) * LN2_32
        power += power * ((low.to(tl.float64) * LOG2E - y.to(tl.float64)) * LN2)
    soft = tl.where(x > 20.0, x, soft)
    small = soft < 7.8886090522101181e-31  # 2^-100: the hardware's root may take subnormals for zero
    root = tl.sqrt_rn(tl.where(small, soft * 1.2676506002282294e30, soft))
    root = tl.where(small, root * 8.8817841970012523e-16, root)
    # what rounding has taken from the power is small: the slope of the logarithm there brings it back
    log += (power - rounded) * (1.0 / (1.0 + rounded.to(tl.float32))).to(tl.float64)
    wide = root_64(tl.where(x > 20.0, x.to(tl.float64), log))
    return tl.where(x == x, root, x), tl.where(x == x, tl.where(root == 0.0, 0.0, wide), x.to(tl.float64))


@triton.jit
def root_64(x):
    """Square root in fp64, good to 2^-46, of 2^-300 <= x <= 2^128."""
    small = x < 7.8886090522101181e-31
    x = tl.where(small, x * 1.6069380442589903e60, x)  # 2^200
    root = tl.sqrt_rn(x.to(tl.float32))
    wide = root.to(tl.float64)
    wide += (x - wide * wide) * (0.5 / root).to(tl.float64)
    return tl.where(small, wide * 7.8886090522101181e-31, wide)


@triton.jit
def inverse_64(x):
    """1 / x in fp64, good to 2^-50, where fp32 holds both."""
    inverse = (1.0 / x.to(tl.float32)).to(tl.float64)
    inverse = inverse * next_term(-x, inverse, 2.0)
    return inverse * next_term(-x, inverse, 2.0)


@triton.jit
def exp2_64(y, rest):
    """2^(y + rest) in fp64, good to 2^-46, for -300 <= y <= 300 and a small rest; exact of integers without one."""
    shifted = y + 6755399441055744.0  # 1.5 * 2^52: the sum rounds to an integer, held in its low bits
    n = shifted - 6755399441055744.0
    r = (y - n + rest) * LN2
    # even and odd powers by themselves: half the steps that wait for each other
    s = r * r
    odd = next_term(tl.full(r.shape, 2.505210838544172e-08, tl.float64), s, 2.7557319223985893e-06)
    odd = next_term(odd, s, 0.0001984126984126984)
    odd = next_term(odd, s, 0.008333333333333333)
    odd = next_term(odd, s, 0.16666666666666666)
    odd = next_term(odd, s, 1.0)
    even = next_term(tl.full(r.shape, 2.755731922398589e-07, tl.float64), s, 2.48015873015873e-05)
    even = next_term(even, s, 0.001388888888888889)
    even = next_term(even, s, 0.041666666666666664)
    even = next_term(even, s, 0.5)
    even = next_term(even, s, 1.0)
    p = tl.fma(odd, r, even)
    return p * ((shifted.to(tl.int64, bitcast=True) << 52) + 0x3FF0000000000000).to(tl.float64, bitcast=True)


@triton.jit
def log1p_64(t):
    """ln(1 + t) in fp64, good to 2^-46 of itself, of t >= 0; n ln 2 where 1 + t is 2^n."""
    v = 1.0 + t
    # v = 2^n m with m in [sqrt(1/2), sqrt(2)) or so; where n is 0, m - 1 is t itself
    bits = v.to(tl.int64, bitcast=True)
    n = (bits - 0x3FE6A00000000000) >> 52
    m = (bits - (n << 52)).to(tl.float64, bitcast=True)
    f = tl.where(n == 0, t, m - 1.0)
    z = f * inverse_64(2.0 + f)
    s = z * z
    q = s * s
    odd = next_term(tl.full(s.shape, 2.0 / 19.0, tl.float64), q, 2.0 / 15.0)
    odd = next_term(odd, q, 2.0 / 11.0)
    odd = next_term(odd, q, 2.0 / 7.0)
    odd = next_term(odd, q, 2.0 / 3.0)
    even = next_term(tl.full(s.shape, 2.0 / 17.0, tl.float64), q, 2.0 / 13.0)
    even = next_term(even, q, 2.0 / 9.0)
    even = next_term(even, q, 0.4)
    even = next_term(even, q, 2.0)
    p = tl.fma(odd, s, even)
    return tl.fma(p, z, n.to(tl.float64) * LN2)


@triton.jit
def next_term(sum, x, C: tl.constexpr):
    """sum * x + C in fp64, rounded once; Triton 3.6 rounds a plain number given to `fma` to fp32."""
    return tl.fma(sum, x, tl.full(x.shape, C, tl.float64))
