"""The gate of stage `route`: sqrt(softplus(logit)), top-k by it plus a bias, weights, and the sum of partials before.

A program's rows lie in parts of WIDTH experts. Every expert gets a cheap upper bound of its choice, packed with its id
into one integer; the largest few are scored exactly, and that settles the row unless the k-th exact choice is not above
the bound of all that were left out. Then every expert is scored exactly. Choices are compared as integers in the order
of the floats.
"""

# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"
# Triton concatenates tuples and does not unpack them
from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from latentkv.kernels import device as dev
from latentkv.kernels.launch import E4M3_CAST, PORTABLE, TargetCase, common_options, on_device
from latentkv.kernels.store import case_of

LOWEST = tl.constexpr(-2147483648)  # below the order of -Inf
NOBODY = tl.constexpr(2147483647)
FLT_MAX = tl.constexpr(3.4028234663852886e38)
LOG2E_32 = tl.constexpr(1.4426950216293335)  # fp32(log2 e)
LN2_32 = tl.constexpr(0.6931471824645996)  # fp32(ln 2)
LOG2E = tl.constexpr(1.4426950408889634)
LOG2E_HIGH = tl.constexpr(1.442695040255785)  # its upper 29 bits, whose product with an fp32 number is exact
LOG2E_LOW = tl.constexpr(6.331784189566044e-10)  # the rest
LN2 = tl.constexpr(0.6931471805599453)
# the bound's slack: of the hardware's exp2, log2 and sqrt, which are good to 2^-22
LOOSE = tl.constexpr(1.0 + 2.0**-18)
LOOSE_LN2 = tl.constexpr(0.6931471805599453 * (1.0 + 2.0**-18))
SLACK = tl.constexpr(2.0**-20)
MANY = 2048  # rows from which on a program takes two
UNROLLED = tl.constexpr(16)  # partials whose loads stand in one row
EAGER_VALUES = tl.constexpr(3840)  # 120 values a lane
# without a word about registers, NVIDIA's assembler takes few: it loads partials in turns, and spills for many picks
EAGER_REGISTERS = 200
PICK_REGISTERS = 168


def route_topk(
    logits: Tensor | None,
    bias: Tensor | None,
    partials: Tensor | None,
    k: int,
    renormalize: bool,
    scale: float,
    num_shared: int,
    tie_order: str,
    softplus: str,
) -> tuple[Tensor, Tensor]:
    """Launch `gate_kernel`."""
    source = partials if partials is not None else logits
    assert source is not None
    count, experts = source.shape[-2:]
    weights = torch.empty(count, k + num_shared, dtype=torch.float32, device=source.device)
    ids = torch.empty(count, k + num_shared, dtype=torch.int32, device=source.device)
    if count == 0:
        return weights, ids
    summed = logits if logits is not None else source
    repeat, rows = gate_tile(count)
    options = common_options(source.device)
    options |= register_options(options["CAST"], partials is not None, count, k)
    with on_device(source):
        gate_kernel[(triton.cdiv(count, repeat * rows),)](
            source,
            source.stride(-2),
            source.stride(0) if partials is not None else 0,
            partials.shape[0] if partials is not None else 0,
            summed,
            summed.stride(-2),
            bias if bias is not None else source,
            weights,
            ids,
            count,
            scale,
            num_shared,
            PARTIALS=0 if partials is None else partials.shape[0],
            KEEP=partials is not None and logits is not None,
            BIAS=bias is not None,
            K=k,
            RENORMALIZE=renormalize,
            LOG1P=softplus == "log1p",
            REPEAT=repeat,
            ROWS=rows,
            **shape_of(experts, k, tie_order == "lane64"),
            num_warps=1,
            num_stages=1,
            **options,
        )
    return weights, ids


def gate_tile(count: int) -> tuple[int, int]:
    """How many times a program, which is one warp, takes how many rows: one at a time, so that nothing moves between
    lanes but what reductions move."""
    if dev.INTERPRETED:  # it takes as long for one row as for many
        return 1, 64
    return (1 if count <= MANY else 2), 1


def register_options(cast: int, partials: bool, count: int, k: int) -> dict[str, int]:
    """Of a launch that loads all partials before it adds (many rows rather share a multiprocessor) or picks many."""
    if partials and count <= MANY and cast == E4M3_CAST:
        return {"maxnreg": EAGER_REGISTERS}
    return {"maxnreg": PICK_REGISTERS} if k > 8 and cast != PORTABLE else {}


def shape_of(experts: int, k: int, lane64: bool) -> dict[str, Any]:
    """How a row is cut into parts, and how many experts are scored exactly."""
    width = max(32, triton.next_power_of_2(triton.cdiv(experts, 4)))
    return {
        "EXPERTS": experts,
        "LANE64": lane64,
        "WIDTH": width,
        "PARTS": triton.cdiv(experts, width),
        "ID_MASK": triton.next_power_of_2(experts) - 1,
        "CANDIDATES": k + 2,  # with k + 1, two rows in a thousand would not be settled, which every launch waits for
    }


# --- the kernel -------------------------------------------------------------------------------------------------------


# Pointers of unknown alignment give every tensor one value a lane and row, so that no layout has to be converted.
@triton.jit(
    do_not_specialize=["steps", "count", "scale", "num_shared"],
    do_not_specialize_on_alignment=["source", "summed", "bias", "weights", "ids"],
)
def gate_kernel(
    source,
    source_stride,
    partial_stride,
    steps,
    summed,
    summed_stride,
    bias,
    weights,
    ids,
    count,
    scale,
    num_shared,
    PARTIALS: tl.constexpr,
    KEEP: tl.constexpr,
    BIAS: tl.constexpr,
    K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    LOG1P: tl.constexpr,
    EXPERTS: tl.constexpr,
    LANE64: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    ID_MASK: tl.constexpr,
    CANDIDATES: tl.constexpr,
    REPEAT: tl.constexpr,
    ROWS: tl.constexpr,
    CAST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Gate REPEAT times ROWS rows of logits or, with PARTIALS, of partial sums whose sum KEEP stores in `summed`."""
    dev.begin(OVERLAP)
    for n in range(REPEAT):
        gate_rows(
            (tl.program_id(0).to(tl.int64) * REPEAT + n) * ROWS + tl.arange(0, ROWS), source, source_stride,
            partial_stride, steps, summed, summed_stride, bias, weights, ids, count, scale, num_shared, PARTIALS, KEEP,
            BIAS, K, RENORMALIZE, LOG1P, EXPERTS, LANE64, WIDTH, PARTS, ID_MASK, CANDIDATES, ROWS, CAST,
        )  # fmt: skip


@triton.jit
def gate_rows(
    row, source, source_stride, partial_stride, steps, summed, summed_stride, bias, weights, ids, count, scale,
    num_shared, PARTIALS: tl.constexpr, KEEP: tl.constexpr, BIAS: tl.constexpr, K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    LOG1P: tl.constexpr, EXPERTS: tl.constexpr, LANE64: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
    ID_MASK: tl.constexpr, CANDIDATES: tl.constexpr, ROWS: tl.constexpr, CAST: tl.constexpr,
):  # fmt: skip
    """Gate ROWS rows."""
    live = row < count
    at = source + row * source_stride
    inside = tl.arange(0, WIDTH)
    logits = load_parts(at, partial_stride, live, steps, WIDTH, PARTS, EXPERTS, PARTIALS, CAST == dev.E4M3_CAST)
    if KEEP:
        for part in tl.static_range(PARTS):
            expert = part * WIDTH + inside
            mask = live[:, None] & (expert < EXPERTS)[None, :]
            tl.store((summed + row * summed_stride)[:, None] + expert[None, :], logits[part], mask=mask)

    # the largest bounds, with ids
    keys = ()
    for part in tl.static_range(PARTS):
        bound = score_bound(logits[part], CAST)
        expert = part * WIDTH + inside
        if BIAS:
            bound += load_bias(bias, expert, EXPERTS, ROWS)
        key = (dev.in_order(bound) & (-1 - ID_MASK)) | (ID_MASK - expert)[None, :]
        keys = keys + (tl.where((expert < EXPERTS)[None, :], key, LOWEST),)
    keys = sorted_parts(keys, PARTS)
    lane = tl.arange(0, 32)[None, :]
    found = tl.full([ROWS, 32], LOWEST, tl.int32)
    largest = tl.full([ROWS], LOWEST, tl.int32)
    for n in tl.static_range(CANDIDATES):
        largest = tl.max(keys[0], axis=1)
        found = tl.where(lane == n, largest[:, None], found)
        if n + 1 < CANDIDATES:
            keys = without(keys, keys[0] == largest[:, None], PARTS)
    candidate = tl.where(found == LOWEST, NOBODY, ID_MASK - (found & ID_MASK))
    weight, order = exact_scores(at, partial_stride, bias, candidate, live, PARTIALS, BIAS, LOG1P)
    rank, last, tied = ranks(candidate, order, K, CANDIDATES)

    # what was left out is at most `largest`, rounded up
    doubtful = (largest != LOWEST) & (last <= (largest | ID_MASK))
    if LANE64:
        doubtful = doubtful | tied
    if tl.max((doubtful & live).to(tl.int32), axis=0) != 0:
        if LANE64:
            orders = exact_orders(at, partial_stride, bias, live, steps, 64, 6, EXPERTS, PARTIALS, BIAS, LOG1P)
            candidate = picks_of_lanes(orders, tl.arange(0, 64), K, ROWS)
        else:
            orders = exact_orders(at, partial_stride, bias, live, steps, WIDTH, PARTS, EXPERTS, PARTIALS, BIAS, LOG1P)
            candidate = picks_of_all(orders, inside, K, ROWS, WIDTH, PARTS)
        weight, order = exact_scores(at, partial_stride, bias, candidate, live, PARTIALS, BIAS, LOG1P)
        rank = tl.where(candidate == NOBODY, NOBODY, lane)

    # weights in fp64, rounded once
    weight = tl.where((rank < K) & (weight == weight), weight, 0.0)
    factor = scale + tl.zeros([ROWS], tl.float64)
    if RENORMALIZE:
        factor = factor * inverse_64(tl.maximum(tl.sum(weight, axis=1), 1e-20))
    weight = (weight * factor[:, None]).to(tl.float32)
    to = (row * (K + num_shared))[:, None]
    mask = live[:, None] & (rank < K)
    tl.store(weights + to + rank, weight, mask=mask)
    tl.store(ids + to + rank, candidate, mask=mask)
    for n in range(0, num_shared, 32):
        shared = n + lane
        mask = live[:, None] & (shared < num_shared)
        tl.store(weights + to + K + shared, tl.full([ROWS, 32], 1.0, tl.float32), mask=mask)
        tl.store(ids + to + K + shared, EXPERTS + shared + tl.zeros([ROWS, 32], tl.int32), mask=mask)


# --- loads ------------------------------------------------------------------------------------------------------------


@triton.jit
def load_logits(at, partial_stride, mask, steps, PARTIALS: tl.constexpr, UNROLL: tl.constexpr):
    """fp32 logits at pointers, masked ones zero; with PARTIALS their sum."""
    if PARTIALS:
        return sum_in_order(at, partial_stride, mask, steps, PARTIALS, UNROLL)
    else:
        return dev.to_fp32(tl.load(at, mask=mask, other=0.0))


@triton.jit
def sum_in_order(at, stride, mask, steps, PARTIALS: tl.constexpr, UNROLL: tl.constexpr):
    """Sum of PARTIALS fp32 numbers that lie `stride` apart, from the first to the last.

    `steps` is PARTIALS too, as a number that the compiler does not know where it should not unroll.
    """
    if UNROLL and PARTIALS <= UNROLLED:
        return sum_loaded(load_partials(at, stride, mask, PARTIALS), PARTIALS)
    else:
        total = tl.load(at, mask=mask, other=0.0)
        for _ in range(1, steps):
            at += stride
            total += tl.load(at, mask=mask, other=0.0)
        return total


@triton.jit
def load_partials(at, stride, mask, PARTIALS: tl.constexpr):
    """PARTIALS tensors that lie `stride` apart."""
    found = ()
    for n in tl.static_range(PARTIALS):
        found = found + (tl.load(at + tl.cast(n, tl.int64) * stride, mask=mask, other=0.0),)
    return found


@triton.jit
def sum_loaded(partials, PARTIALS: tl.constexpr):
    """Sum from the first to the last."""
    total = partials[0]
    for n in tl.static_range(1, PARTIALS):
        total += partials[n]
    return total


@triton.jit
def load_parts(
    at, partial_stride, live, steps, WIDTH: tl.constexpr, PARTS: tl.constexpr, EXPERTS: tl.constexpr,
    PARTIALS: tl.constexpr, EAGER: tl.constexpr,
):  # fmt: skip
    """Logits of rows in parts of WIDTH experts; with EAGER all loads precede all additions."""
    loaded = ()
    for part in tl.static_range(PARTS):
        expert = part * WIDTH + tl.arange(0, WIDTH)
        mask = live[:, None] & (expert < EXPERTS)[None, :]
        if EAGER and PARTIALS > 0 and PARTIALS * PARTS * WIDTH <= EAGER_VALUES:
            loaded = loaded + (load_partials(at[:, None] + expert[None, :], partial_stride, mask, PARTIALS),)
        else:
            loaded = loaded + (
                load_logits(at[:, None] + expert[None, :], partial_stride, mask, steps, PARTIALS, False),
            )
    logits = loaded
    if EAGER and PARTIALS > 0 and PARTIALS * PARTS * WIDTH <= EAGER_VALUES:
        tl.debug_barrier()  # no load may move below an addition: the compiler would wait for each part's loads
        logits = ()
        for part in tl.static_range(PARTS):
            logits = logits + (sum_loaded(loaded[part], PARTIALS),)
    return logits


@triton.jit
def load_bias(bias, expert, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """fp32 bias of experts for each row: loaded as often, it lies where the logits do, and nothing moves."""
    expert = expert[None, :] + tl.zeros([ROWS, 1], tl.int32)
    return dev.to_fp32(tl.load(bias + expert, mask=expert < EXPERTS, other=0.0))


# --- order ------------------------------------------------------------------------------------------------------------


@triton.jit
def sorted_parts(x, PARTS: tl.constexpr):
    """Up to four parts, each place by itself sorted, the largest first."""
    tl.static_assert(PARTS <= 4)
    if PARTS == 1:
        return x
    elif PARTS == 2:
        return (tl.maximum(x[0], x[1]), tl.minimum(x[0], x[1]))
    elif PARTS == 3:
        a, b = tl.maximum(x[0], x[1]), tl.minimum(x[0], x[1])
        c, d = tl.maximum(b, x[2]), tl.minimum(b, x[2])
        return (tl.maximum(a, c), tl.minimum(a, c), d)
    else:
        a, b = tl.maximum(x[0], x[1]), tl.minimum(x[0], x[1])
        c, d = tl.maximum(x[2], x[3]), tl.minimum(x[2], x[3])
        e, f = tl.minimum(a, c), tl.maximum(b, d)
        return (tl.maximum(a, c), tl.maximum(e, f), tl.minimum(e, f), tl.minimum(b, d))


@triton.jit
def without(x, taken, PARTS: tl.constexpr):
    """Sorted parts without the first where it is taken."""
    rest = ()
    for part in tl.static_range(PARTS - 1):
        rest = rest + (tl.where(taken, x[part + 1], x[part]),)
    return rest + (tl.where(taken, LOWEST, x[PARTS - 1]),)


@triton.jit
def largest_of(keys, PARTS: tl.constexpr):
    """Largest key of each row over all parts."""
    top = keys[0]
    for part in tl.static_range(1, PARTS):
        top = tl.maximum(top, keys[part])
    return tl.max(top, axis=1)


@triton.jit
def exact_scores(
    at, partial_stride, bias, candidate, live, PARTIALS: tl.constexpr, BIAS: tl.constexpr, LOG1P: tl.constexpr
):
    """Scores of candidates in fp64 [rows, 32], zero where they are in fp32, and the order of their choices."""
    known = candidate != NOBODY
    expert = tl.where(known, candidate, 0)
    logit = load_logits(at[:, None] + expert, partial_stride, live[:, None] & known, PARTIALS, PARTIALS, True)
    score, wide = exact_score(logit, LOG1P)
    if BIAS:
        order = dev.in_order(score + dev.to_fp32(tl.load(bias + expert, mask=known, other=0.0)))
    else:
        order = dev.in_order(score)
    return wide, tl.where(known, order, LOWEST)


@triton.jit
def exact_orders(
    at, partial_stride, bias, live, steps, WIDTH: tl.constexpr, PARTS: tl.constexpr, EXPERTS: tl.constexpr,
    PARTIALS: tl.constexpr, BIAS: tl.constexpr, LOG1P: tl.constexpr,
):  # fmt: skip
    """Order of every expert's choice, in parts of WIDTH. It reads the logits again, which few rows need."""
    logits = load_parts(at, partial_stride, live, steps, WIDTH, PARTS, EXPERTS, PARTIALS, False)
    orders = ()
    for part in tl.static_range(PARTS):
        expert = part * WIDTH + tl.arange(0, WIDTH)
        score, _ = exact_score(logits[part], LOG1P)
        if BIAS:
            score += load_bias(bias, expert, EXPERTS, live.shape[0])
        orders = orders + (tl.where((expert < EXPERTS)[None, :], dev.in_order(score), LOWEST),)
    return orders


@triton.jit
def ranks(candidate, order, K: tl.constexpr, CANDIDATES: tl.constexpr):
    """Ranks of candidates by order, then id, NOBODY from K on; the K-th order; whether one of these ties with another.

    Each is compared with all, so that reductions need not wait for each other.
    """
    lane = tl.arange(0, 32)[None, :]
    rank = tl.zeros(candidate.shape, tl.int32)
    ties = tl.zeros(candidate.shape, tl.int32)
    for n in tl.static_range(CANDIDATES):
        here = lane == n
        other = tl.max(tl.where(here, order, LOWEST), axis=1)[:, None]
        id = tl.max(tl.where(here, candidate, LOWEST), axis=1)[:, None]
        rank += ((other > order) | ((other == order) & (id < candidate))).to(tl.int32)
        ties += ((other == order) & (id != candidate)).to(tl.int32)
    rank = tl.where(rank < K, rank, NOBODY)
    last = tl.max(tl.where(rank == K - 1, order, LOWEST), axis=1)
    tied = tl.max(tl.where(rank < K, ties, 0), axis=1) > 0
    return rank, last, tied


@triton.jit
def picks_of_all(
    orders, inside, K: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """Ids of the K largest orders, the lower id first among equals, in lanes [ROWS, 32]; NOBODY in the others."""
    lane = tl.arange(0, 32)[None, :]
    picks = tl.full([ROWS, 32], NOBODY, tl.int32)
    for n in tl.static_range(K):
        largest = largest_of(orders, PARTS)[:, None]
        lowest = tl.full([ROWS, WIDTH], NOBODY, tl.int32)
        for part in tl.static_range(PARTS):
            expert = (part * WIDTH + inside)[None, :]
            lowest = tl.minimum(lowest, tl.where(orders[part] == largest, expert, NOBODY))
        pick = tl.min(lowest, axis=1)[:, None]
        picks = tl.where(lane == n, pick, picks)
        rest = ()
        for part in tl.static_range(PARTS):
            rest = rest + (tl.where((part * WIDTH + inside)[None, :] == pick, LOWEST, orders[part]),)
        orders = rest
    return picks


@triton.jit
def picks_of_lanes(orders, inside, K: tl.constexpr, ROWS: tl.constexpr):
    """As `picks_of_all` in the order of 64 lanes that sort their six experts and offer the best, the lowest first."""
    shape: tl.constexpr = orders[0].shape
    lane64 = inside[None, :] + tl.zeros(shape, tl.int32)
    v0, v1, v2, v3, v4, v5 = orders[0], orders[1], orders[2], orders[3], orders[4], orders[5]
    e0, e1, e2 = lane64, lane64 + 64, lane64 + 128
    e3, e4, e5 = lane64 + 192, lane64 + 256, lane64 + 320
    v0, e0, v1, e1 = exchange(v0, e0, v1, e1)
    v2, e2, v3, e3 = exchange(v2, e2, v3, e3)
    v4, e4, v5, e5 = exchange(v4, e4, v5, e5)
    v0, e0, v2, e2 = exchange(v0, e0, v2, e2)
    v1, e1, v4, e4 = exchange(v1, e1, v4, e4)
    v3, e3, v5, e5 = exchange(v3, e3, v5, e5)
    v0, e0, v1, e1 = exchange(v0, e0, v1, e1)
    v2, e2, v3, e3 = exchange(v2, e2, v3, e3)
    v4, e4, v5, e5 = exchange(v4, e4, v5, e5)
    v1, e1, v2, e2 = exchange(v1, e1, v2, e2)
    v3, e3, v4, e4 = exchange(v3, e3, v4, e4)
    v2, e2, v3, e3 = exchange(v2, e2, v3, e3)
    lane = tl.arange(0, 32)[None, :]
    picks = tl.full([ROWS, 32], NOBODY, tl.int32)
    for n in tl.static_range(K):
        largest = tl.max(v0, axis=1)[:, None]
        winner = tl.min(tl.where(v0 == largest, lane64, NOBODY), axis=1)[:, None]
        won = lane64 == winner
        picks = tl.where(lane == n, tl.min(tl.where(won, e0, NOBODY), axis=1)[:, None], picks)
        v0, e0 = tl.where(won, v1, v0), tl.where(won, e1, e0)
        v1, e1 = tl.where(won, v2, v1), tl.where(won, e2, e1)
        v2, e2 = tl.where(won, v3, v2), tl.where(won, e3, e2)
        v3, e3 = tl.where(won, v4, v3), tl.where(won, e4, e3)
        v4, e4 = tl.where(won, v5, v4), tl.where(won, e5, e4)
        v5 = tl.where(won, LOWEST, v5)
    return picks


@triton.jit
def exchange(a, a_id, b, b_id):
    """The larger first; equals stay."""
    swap = a < b
    return tl.where(swap, b, a), tl.where(swap, b_id, a_id), tl.where(swap, a, b), tl.where(swap, a_id, b_id)


# --- scores -----------------------------------------------------------------------------------------------------------


_BOUND_CUDA: tl.constexpr = tl.constexpr("""{
.reg .f32 s, t;
.reg .pred p;
mul.f32 t, $1, 0f3FB8AA3B;
ex2.approx.ftz.f32 t, t;
add.f32 t, t, 0f3F800000;
lg2.approx.ftz.f32 t, t;
fma.rn.f32 t, t, 0f3F317244, 0f35800000;
mul.f32 s, $1, 0f3F800020;
setp.gt.f32 p, $1, 0f41A00000;
selp.f32 t, s, t, p;
sqrt.approx.ftz.f32 $0, t;
}""")  # the portable form of `score_bound`, without its care for subnormal numbers


@triton.jit
def score_bound(x, CAST: tl.constexpr):
    """At least the score of either form, and little above it; NaN of NaN."""
    if CAST == dev.PORTABLE:
        soft = tl.log2(1.0 + tl.exp2(x * LOG2E_32)) * LOOSE_LN2 + SLACK
        return tl.sqrt(tl.where(x > 20.0, x * LOOSE, soft))
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
    p = next_term(tl.full(r.shape, 2.505210838544172e-08, tl.float64), r, 2.755731922398589e-07)
    p = next_term(p, r, 2.7557319223985893e-06)
    p = next_term(p, r, 2.48015873015873e-05)
    p = next_term(p, r, 0.0001984126984126984)
    p = next_term(p, r, 0.001388888888888889)
    p = next_term(p, r, 0.008333333333333333)
    p = next_term(p, r, 0.041666666666666664)
    p = next_term(p, r, 0.16666666666666666)
    p = next_term(p, r, 0.5)
    p = next_term(p, r, 1.0)
    p = next_term(p, r, 1.0)
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
    p = next_term(tl.full(s.shape, 2.0 / 19.0, tl.float64), s, 2.0 / 17.0)
    p = next_term(p, s, 2.0 / 15.0)
    p = next_term(p, s, 2.0 / 13.0)
    p = next_term(p, s, 2.0 / 11.0)
    p = next_term(p, s, 2.0 / 9.0)
    p = next_term(p, s, 2.0 / 7.0)
    p = next_term(p, s, 0.4)
    p = next_term(p, s, 2.0 / 3.0)
    p = next_term(p, s, 2.0)
    return tl.fma(p, z, n.to(tl.float64) * LN2)


@triton.jit
def next_term(sum, x, C: tl.constexpr):
    """sum * x + C in fp64, rounded once; Triton 3.6 rounds a plain number given to `fma` to fp32."""
    return tl.fma(sum, x, tl.full(x.shape, C, tl.float64))


# --- what is compiled offline -----------------------------------------------------------------------------------------

_TYPES = {"source": "*fp32", "summed": "*fp32", "bias": "*fp32", "weights": "*fp32", "ids": "*i32", "scale": "fp32"}
_ALIGNED = ("source_stride", "partial_stride", "summed_stride")


def target_cases(variant: dict[str, Any]) -> list[TargetCase]:
    """The gate's cases on one kind of device."""
    cases = []
    for label, count, lane64, more in (
        ("gate many", 8192, False, {"BIAS": True}),
        ("gate log1p", 1, False, {"BIAS": True, "LOG1P": True}),
        ("gate many lane64", 8192, True, {"BIAS": True}),
        ("gate partials", 1, False, {"BIAS": True, "PARTIALS": 10}),
        ("gate many partials", 8192, False, {"BIAS": True, "PARTIALS": 10, "KEEP": True}),
        ("gate top-16", 8192, False, {"BIAS": True, "K": 16}),
        ("gate partials, stride 1", 1, False, {"PARTIALS": 3, "partial_stride": 1}),  # as the launch specializes it
    ):
        numbers: dict[str, Any] = {
            "PARTIALS": 0,
            "KEEP": False,
            "BIAS": False,
            "K": 6,
            "RENORMALIZE": True,
            "LOG1P": False,
            **more,
        }
        repeat, rows = gate_tile(count)
        numbers |= {"REPEAT": repeat, "ROWS": rows, **shape_of(384, numbers["K"], lane64)}
        case = case_of(gate_kernel, label, variant, 1, _TYPES, **numbers)
        aligned = tuple(name for name in _ALIGNED if name in case.signature)
        options = register_options(variant["constexprs"]["CAST"], numbers["PARTIALS"] > 0, count, numbers["K"])
        cases.append(replace(case, aligned=aligned, options={**case.options, "num_stages": 1, **options}))
    return cases
