"""How `topk` searches the keys of a piece: counts of keys between two probes, step by step, and ranks of what is left.

Keys are a tuple of tensors `[WIDTH, columns]`; a column lies in one wave of lanes.
"""

# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"
# Triton concatenates tuples and does not unpack them
from __future__ import annotations

import triton
import triton.language as tl

from latentkv.kernels import device as dev

NOT_A_KEY = tl.constexpr(-(2**31))  # below every score's key
INFINITE_KEY = tl.constexpr(0x7F800000)
WIDTH = tl.constexpr(32)  # entries side by side: no count of them crosses a wave of lanes
VALUE_STEPS = tl.constexpr(2)  # first steps of a search, which divide the range of scores and not that of keys
FEW = tl.constexpr(4)  # keys in a range whose place is not guessed from their number


@triton.jit
def key_of(x, SOURCE: tl.constexpr):
    """The key of a score; of a key itself."""
    if SOURCE == "row":
        return score_key(x)
    else:
        return x


@triton.jit
def score_key(score):
    """int32 in the order of the scores: -0 is +0, NaN is -inf."""
    return dev.flipped(dev.float_bits(tl.maximum(score, float("-inf")) + 0.0))


@triton.jit
def key_score(key):
    """The score of a key of a finite score."""
    return dev.bits_float(dev.flipped(key))


@triton.jit
def key_range(keys, rest, PIECE: tl.constexpr, SOURCE: tl.constexpr, ENTRIES: tl.constexpr):
    """The lowest key, the highest plus 1, 0, and how many keys there are; `rest` entries are left of the row."""
    low, high = or_top(keys[0]), keys[0]
    ours = (keys[0] > NOT_A_KEY).to(tl.int32)
    for n in tl.static_range(1, ENTRIES):
        low, high = tl.minimum(low, or_top(keys[n])), tl.maximum(high, keys[n])
        ours += (keys[n] > NOT_A_KEY).to(tl.int32)
    low, high = tl.reduce((tl.min(low, axis=0), tl.max(high, axis=0)), 0, wider)
    if SOURCE == "row" or SOURCE == "blocks":  # every entry is a key
        count = tl.minimum(tl.maximum(rest, 0), PIECE)
    else:
        count = total_of(ours)
    return low, high + 1, tl.full([], 0, tl.int32), count


@triton.jit
def wider(low, high, other_low, other_high):
    return tl.minimum(low, other_low), tl.maximum(high, other_high)


@triton.jit
def or_top(key):
    """Keys, and int32's largest number instead of NOT_A_KEY."""
    return tl.where(key > NOT_A_KEY, key, 0x7FFFFFFF)


@triton.jit
def total_of(x):
    return tl.sum(tl.sum(x, axis=0), axis=0)


@triton.jit
def narrow(keys, low, high, above, reached, k, cap, ENTRIES: tl.constexpr, CAST: tl.constexpr):
    """Raise `low` and lower `high` until `reached` keys are at least `low`: at least k, or all, and at most cap.

    `above` keys are at least `high`, fewer than k. It ends with more than cap where keys equal to `low` are to blame.
    """
    step = tl.full([], 0, tl.int32)
    while (reached > cap) & (high != low + 1):
        # two keys divide the range in three; both counts in one sum, as a piece has fewer than 2^16 entries
        lower, upper = probes(low, high, above, reached, k, step)
        both = tl.zeros(keys[0].shape, tl.int32)
        for n in tl.static_range(ENTRIES):
            both = reach(both, keys[n], lower, upper, CAST)
        both = total_of(both)
        at_lower, at_upper = both & 0xFFFF, both >> 16
        if at_upper >= k:
            low, reached = upper, at_upper
        elif at_lower >= k:
            low, reached, high, above = lower, at_lower, upper, at_upper
        else:
            high, above = lower, at_lower
        step += 1
    return low, high, above, reached


@triton.jit
def probes(low, high, above, reached, k, step):
    """Two keys above `low` and below `high`, which are not neighbours.

    At first thirds of the range of scores. Then keys on both sides of where the k-th would stand if keys were evenly
    spread, half a standard deviation away; every third step, and among few keys, thirds of the range of keys, so that a
    range shrinks however they are spread.
    """
    span = high.to(tl.uint32, bitcast=True) - low.to(tl.uint32, bitcast=True)
    third = tl.maximum(span // 3, 1).to(tl.int32, bitcast=True)
    lower, upper = low + third, high - third
    if step < VALUE_STEPS:
        if (low > dev.MINUS_INF_ORDER) & (high < INFINITE_KEY):
            a, b = key_score(low) * (1.0 / 3.0), key_score(high) * (1.0 / 3.0)
            lower, upper = score_key(a + a + b), score_key(a + b + b)
    elif (step % 3 != 2) & (reached - above >= FEW):
        keys = (reached - above).to(tl.float32)
        share = (k - above).to(tl.float32) / keys
        margin = 0.35 * tl.rsqrt(keys)
        whole = span.to(tl.float32)
        lower = high - (whole * tl.minimum(share + margin, 0.98)).to(tl.uint32).to(tl.int32, bitcast=True)
        upper = high - (whole * tl.maximum(share - margin, 0.02)).to(tl.uint32).to(tl.int32, bitcast=True)
    lower = tl.minimum(tl.maximum(lower, low + 1), high - 1)
    return lower, tl.minimum(tl.maximum(upper, lower), high - 1)


_REACH_CUDA: tl.constexpr = tl.constexpr("""{
.reg .pred p, q;
setp.ge.s32 p, $2, $3;
setp.ge.s32 q, $2, $4;
mov.u32 $0, $1;
@p add.s32 $0, $0, 1;
@q add.s32 $0, $0, 0x10000;
}""")  # the portable form of `reach`, of which compilers make five instructions


@triton.jit
def reach(counts, key, lower, upper, CAST: tl.constexpr):
    """Counts of the keys at least `lower`, and 2^16 times those at least `upper`, one more key seen."""
    if CAST == dev.PORTABLE:
        return counts + (key >= lower).to(tl.int32) + ((key >= upper).to(tl.int32) << 16)
    else:
        return tl.inline_asm_elementwise(
            _REACH_CUDA, "=&r,r,r,r,r", [counts, key, lower, upper], tl.int32, is_pure=True, pack=1
        )


@triton.jit
def without_late_ties(keys, low, room, ENTRIES: tl.constexpr):
    """Keys, of those that equal `low` only the first `room`."""
    ties = ()
    for n in tl.static_range(ENTRIES):
        ties = ties + ((keys[n] == low).to(tl.int32),)
    before = sums_before(ties, ENTRIES)
    kept = ()
    for n in tl.static_range(ENTRIES):
        kept = kept + (tl.where((keys[n] == low) & (before[n] >= room), NOT_A_KEY, keys[n]),)
    return kept


@triton.jit
def ranks_of(keys, low, ENTRIES: tl.constexpr):
    """How many keys from `low` on stand before each entry."""
    flags = ()
    for n in tl.static_range(ENTRIES):
        flags = flags + ((keys[n] >= low).to(tl.int32),)
    return sums_before(flags, ENTRIES)


@triton.jit
def sums_before(flags, ENTRIES: tl.constexpr):
    """Sums of all flags (0 or 1) before each: four are scanned at once, eight bits each, as a column has 32 places."""
    PACKS: tl.constexpr = (ENTRIES + 3) // 4
    scans = ()
    totals = ()
    whole = tl.zeros([flags[0].shape[1]], tl.int32)
    for pack in tl.static_range(PACKS):
        packed = flags[4 * pack]
        for n in tl.static_range(4 * pack + 1, min(4 * pack + 4, ENTRIES)):
            packed += flags[n] << (8 * (n - 4 * pack))
        scans = scans + (tl.cumsum(packed, axis=0) - packed,)
        total = tl.sum(packed, axis=0)
        totals = totals + (total,)
        whole += (total & 0xFF) + ((total >> 8) & 0xFF) + ((total >> 16) & 0xFF) + (total >> 24)
    start = tl.cumsum(whole, axis=0) - whole
    before = ()
    for n in tl.static_range(ENTRIES):
        before = before + (start[None, :] + ((scans[n // 4] >> (8 * (n % 4))) & 0xFF),)
        start += (totals[n // 4] >> (8 * (n % 4))) & 0xFF
    return before
