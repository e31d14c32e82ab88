"""The gate of stage `route`: sqrt(softplus(logit)), top-k by it plus a bias, weights, and the sum of partials before.

A row lies in parts of WIDTH experts, some in each lane. Every expert gets a cheap upper bound of its choice, packed
with its id into one integer. Each lane sorts its own, and the largest few of all are scored exactly, those of several
rows side by side in SLOTS lanes each. That settles a row unless the k-th exact choice is not above the bound of all
that were left out: then every expert is scored exactly. Choices are compared as integers in the order of the floats.
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
from latentkv.kernels.launch import E4M3_CAST, PORTABLE, TargetCase, common_options, on_device, wave_size
from latentkv.kernels.scores import exact_score, inverse_64, score_bound
from latentkv.kernels.sorting import columns_of, exchange, largest_few, without
from latentkv.kernels.store import case_of

LOWEST = tl.constexpr(-2147483648)  # below the order of -Inf
NOBODY = tl.constexpr(2147483647)
WAVE = 32  # lanes that share rows' candidates
MANY = 2048  # rows from which on a program takes as many as have room in a wave
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
    rows, slots, slow_rows = gate_tile(count, k, partials is not None)
    options = common_options(source.device)
    options |= register_options(options["CAST"], partials is not None, count, k, tie_order == "lane64")
    with on_device(source):
        gate_kernel[(triton.cdiv(count, rows),)](
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
            ROWS=rows,
            SLOTS=slots,
            SLOW_ROWS=slow_rows,
            **shape_of(experts, k, tie_order == "lane64", wave_size(source.device)),
            num_warps=1,
            num_stages=1,
            **options,
        )
    return weights, ids


def gate_tile(count: int, k: int, partials: bool) -> tuple[int, int, int]:
    """Rows of a program, which is one warp; lanes of a row's candidates; rows of a step where all experts are scored.

    Candidates are k + 2: with k + 1, two rows in a thousand would not be settled, which every launch waits for.
    """
    slots = max(8, triton.next_power_of_2(k + 2))
    if dev.INTERPRETED:  # it takes as long for one row as for many
        return 64, slots, 64
    return (1, WAVE, 1) if count <= MANY or partials else (WAVE // slots, slots, 1)


def register_options(cast: int, partials: bool, count: int, k: int, lane64: bool) -> dict[str, int]:
    """Of a launch that loads all partials before it adds (many rows rather share a multiprocessor), picks many, or has
    the slow way of `lane64` for several rows."""
    if partials and count <= MANY and cast == E4M3_CAST:
        return {"maxnreg": EAGER_REGISTERS}
    return {"maxnreg": PICK_REGISTERS} if cast != PORTABLE and (k > 8 or (lane64 and count > MANY)) else {}


def shape_of(experts: int, k: int, lane64: bool, wave: int) -> dict[str, Any]:
    """How a row is cut into parts, how many keys a lane sorts, and how many experts are scored exactly.

    Of eight candidates, five lie in one of 32 lanes in one row of 20,000; of 18, eight in one of 800,000.
    """
    width = wave * min(4, triton.next_power_of_2(triton.cdiv(experts, wave)))
    parts = triton.cdiv(experts, width)
    return {
        "EXPERTS": experts,
        "LANE64": lane64,
        "WIDTH": width,
        "PARTS": parts,
        "LANES": wave,
        "DEPTH": min(parts * width // wave, 5 if k <= 8 else 8),
        "ID_MASK": triton.next_power_of_2(experts) - 1,
        "CANDIDATES": k + 2,
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
    LANES: tl.constexpr,
    DEPTH: tl.constexpr,
    ID_MASK: tl.constexpr,
    CANDIDATES: tl.constexpr,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    SLOW_ROWS: tl.constexpr,
    CAST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Gate ROWS rows of logits or, with PARTIALS, of partial sums whose sum KEEP stores in `summed`."""
    dev.begin(OVERLAP)
    first = tl.program_id(0).to(tl.int64) * ROWS
    keys = keys_of_rows(
        first, source, source_stride, partial_stride, steps, summed, summed_stride, bias, count, PARTIALS, KEEP, BIAS,
        EXPERTS, WIDTH, PARTS, LANES, ID_MASK, ROWS, CAST,
    )  # fmt: skip
    found = candidates_of(keys, LANES, DEPTH, CANDIDATES, ROWS, SLOTS)

    # from here on, a row's candidates are its SLOTS lanes
    lane = tl.arange(0, ROWS * SLOTS)
    slot = lane % SLOTS
    row = first + lane // SLOTS
    at = source + tl.minimum(row, count - 1) * source_stride
    candidate = tl.where(found == LOWEST, NOBODY, ID_MASK - (found & ID_MASK))
    weight, order = exact_scores(at, partial_stride, bias, candidate, PARTIALS, BIAS, LOG1P)
    rank, tied = ranks(candidate, order, K, CANDIDATES, SLOTS)

    # what was left out is at most the last that was found, rounded up; NOBODY is a lane without another sorted key
    last = value_at(found, CANDIDATES - 1, SLOTS)
    doubtful = (last != LOWEST) & ((last == NOBODY) | ((rank == K - 1) & (order <= (last | ID_MASK))))
    if LANE64:
        doubtful = doubtful | (tied & (rank < K))
    doubtful = doubtful.to(tl.int32)
    if tl.max(doubtful, axis=0) != 0:
        doubt = value_at(doubtful, 0, SLOTS)
        for n in tl.static_range(1, CANDIDATES):
            doubt = doubt | value_at(doubtful, n, SLOTS)
        doubt = doubt != 0
        candidate = tl.where(doubt, NOBODY, candidate)
        for turn in range(ROWS // SLOW_ROWS):
            picked = source + tl.minimum(first + turn * SLOW_ROWS + tl.arange(0, SLOW_ROWS), count - 1) * source_stride
            mine = doubt & (lane // SLOTS // SLOW_ROWS == turn)
            if LANE64:
                orders = exact_orders(picked, partial_stride, bias, steps, 64, 6, EXPERTS, PARTIALS, BIAS, LOG1P)
                candidate = picks_of_lanes(orders, candidate, mine, K, SLOTS)
            else:
                orders = exact_orders(picked, partial_stride, bias, steps, WIDTH, PARTS, EXPERTS, PARTIALS, BIAS, LOG1P)
                candidate = picks_of_all(orders, candidate, mine, K, SLOTS, WIDTH, PARTS)
        weight, order = exact_scores(at, partial_stride, bias, candidate, PARTIALS, BIAS, LOG1P)
        rank = tl.where(doubt, tl.where(candidate == NOBODY, NOBODY, slot), rank)

    # weights in fp64, summed in the candidates' order, rounded once
    weight = tl.where((rank < K) & (weight == weight), weight, 0.0)
    factor = scale + tl.zeros(lane.shape, tl.float64)
    if RENORMALIZE:
        total = value_at(weight, 0, SLOTS)
        for n in tl.static_range(1, CANDIDATES):
            total += value_at(weight, n, SLOTS)
        factor = factor * inverse_64(tl.maximum(total, 1e-20))
    weight = (weight * factor).to(tl.float32)
    to = row * (K + num_shared)
    tl.store(weights + to + rank, weight, mask=(row < count) & (rank < K))
    tl.store(ids + to + rank, candidate, mask=(row < count) & (rank < K))
    for n in range(0, num_shared, SLOTS):
        shared = n + slot
        mask = (row < count) & (shared < num_shared)
        tl.store(weights + to + K + shared, tl.full(lane.shape, 1.0, tl.float32), mask=mask)
        tl.store(ids + to + K + shared, EXPERTS + shared, mask=mask)


@triton.jit
def keys_of_rows(
    first, source, source_stride, partial_stride, steps, summed, summed_stride, bias, count, PARTIALS: tl.constexpr,
    KEEP: tl.constexpr, BIAS: tl.constexpr, EXPERTS: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
    LANES: tl.constexpr, ID_MASK: tl.constexpr, ROWS: tl.constexpr, CAST: tl.constexpr,
):  # fmt: skip
    """Bounds of all choices with ids, one integer each, in tensors [ROWS, lanes]."""
    lane = tl.arange(0, WIDTH)
    row = first + tl.arange(0, ROWS)
    at = source + tl.minimum(row, count - 1) * source_stride
    logits = load_parts(at, partial_stride, steps, WIDTH, PARTS, EXPERTS, PARTIALS, CAST == dev.E4M3_CAST)
    if BIAS:
        biases = load_biases(bias, WIDTH, PARTS, EXPERTS, ROWS)
    keys = ()
    for part in tl.static_range(PARTS):
        if KEEP:
            to = (summed + row * summed_stride)[:, None] + lane[None, :]
            mask = (row < count)[:, None] & known(lane, part, WIDTH, EXPERTS)
            tl.store(to + part * WIDTH, logits[part], mask=mask)
        bound = score_bound(logits[part], CAST)
        if BIAS:
            bound += biases[part]
        key = key_of(bound, (ID_MASK - part * WIDTH) - lane[None, :], ID_MASK, CAST)
        if (part + 1) * WIDTH > EXPERTS:
            key = tl.where(known(lane, part, WIDTH, EXPERTS), key, LOWEST)
        keys = keys + columns_of(key, WIDTH // LANES)
    return keys


@triton.jit
def candidates_of(
    keys, LANES: tl.constexpr, DEPTH: tl.constexpr, CANDIDATES: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr
):  # fmt: skip
    """The largest keys of each row, in its lanes of [ROWS * SLOTS]; LOWEST in the others."""
    HIDDEN: tl.constexpr = len(keys) > DEPTH  # a lane that has given all that it sorted may have more
    lane = tl.arange(0, LANES)[None, :]
    found = tl.full([ROWS, LANES], LOWEST, tl.int32)
    keys = largest_few(keys, DEPTH)
    for n in tl.static_range(CANDIDATES):
        largest = tl.max(keys[0], axis=1)[:, None]
        found = tl.where(lane == n, largest, found)
        keys = without(keys, keys[0] == largest, NOBODY if HIDDEN else LOWEST, DEPTH, CANDIDATES - n)
    # each row to all lanes, of which each keeps its own row's
    to = tl.arange(0, ROWS * SLOTS)[None, :] + tl.zeros([ROWS, ROWS * SLOTS], tl.int32)
    spread = tl.gather(found, to % SLOTS, axis=1)
    return tl.max(tl.where(to // SLOTS == tl.arange(0, ROWS)[:, None], spread, LOWEST), axis=0)


# --- loads ------------------------------------------------------------------------------------------------------------


@triton.jit
def known(lane, part, WIDTH: tl.constexpr, EXPERTS: tl.constexpr):
    """Whether the lanes of a part are experts [1, WIDTH]."""
    return (lane < EXPERTS - part * WIDTH)[None, :]


@triton.jit
def load_logits(at, partial_stride, mask, steps, PARTIALS: tl.constexpr, UNROLL: tl.constexpr):
    """fp32 logits at pointers, masked ones zero; with PARTIALS their sum."""
    if PARTIALS:
        return sum_in_order(at, partial_stride, mask, steps, PARTIALS, UNROLL)
    else:
        return dev.to_fp32(load_where(at, mask))


@triton.jit
def load_where(at, mask):
    """Values at pointers, masked ones zero."""
    if mask is None:
        return tl.load(at)
    else:
        return tl.load(at, mask=mask, other=0.0)


@triton.jit
def sum_in_order(at, stride, mask, steps, PARTIALS: tl.constexpr, UNROLL: tl.constexpr):
    """Sum of PARTIALS fp32 numbers that lie `stride` apart, from the first to the last.

    `steps` is PARTIALS too, as a number that the compiler does not know where it should not unroll.
    """
    if UNROLL and PARTIALS <= UNROLLED:
        return sum_loaded(load_partials(at, stride, mask, PARTIALS), PARTIALS)
    else:
        total = load_where(at, mask)
        for _ in range(1, steps):
            at += stride
            total += load_where(at, mask)
        return total


@triton.jit
def load_partials(at, stride, mask, PARTIALS: tl.constexpr):
    """PARTIALS tensors that lie `stride` apart."""
    found = ()
    for n in tl.static_range(PARTIALS):
        found = found + (load_where(at + tl.cast(n, tl.int64) * stride, mask),)
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
    at, partial_stride, steps, WIDTH: tl.constexpr, PARTS: tl.constexpr, EXPERTS: tl.constexpr,
    PARTIALS: tl.constexpr, EAGER: tl.constexpr,
):  # fmt: skip
    """Logits of rows in parts of WIDTH experts; with EAGER all loads precede all additions."""
    ALL_FIRST: tl.constexpr = EAGER and PARTIALS > 0 and PARTIALS * PARTS * WIDTH <= EAGER_VALUES
    lane = tl.arange(0, WIDTH)
    pointers = at[:, None] + lane[None, :]
    loaded = ()
    for part in tl.static_range(PARTS):
        mask = None
        if (part + 1) * WIDTH > EXPERTS:
            mask = known(lane, part, WIDTH, EXPERTS)
        if ALL_FIRST:
            loaded = loaded + (load_partials(pointers + part * WIDTH, partial_stride, mask, PARTIALS),)
        else:
            loaded = loaded + (load_logits(pointers + part * WIDTH, partial_stride, mask, steps, PARTIALS, False),)
    logits = loaded
    if ALL_FIRST:
        tl.debug_barrier()  # no load may move below an addition: the compiler would wait for each part's loads
        logits = ()
        for part in tl.static_range(PARTS):
            logits = logits + (sum_loaded(loaded[part], PARTIALS),)
    return logits


@triton.jit
def load_biases(bias, WIDTH: tl.constexpr, PARTS: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """fp32 bias of experts for each row: loaded as often, it lies where the logits do, and nothing moves."""
    lane = tl.arange(0, WIDTH)
    pointers = bias + lane[None, :] + tl.zeros([ROWS, 1], tl.int32)
    loaded = ()
    for part in tl.static_range(PARTS):
        mask = None
        if (part + 1) * WIDTH > EXPERTS:
            mask = known(lane, part, WIDTH, EXPERTS)
        loaded = loaded + (dev.to_fp32(load_where(pointers + part * WIDTH, mask)),)
    return loaded


# --- order ------------------------------------------------------------------------------------------------------------


_KEY_CUDA: tl.constexpr = tl.constexpr("""{
.reg .b32 s, t;
mov.b32 t, $1;
shr.s32 s, t, 31;
lop3.b32 t, t, s, 0x7FFFFFFF, 0x78;
lop3.b32 $0, t, $2, $3, 0xEA;
}""")  # (t ^ (s & 0x7FFFFFFF)) & $2 | $3: left to itself, the compiler takes twice as many instructions


@triton.jit
def key_of(bound, low, ID_MASK: tl.constexpr, CAST: tl.constexpr):
    """The order of a bound, rounded down, with other bits below. A NaN is the largest, or with PORTABLE -Inf."""
    if CAST == dev.PORTABLE:
        return (dev.in_order(bound) & (-1 - ID_MASK)) | low
    else:  # the arithmetic of NVIDIA's GPUs makes one NaN only, which is positive
        upper = tl.full(bound.shape, -1 - ID_MASK, tl.int32)
        low = low + tl.zeros(bound.shape, tl.int32)
        return tl.inline_asm_elementwise(
            _KEY_CUDA, "=r,f,r,r", [bound, upper, low], tl.int32, is_pure=True, pack=1
        )  # fmt: skip


@triton.jit
def value_at(x, N: tl.constexpr, SLOTS: tl.constexpr):
    """The value of each row's N-th lane, in all of its lanes."""
    return tl.gather(x, tl.arange(0, x.shape[0]) // SLOTS * SLOTS + N, axis=0)


@triton.jit
def largest_of(keys, PARTS: tl.constexpr):
    """Largest key of each row over all parts."""
    top = keys[0]
    for part in tl.static_range(1, PARTS):
        top = tl.maximum(top, keys[part])
    return tl.max(top, axis=1)


@triton.jit
def exact_scores(at, partial_stride, bias, candidate, PARTIALS: tl.constexpr, BIAS: tl.constexpr, LOG1P: tl.constexpr):
    """Scores of candidates in fp64, zero where they are in fp32, and the order of their choices."""
    nobody = candidate == NOBODY
    expert = tl.where(nobody, 0, candidate)
    logit = load_logits(at + expert, partial_stride, None, PARTIALS, PARTIALS, True)
    score, wide = exact_score(logit, LOG1P)
    if BIAS:
        score += dev.to_fp32(tl.load(bias + expert))
    return wide, tl.where(nobody, LOWEST, dev.in_order(score))


@triton.jit
def exact_orders(
    at, partial_stride, bias, steps, WIDTH: tl.constexpr, PARTS: tl.constexpr, EXPERTS: tl.constexpr,
    PARTIALS: tl.constexpr, BIAS: tl.constexpr, LOG1P: tl.constexpr,
):  # fmt: skip
    """Order of every expert's choice, in parts of WIDTH. It reads the logits again, which few rows need."""
    logits = load_parts(at, partial_stride, steps, WIDTH, PARTS, EXPERTS, PARTIALS, False)
    if BIAS:
        biases = load_biases(bias, WIDTH, PARTS, EXPERTS, at.shape[0])
    lane = tl.arange(0, WIDTH)
    orders = ()
    for part in tl.static_range(PARTS):
        score, _ = exact_score(logits[part], LOG1P)
        if BIAS:
            score += biases[part]
        orders = orders + (tl.where(known(lane, part, WIDTH, EXPERTS), dev.in_order(score), LOWEST),)
    return orders


@triton.jit
def ranks(candidate, order, K: tl.constexpr, CANDIDATES: tl.constexpr, SLOTS: tl.constexpr):
    """Ranks of candidates by order, then id, NOBODY from K on; whether another candidate has the same order."""
    rank = tl.zeros(candidate.shape, tl.int32)
    tied = tl.zeros(candidate.shape, tl.int1)
    for n in tl.static_range(CANDIDATES):  # each is compared with all, so that no comparison waits for another
        other, id = value_at(order, n, SLOTS), value_at(candidate, n, SLOTS)
        rank += ((other > order) | ((other == order) & (id < candidate))).to(tl.int32)
        tied = tied | ((other == order) & (id != candidate))
    return tl.where(rank < K, rank, NOBODY), tied


@triton.jit
def picks_of_all(
    orders, picks, mine, K: tl.constexpr, SLOTS: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """Ids of the K largest orders, the lower id first among equals, in the lanes of picks that are `mine`."""
    lane = tl.arange(0, WIDTH)[None, :]
    for n in tl.static_range(K):
        largest = largest_of(orders, PARTS)[:, None]
        lowest = tl.full(orders[0].shape, NOBODY, tl.int32)
        for part in tl.static_range(PARTS):
            lowest = tl.minimum(lowest, tl.where(orders[part] == largest, part * WIDTH + lane, NOBODY))
        pick = tl.min(lowest, axis=1)
        picks = placed(picks, pick, mine, n, SLOTS)
        rest = ()
        for part in tl.static_range(PARTS):
            rest = rest + (tl.where(part * WIDTH + lane == pick[:, None], LOWEST, orders[part]),)
        orders = rest
    return picks


@triton.jit
def placed(picks, pick, mine, N: tl.constexpr, SLOTS: tl.constexpr):
    """Picks with each row's N-th where the lane is `mine`."""
    lane = tl.arange(0, picks.shape[0])
    return tl.where(mine & (lane % SLOTS == N), tl.gather(pick, lane // SLOTS % pick.shape[0], axis=0), picks)


@triton.jit
def picks_of_lanes(orders, picks, mine, K: tl.constexpr, SLOTS: tl.constexpr):
    """As `picks_of_all` in the order of 64 lanes that sort their six experts and offer the best, the lowest first."""
    shape: tl.constexpr = orders[0].shape
    lane64 = tl.arange(0, 64)[None, :] + tl.zeros(shape, tl.int32)
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
    for n in tl.static_range(K):
        largest = tl.max(v0, axis=1)[:, None]
        winner = tl.min(tl.where(v0 == largest, lane64, NOBODY), axis=1)[:, None]
        won = lane64 == winner
        picks = placed(picks, tl.min(tl.where(won, e0, NOBODY), axis=1), mine, n, SLOTS)
        v0, e0 = tl.where(won, v1, v0), tl.where(won, e1, e0)
        v1, e1 = tl.where(won, v2, v1), tl.where(won, e2, e1)
        v2, e2 = tl.where(won, v3, v2), tl.where(won, e3, e2)
        v3, e3 = tl.where(won, v4, v3), tl.where(won, e4, e3)
        v4, e4 = tl.where(won, v5, v4), tl.where(won, e5, e4)
        v5 = tl.where(won, LOWEST, v5)
    return picks


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
        rows, slots, slow_rows = gate_tile(count, numbers["K"], numbers["PARTIALS"] > 0)
        numbers |= {"ROWS": rows, "SLOTS": slots, "SLOW_ROWS": slow_rows}
        numbers |= shape_of(384, numbers["K"], lane64, variant.get("wave", 32))
        case = case_of(gate_kernel, label, variant, 1, _TYPES, **numbers)
        aligned = tuple(name for name in _ALIGNED if name in case.signature)
        options = register_options(variant["constexprs"]["CAST"], numbers["PARTIALS"] > 0, count, numbers["K"], lane64)
        cases.append(replace(case, aligned=aligned, options={**case.options, "num_stages": 1, **options}))
    return cases
