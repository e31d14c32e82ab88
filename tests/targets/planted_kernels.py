"""Kernels that must fail, and one that must pass: what shows that the budget check can fail."""

import triton
import triton.language as tl

from latentkv.kernels.launch import TargetCase


@triton.jit
def good_kernel(x, n):
    at = tl.program_id(0) * 128 + tl.arange(0, 128)
    tl.store(x + at, at, mask=at < n)


@triton.jit
def spilling_kernel(x, n, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    a = tl.load(x + at, mask=at < n, other=0.0)
    b = tl.load(x + SIZE + at, mask=at < n, other=0.0)
    tl.debug_barrier()
    total = tl.sum(a * b, 0)
    tl.store(x + at, a * total + b, mask=at < n)


@triton.jit
def broken_kernel(x):
    tl.static_assert(False, "planted")


@triton.jit
def large_kernel(x, SIZE: tl.constexpr):
    rows, columns = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    square = tl.load(x + rows * SIZE + columns)
    tl.store(x + rows * SIZE + columns, tl.dot(square, square))


TARGET_CASES = [
    TargetCase(good_kernel, "good", {"x": "*i32", "n": "i32"}, {}),
    TargetCase(spilling_kernel, "spills", {"x": "*fp32", "n": "i32"}, {"SIZE": 4096}, num_warps=1),
    TargetCase(broken_kernel, "broken", {"x": "*fp32"}, {}),
    TargetCase(good_kernel, "wrong", {"x": "*fp32", "m": "i32"}, {}),
    TargetCase(large_kernel, "large", {"x": "*fp32"}, {"SIZE": 256}, num_warps=32, targets=("gfx942", "sm120")),
]
