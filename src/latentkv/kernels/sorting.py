"""Sorting in Triton, place by place: tuples of tensors whose members are what a lane holds of several keys."""

# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"
# Triton concatenates tuples and does not unpack them
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def columns_of(x, PIECES: tl.constexpr):
    """A tensor's pieces, which are what a lane holds of it: nothing moves."""
    if PIECES == 1:
        return (x,)
    else:
        x = tl.permute(tl.reshape(x, [x.shape[0], PIECES, x.shape[1] // PIECES]), (0, 2, 1))
        if PIECES == 2:
            return tl.split(x)
        else:
            even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1], 2, 2]))
            return tl.split(even) + tl.split(odd)


@triton.jit
def largest_few(x, DEPTH: tl.constexpr):
    """The DEPTH largest of some tensors, place by place, the largest first."""
    COUNT: tl.constexpr = len(x)
    best = ()
    for n in tl.static_range(0, COUNT, 4):
        if n + 4 <= COUNT:
            best = merged(best, sorted_four(x[n], x[n + 1], x[n + 2], x[n + 3]), DEPTH)
        else:
            for rest in tl.static_range(n, COUNT):
                best = merged(best, (x[rest],), DEPTH)
    return best


@triton.jit
def sorted_four(a, b, c, d):
    """Four tensors, place by place, the largest first."""
    a, b = tl.maximum(a, b), tl.minimum(a, b)
    c, d = tl.maximum(c, d), tl.minimum(c, d)
    a, c = tl.maximum(a, c), tl.minimum(a, c)
    b, d = tl.maximum(b, d), tl.minimum(b, d)
    return (a, tl.maximum(b, c), tl.minimum(b, c), d)


@triton.jit
def merged(a, b, DEPTH: tl.constexpr):
    """The DEPTH largest of two sorted tuples, the largest first."""
    SIZE: tl.constexpr = len(a) + len(b) if len(a) + len(b) < DEPTH else DEPTH
    x = ()
    for n in tl.static_range(SIZE):  # they fall and then rise
        if n >= len(a):
            x = x + (b[SIZE - 1 - n],)
        elif SIZE - 1 - n >= len(b):
            x = x + (a[n],)
        else:
            x = x + (tl.maximum(a[n], b[SIZE - 1 - n]),)
    # a bitonic network of eight (DEPTH is at most that) whose first places are filled up with larger numbers
    for step in tl.static_range(3):
        x = compared(x, 8 - SIZE, 4 >> step, SIZE)
    return x


@triton.jit
def compared(x, BEFORE: tl.constexpr, APART: tl.constexpr, SIZE: tl.constexpr):
    """Exchange members APART from each other, in blocks of twice as many that start BEFORE the first."""
    y = ()
    for n in tl.static_range(SIZE):
        if (n + BEFORE) % (2 * APART) < APART:
            y = y + (tl.maximum(x[n], x[n + APART]),)
        elif n >= APART:
            y = y + (tl.minimum(x[n - APART], x[n]),)
        else:
            y = y + (x[n],)
    return y


@triton.jit
def without(x, taken, FILL: tl.constexpr, DEPTH: tl.constexpr, LEFT: tl.constexpr):
    """Sorted keys without the first where it is taken, as many as LEFT - 1 more picks may need."""
    rest = ()
    for n in tl.static_range(DEPTH if DEPTH < LEFT - 1 else LEFT - 1):
        rest = rest + (tl.where(taken, x[n + 1] if n + 1 < len(x) else FILL, x[n]),)
    return rest


@triton.jit
def exchange(a, a_id, b, b_id):
    """The larger first; equals stay."""
    swap = a < b
    return tl.where(swap, b, a), tl.where(swap, b_id, a_id), tl.where(swap, a, b), tl.where(swap, a_id, b_id)
