"""Stage `select` in Triton: schedules, in two launches whose registers do not grow with the rows.

The first counts the shares for many sizes of a share at once, one size a program. In the second, every program narrows
the size down to the smallest that fits and writes its own slots: a row marks the slot of its first share in the output
itself, and a running maximum spreads the marks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from latentkv.kernels import device as dev
from latentkv.kernels.launch import DEVICE_VARIANTS, TargetCase, common_options, on_device, wave_size

SIZES_AT_ONCE = 512  # programs of the first launch, at most
TILE, SMALL_TILE = 2048, 256  # rows at a time, and where there are no more
SLOTS = 256  # a program of the second launch
LANES = 256
MOST = tl.constexpr(2**31 - 1)  # of a field


# --- launches ---------------------------------------------------------------------------------------------------------


def decode_schedule(lengths: Tensor, max_len: int, block: int, next_n: int, out: Tensor) -> None:
    """Launch both kernels; units of four fields."""
    _launch(lengths, None, max_len, block, next_n, out)


def prefill_schedule(lengths: Tensor, row_to_batch: Tensor | None, max_len: int, block: int, out: Tensor) -> None:
    """Launch both kernels; units of six fields."""
    _launch(lengths, row_to_batch, max_len, block, 1, out)


def _launch(lengths: Tensor, row_to_batch: Tensor | None, max_len: int, block: int, next_n: int, out: Tensor) -> None:
    slots = out.shape[0] // next_n
    if slots == 0:
        return
    most = max(1, triton.cdiv(max_len, block))
    step = triton.cdiv(most, _sizes_at_once(out.device))
    sizes = triton.cdiv(most, step)
    # a captured graph keeps its pool, and so the counts; nothing else outlives the call
    counts = torch.empty(sizes + 1, dtype=torch.int64, device=out.device)
    batch_of = row_to_batch if row_to_batch is not None else lengths
    rows = (lengths, lengths.stride(0), lengths.shape[0])
    constants = _constants(lengths.shape[0])
    options = {"num_warps": LANES // wave_size(out.device), **common_options(out.device)}
    with on_device(out):
        count_shares_kernel[(sizes,)](*rows, counts, block, most, step, TILE=constants["TILE"], **options)
        write_schedule_kernel[(triton.cdiv(slots, SLOTS),)](
            *rows,
            batch_of,
            batch_of.stride(0),
            counts,
            sizes,
            out,
            slots,
            block,
            most,
            step,
            next_n,
            FIELDS=out.shape[1],
            BY_ROW=row_to_batch is not None,
            **constants,
            **options,
        )


def _sizes_at_once(device: torch.device) -> int:
    return SIZES_AT_ONCE if device.type != "cpu" else 8  # interpreted programs are slow


def _constants(rows: int) -> dict[str, int]:
    """The constexprs of the second kernel that are choices."""
    return {"SIZES": SIZES_AT_ONCE, "TILE": SMALL_TILE if rows <= SMALL_TILE else TILE, "SLOTS": SLOTS}


# --- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["lengths_stride", "rows", "block", "most", "step"])
def count_shares_kernel(
    lengths,
    lengths_stride,
    rows,
    counts,
    block,
    most,
    step,
    TILE: tl.constexpr,
    CAST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """counts[i]: shares of all rows at min((i + 1) * step, most) chunks each; behind them the longest row's chunks."""
    dev.begin(OVERLAP)
    size = tl.minimum((tl.program_id(0) + 1) * step, most)
    total = tl.zeros([TILE], tl.int64)
    longest = tl.zeros([TILE], tl.int32)
    for first in range(0, rows, TILE):
        chunks = _chunks(lengths, lengths_stride, first + tl.arange(0, TILE), rows, block)
        total += _shares(chunks, size).to(tl.int64)
        longest = tl.maximum(longest, chunks)
    tl.store(counts + tl.program_id(0), tl.sum(total, axis=0))
    if tl.program_id(0) == 0:
        tl.store(counts + tl.num_programs(0), tl.max(longest, axis=0).to(tl.int64))


@triton.jit(
    do_not_specialize=[
        "lengths_stride", "rows", "batch_stride", "sizes", "slots", "block", "most", "step", "next_n",
    ]
)  # fmt: skip
def write_schedule_kernel(
    lengths,
    lengths_stride,
    rows,
    row_to_batch,
    batch_stride,
    counts,
    sizes,
    out,
    slots,
    block,
    most,
    step,
    next_n,
    FIELDS: tl.constexpr,
    BY_ROW: tl.constexpr,
    SIZES: tl.constexpr,
    TILE: tl.constexpr,
    SLOTS: tl.constexpr,
    CAST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The units of SLOTS slots; a slot is `next_n` units."""
    dev.begin(OVERLAP)
    size = _share_size(lengths, lengths_stride, rows, counts, sizes, slots, block, most, step, SIZES, TILE)
    begin = tl.program_id(0) * SLOTS
    slot = begin + tl.arange(0, SLOTS)
    ours = slot < slots
    unit = out + slot.to(tl.int64) * next_n * FIELDS
    tl.store(unit, -1, mask=ours)
    tl.debug_barrier()
    total = tl.full([], 0, tl.int32)
    row_before = tl.full([], -1, tl.int32)  # the row that slot `begin` continues, and where it starts
    begin_before = tl.full([], 0, tl.int32)
    first = tl.full([], 0, tl.int32)
    while (first < rows) & (total < begin + SLOTS):
        row = first + tl.arange(0, TILE)
        shares = _shares(_chunks(lengths, lengths_stride, row, rows, block), size)
        start = total + tl.cumsum(shares, axis=0) - shares
        here = (shares > 0) & (start >= begin) & (start < begin + SLOTS)
        tl.store(out + start.to(tl.int64) * next_n * FIELDS, row, mask=here)
        earlier = (shares > 0) & (start < begin)
        row_before = tl.maximum(row_before, tl.max(tl.where(earlier, row, -1), axis=0))
        begin_before = tl.maximum(begin_before, tl.max(tl.where(earlier, start, 0), axis=0))
        total += tl.sum(shares, axis=0)
        first += TILE
    tl.debug_barrier()
    row = tl.load(unit, mask=ours, other=-1)
    start = tl.associative_scan(tl.where(row >= 0, slot, begin_before), 0, _larger)
    row = tl.associative_scan(tl.maximum(row, row_before), 0, _larger)
    used = ours & (slot < total)
    length = tl.load(lengths + row.to(tl.int64) * lengths_stride, mask=used, other=0)
    length = tl.minimum(length, MOST).to(tl.int32)
    chunks = _chunks(lengths, lengths_stride, tl.where(used, row, rows), rows, block)
    chunk = (slot - start) * size
    share = tl.minimum(size, chunks - chunk)
    tl.debug_barrier()  # every mark is read
    for draft in range(next_n):
        at = unit + draft * FIELDS
        if FIELDS == 4:
            tl.store(at, tl.where(used, row * next_n + draft, 0), mask=ours)
            tl.store(at + 1, tl.where(used, chunk, 0), mask=ours)
            tl.store(at + 2, tl.where(used, share, 1), mask=ours)
            tl.store(at + 3, tl.where(used, length, 0), mask=ours)
        else:
            batch = row
            if BY_ROW:
                batch = tl.load(row_to_batch + row.to(tl.int64) * batch_stride, mask=used, other=0)
                batch = tl.where((batch >= -1 - MOST) & (batch <= MOST), batch, -1).to(tl.int32)
            tl.store(at, tl.where(used, row, 0), mask=ours)
            tl.store(at + 1, tl.where(used, batch, 0), mask=ours)
            tl.store(at + 2, tl.where(used, chunk, 0), mask=ours)
            tl.store(at + 3, tl.where(used, share, 1), mask=ours)
            tl.store(at + 4, 0, mask=ours)
            tl.store(at + 5, tl.where(used, length, 0), mask=ours)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _chunks(lengths, stride, row, rows, block):
    """Chunks of rows as int32; a row past the last has none."""
    length = tl.load(lengths + row.to(tl.int64) * stride, mask=row < rows, other=0)
    if length.dtype == tl.int64:
        length = tl.minimum(length, MOST).to(tl.int32)
    return ((tl.maximum(length, 0).to(tl.uint32) + (block - 1).to(tl.uint32)) // block.to(tl.uint32)).to(tl.int32)


@triton.jit
def _shares(chunks, size):
    """Shares of `size` chunks in which rows are split; unsigned, so that no sum overflows."""
    return ((chunks.to(tl.uint32) + (size - 1).to(tl.uint32)) // size.to(tl.uint32)).to(tl.int32)


@triton.jit
def _share_size(
    lengths, lengths_stride, rows, counts, sizes, slots, block, most, step, SIZES: tl.constexpr, TILE: tl.constexpr
):
    """The smallest size, up to `most`, whose shares fit the slots; without one the longest row's chunks, at least 1."""
    lane = tl.arange(0, SIZES)
    over = tl.load(counts + lane, mask=lane < sizes, other=0) > slots
    short = tl.sum(over.to(tl.int32), axis=0)  # the counts fall
    size = tl.minimum((short + 1) * step, most)
    if short == sizes:
        size = tl.maximum(tl.load(counts + sizes), 1).to(tl.int32)
    else:
        low = short * step + 1
        while low < size:
            middle = (low + size) // 2
            total = tl.zeros([TILE], tl.int64)
            for first in range(0, rows, TILE):
                chunks = _chunks(lengths, lengths_stride, first + tl.arange(0, TILE), rows, block)
                total += _shares(chunks, middle).to(tl.int64)
            if tl.sum(total, axis=0) > slots:
                low = middle + 1
            else:
                size = middle
    return size


# --- what is compiled offline -----------------------------------------------------------------------------------------


def _cases() -> list[TargetCase]:
    cases = []
    for variant in DEVICE_VARIANTS:
        for kernel, fields, rows in (
            (count_shares_kernel, 0, TILE),
            (write_schedule_kernel, 4, TILE),
            (write_schedule_kernel, 4, SMALL_TILE),
            (write_schedule_kernel, 6, TILE),
        ):
            names = kernel.arg_names
            chosen = {**_constants(rows), "FIELDS": fields, "BY_ROW": fields == 6, **variant["constexprs"]}
            constexprs = {n: chosen[n] for n in names if n in chosen}
            pointers = {"lengths": "*i32", "row_to_batch": "*i32", "counts": "*i64", "out": "*i32"}
            signature = {n: pointers.get(n, "i32") for n in names if n not in constexprs}
            cases.append(
                TargetCase(
                    kernel,
                    (f"{fields} fields" if fields else "any") + (", few rows" if rows == SMALL_TILE else ""),
                    signature,
                    constexprs,
                    LANES // variant.get("wave", 32),
                    tuple(n for n in names if n in pointers),
                    targets=tuple(variant["targets"]),
                )
            )
    return cases


CASES = _cases()
