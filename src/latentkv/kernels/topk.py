"""Stage `select` in Triton: exact top-k of rows, of blocks of a row, and of the kept blocks' positions.

A score becomes a key, an int32 with the same order. A program takes a piece of a row and searches the key that splits
it; what it keeps leaves in order of position, by a running count. A row longer than a piece is narrowed first: each
piece passes on a superset of the row's best in it, and the next launch takes the pieces' lists as its row. Nothing that
is searched or guessed changes the result, which is unique.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from latentkv.kernels import device as dev
from latentkv.kernels.launch import DEVICE_VARIANTS, TargetCase, common_options, on_device, wave_size

NOT_A_KEY = tl.constexpr(-(2**31))  # below every score's key
LOWEST_KEY = tl.constexpr(-2139095041)  # of -inf, and of NaN
INFINITE_KEY = tl.constexpr(0x7F800000)
TIES_EVERY = tl.constexpr(8)  # search steps between looks at whether only equal keys are left

PIECE = 8192  # scores a program; 16 a lane at 512 lanes
LONGEST = 16384  # what the last program of a row takes
LANES = 512


# --- launches ---------------------------------------------------------------------------------------------------------


def select_topk(
    logits: Tensor, lengths: Tensor, k: int, page_table: Tensor | None, row_to_batch: Tensor | None, page_size: int
) -> tuple[Tensor, Tensor]:
    """Launch `pick_kernel` over the rows' positions."""
    pages = _Pages(page_table, row_to_batch, page_size)
    return _pick(logits, lengths, k, k, "row", logits.shape[1], pages=pages)


def select_blocks(logits: Tensor, lengths: Tensor, blocks: int, block_size: int) -> Tensor:
    """Launch `pick_kernel` over the rows' blocks; the newest is none of them and follows what is picked."""
    count = triton.cdiv(logits.shape[1], block_size)
    return _pick(logits, lengths, blocks - 1, blocks, "blocks", count, block_size=block_size)[0]


def select_topk_in_blocks(
    logits: Tensor,
    lengths: Tensor,
    block_ids: Tensor,
    k: int,
    block_size: int,
    page_table: Tensor | None,
    row_to_batch: Tensor | None,
    page_size: int,
) -> tuple[Tensor, Tensor]:
    """Launch `sort_ids_kernel`, then `pick_kernel` over the positions of the ids."""
    rows, width = logits.shape
    blocks = triton.cdiv(width, block_size)
    kept = min(block_ids.shape[1], blocks)
    pages = _Pages(page_table, row_to_batch, page_size)
    ids = torch.empty(rows, kept, dtype=torch.int32, device=logits.device)
    counts = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if rows and kept:
        marks = torch.empty(rows, blocks, dtype=torch.uint8, device=logits.device)
        options = common_options(logits.device)
        with on_device(logits):
            sort_ids_kernel[(rows,)](
                block_ids,
                block_ids.stride(0),
                ids,
                kept,
                counts,
                marks,
                block_ids.shape[1],
                blocks,
                TILE=1024,
                num_warps=max(1, 256 // wave_size(logits.device)),
                **options,
            )
    source = "kept" if kept else "row"  # without ids the row is empty
    n = kept * block_size
    return _pick(
        logits, lengths, k, k, source, n, block_size=block_size, pages=pages, ids=ids, counts=counts,
    )  # fmt: skip


@dataclass(frozen=True)
class _Pages:
    table: Tensor | None
    row_to_batch: Tensor | None
    page_size: int


def _pick(
    logits: Tensor,
    lengths: Tensor,
    k: int,
    columns: int,
    source: str,
    count: int,
    *,
    block_size: int = 1,
    pages: _Pages | None = None,
    ids: Tensor | None = None,
    counts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Pick k of each row's `count` entries; `[rows, columns]` int32 positions (or ids) and slots."""
    rows, device = logits.shape[0], logits.device
    positions = torch.empty(rows, columns, dtype=torch.int32, device=device)
    slots = torch.empty_like(positions) if pages is not None else positions
    if rows == 0:
        return positions, slots
    table = pages.table if pages is not None else None
    batch_of = pages.row_to_batch if pages is not None else None
    page_size = pages.page_size if pages is not None else 1
    batches, table_width = table.shape if table is not None else (0, 0)
    of_rows = batch_of if batch_of is not None else lengths
    options = common_options(device)
    cap = _list_length(k)
    source_ids = ids if ids is not None else positions
    given = (logits, logits.stride(0), lengths, lengths.stride(0), source_ids, source_ids.stride(0))
    pairs: Tensor = positions
    list_length = 1
    with on_device(logits):
        while True:
            piece = _piece(count, cap, rows, device)
            pieces = triton.cdiv(count, piece) if count > piece else 1
            last = pieces == 1
            lists = positions if last else torch.empty(rows, pieces, cap, dtype=torch.int64, device=device)
            list_counts = positions if last else torch.empty(rows, pieces, dtype=torch.int32, device=device)
            pick_kernel[(rows * pieces,)](
                *given,
                pairs,
                counts if counts is not None else positions,
                lists,
                list_counts,
                positions,
                slots,
                table if table is not None else positions,
                table.stride(0) if table is not None else 0,
                of_rows,
                of_rows.stride(0),
                logits.shape[1],
                count,
                pieces,
                k,
                columns,
                batches,
                max(1, rows // max(1, batches)),
                table_width,
                page_size,
                SOURCE=source,
                LAST=last,
                SLOTS=pages is not None,
                PAGED=table is not None,
                BY_ROW=batch_of is not None,
                NEWEST=last and pages is None,
                BLOCK_SIZE=block_size,
                PAGE_SHIFT=_shift(page_size),
                LIST=list_length,
                CAP=cap,
                TAIL=triton.next_power_of_2(columns),
                PIECE=piece,
                num_warps=_lanes(piece) // wave_size(device),
                **options,
            )
            if last:
                return positions, slots
            pairs, counts, source = lists, list_counts, "pairs"
            list_length, count = cap, pieces * cap


def _list_length(k: int) -> int:
    """What a piece passes on at most. Up to twice k ends the search early; a piece can hold back no less than k."""
    return min(2048, max(256, 2 * triton.next_power_of_2(max(1, k))))


def _piece(count: int, cap: int, rows: int, device: torch.device) -> int:
    """Entries a program."""
    if device.type == "cpu":  # interpreted: small, so that tests see several pieces
        return max(2 * cap, min(2048, triton.next_power_of_2(max(1, count))))
    if count <= LONGEST:
        return max(128, triton.next_power_of_2(max(1, count)))
    return PIECE


def _lanes(piece: int) -> int:
    return min(LANES, max(128, piece // 16))


def _shift(page_size: int) -> int:
    """Of a power of two; -1 for another page size, which costs divisions."""
    return page_size.bit_length() - 1 if page_size & (page_size - 1) == 0 else -1


# --- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit(
    do_not_specialize=[
        "width", "count", "pieces", "k", "columns", "batches", "rows_a_batch", "table_width", "page_size",
    ]
)  # fmt: skip
def pick_kernel(
    logits,
    logits_stride,
    lengths,
    lengths_stride,
    ids,
    ids_stride,
    pairs,
    counts,
    lists,
    list_counts,
    positions,
    slots,
    page_table,
    table_stride,
    row_to_batch,
    batch_stride,
    width,
    count,
    pieces,
    k,
    columns,
    batches,
    rows_a_batch,
    table_width,
    page_size,
    SOURCE: tl.constexpr,
    LAST: tl.constexpr,
    SLOTS: tl.constexpr,
    PAGED: tl.constexpr,
    BY_ROW: tl.constexpr,
    NEWEST: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAGE_SHIFT: tl.constexpr,
    LIST: tl.constexpr,
    CAP: tl.constexpr,
    TAIL: tl.constexpr,
    PIECE: tl.constexpr,
    CAST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One piece of one row: its k best entries to the outputs (LAST), or a superset of them to a list."""
    dev.begin(OVERLAP)
    row = (tl.program_id(0) // pieces).to(tl.int64)
    piece = tl.program_id(0) % pieces
    length = tl.load(lengths + row * lengths_stride).to(tl.int64)
    length = tl.minimum(tl.maximum(length, 0), width).to(tl.int32)
    first = piece * PIECE
    entry = first + tl.arange(0, PIECE)
    if SOURCE == "row":
        key, index = _row_keys(logits + row * logits_stride, first, tl.minimum(length, count), PIECE), entry
    elif SOURCE == "blocks":
        older = tl.where(k > 0, (length + BLOCK_SIZE - 1) // BLOCK_SIZE - 1, 0)
        key, index = _block_keys(logits + row * logits_stride, entry, older, BLOCK_SIZE, PIECE), entry
    elif SOURCE == "kept":
        there = entry < tl.load(counts + row) * BLOCK_SIZE
        block = tl.load(ids + row * ids_stride + entry // BLOCK_SIZE, mask=there, other=0)
        index = block * BLOCK_SIZE + entry % BLOCK_SIZE
        there &= index < length
        score = tl.load(logits + row * logits_stride + index, mask=there, other=0.0)
        key = tl.where(there, _key(score), NOT_A_KEY)
    else:
        there = entry < count
        held = tl.load(counts + row * (count // LIST) + entry // LIST, mask=there, other=0)
        pair = tl.load(pairs + row * count + entry, mask=there & (entry % LIST < held), other=0)
        key = tl.where(entry % LIST < held, (pair >> 32).to(tl.int32), NOT_A_KEY)
        index = pair.to(tl.int32)
    if LAST:
        cap = k
    else:
        cap = tl.full([], CAP, tl.int32)
    low, above, at_least = _split(key, k, cap)
    picked = _picked(key, low, above, at_least, k, cap)
    rank = tl.cumsum(picked.to(tl.int32), axis=0) - 1
    found = tl.sum(picked.to(tl.int32), axis=0)
    if LAST:
        out = row * columns
        tl.store(positions + out + rank, index, mask=picked)
        if SLOTS:
            slot = index
            if PAGED:
                if BY_ROW:
                    batch = tl.load(row_to_batch + row * batch_stride).to(tl.int64)
                else:
                    batch = row // rows_a_batch
                known = (batch >= 0) & (batch < batches)
                table = page_table + tl.where(known, batch, 0) * table_stride
                slot = _slots(table, index, picked, tl.where(known, table_width, 0), page_size, PAGE_SHIFT)
            tl.store(slots + out + rank, slot, mask=picked)
        if NEWEST:  # has the largest id
            newest = (length + BLOCK_SIZE - 1) // BLOCK_SIZE - 1
            tl.store(positions + out + found, newest, mask=newest >= 0)
            found += tl.where(newest >= 0, 1, 0)
        tail = tl.arange(0, TAIL)
        rest = (tail >= found) & (tail < columns)
        tl.store(positions + out + tail, -1, mask=rest)
        if SLOTS:
            tl.store(slots + out + tail, -1, mask=rest)
    else:
        pair = (key.to(tl.int64) << 32) | index.to(tl.int64)
        tl.store(lists + (row * pieces + piece) * CAP + rank, pair, mask=picked)
        tl.store(list_counts + row * pieces + piece, found)


@triton.jit
def _key(score):
    """int32 in the order of the scores: -0 is +0, NaN is -inf."""
    bits = dev.float_bits(score)
    bits = tl.where(bits == NOT_A_KEY, 0, bits)
    return tl.where(score == score, bits ^ ((bits >> 31) & 0x7FFFFFFF), LOWEST_KEY)


@triton.jit
def _finite(key):
    """The score of a key, 0 for Inf and beyond."""
    key = tl.where((key > LOWEST_KEY) & (key < INFINITE_KEY), key, 0)
    return dev.bits_float(key ^ ((key >> 31) & 0x7FFFFFFF))


@triton.jit
def _row_keys(row, first, end, PIECE: tl.constexpr):
    """Keys of columns first ..< first + PIECE; NOT_A_KEY from `end` on, where nothing is read."""
    entry = first + tl.arange(0, PIECE)
    if first + PIECE <= end:  # without a mask loads are wide
        key = _key(tl.load(row + entry))
    else:
        key = tl.where(entry < end, _key(tl.load(row + entry, mask=entry < end, other=0.0)), NOT_A_KEY)
    return key


@triton.jit
def _block_keys(row, block, end, BLOCK_SIZE: tl.constexpr, PIECE: tl.constexpr):
    """Largest key of each block; NOT_A_KEY from block `end` on. The blocks before it are full."""
    STEP: tl.constexpr = BLOCK_SIZE if BLOCK_SIZE < 8 else 8
    key = tl.full([PIECE], NOT_A_KEY, tl.int32)
    at = block.to(tl.int64) * BLOCK_SIZE
    for start in range(0, BLOCK_SIZE, STEP):
        column = at[:, None] + (start + tl.arange(0, STEP))[None, :]
        score = tl.load(row + column, mask=(block < end)[:, None], other=0.0)
        key = tl.maximum(key, tl.max(_key(score), axis=1))
    return tl.where(block < end, key, NOT_A_KEY)


@triton.jit
def _split(key, k, cap):
    """(low, above, count): `count` keys are at least `low`, which is at least k, or all, and at most cap if possible.

    Where it is not possible, keys equal to `low` are to blame, and `above` of the keys are larger, fewer than k. The
    search halves the range of keys at worst; two steps of three guess by the scores, as if counts fell exponentially.
    """
    count = tl.sum((key > NOT_A_KEY).to(tl.int32), axis=0)
    low = tl.full([], NOT_A_KEY + 1, tl.int32)
    above = tl.full([], 0, tl.int32)
    if count > cap:
        high = tl.max(key, axis=0) + 1
        low = tl.min(tl.where(key > NOT_A_KEY, key, 0x7FFFFFFF), axis=0)
        target = 0.5 * (tl.log2(tl.cast(k, tl.float32)) + tl.log2(tl.cast(cap, tl.float32)))
        step = tl.full([], 0, tl.int32)
        while (count > cap) & (high != low + 1):
            middle = _between(low, high, count, above, target, step)
            enough = tl.sum((key >= middle).to(tl.int32), axis=0)
            if enough >= k:
                low = middle
                count = enough
            else:
                high = middle
                above = enough
            step += 1
            if step % TIES_EVERY == 0:
                low = tl.min(tl.where(key >= low, key, 0x7FFFFFFF), axis=0)
                high = tl.max(tl.where(key < high, key, NOT_A_KEY), axis=0) + 1
    return low, above, count


@triton.jit
def _between(low, high, count, above, target, step):
    """A key above `low` and below `high`, which are not neighbours."""
    middle = (low & high) + ((low ^ high) >> 1)
    if step % 3 != 2:
        top = tl.log2(count.to(tl.float32))
        part = (top - target) / (top - tl.log2(tl.maximum(above.to(tl.float32), 0.5)))
        guess = _finite(low) * (1.0 - part) + _finite(high) * part
        middle = tl.where((low > LOWEST_KEY) & (high < INFINITE_KEY), _key(guess), middle)
    return tl.minimum(tl.maximum(middle, low + 1), high - 1)


@triton.jit
def _picked(key, low, above, count, k, cap):
    """Which keys are kept: all that are at least `low`, or where those are too many the first equal ones only."""
    picked = key >= low
    if count > cap:
        tie = key == low
        picked = (key > low) | (tie & (tl.cumsum(tie.to(tl.int32), axis=0) <= k - above))
    return picked


@triton.jit
def _slots(table, position, mask, width, page_size, PAGE_SHIFT: tl.constexpr):
    """page * page_size + offset of positions; -1 without a page."""
    if PAGE_SHIFT >= 0:
        column = position >> PAGE_SHIFT
    else:
        column = position // page_size
    page = tl.load(table + column, mask=mask & (column < width), other=-1)
    return tl.where(page >= 0, page * page_size + (position - column * page_size), -1)


@triton.jit(do_not_specialize=["given_count", "blocks", "kept"])
def sort_ids_kernel(
    given,
    given_stride,
    ids,
    kept,
    counts,
    marks,
    given_count,
    blocks,
    TILE: tl.constexpr,
    CAST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The distinct ids 0 ..< blocks of a row, ascending, and how many they are."""
    dev.begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, TILE)
    given += row * given_stride
    ids += row * kept
    marks += row * blocks
    faults = 0
    found = 0
    for start in range(0, given_count, TILE):  # as select_blocks leaves them: ascending, then none
        at = start + lane
        there = at < given_count
        id = tl.load(given + at, mask=there, other=-1)
        before = tl.load(given + at - 1, mask=there & (at > 0), other=-1)
        known = (id >= 0) & (id < blocks)
        fault = there & known & ((id <= before) | ((at > 0) & ((before < 0) | (before >= blocks))))
        faults += tl.sum(fault.to(tl.int32), axis=0)
        found += tl.sum(known.to(tl.int32), axis=0)
        tl.store(ids + at, id, mask=known & (at < kept))
    if faults > 0:
        for start in range(0, blocks, TILE):
            tl.store(marks + start + lane, 0, mask=start + lane < blocks)
        tl.debug_barrier()
        for start in range(0, given_count, TILE):
            id = tl.load(given + start + lane, mask=start + lane < given_count, other=-1)
            tl.store(marks + id, 1, mask=(id >= 0) & (id < blocks))
        tl.debug_barrier()
        found = 0
        for start in range(0, blocks, TILE):
            at = start + lane
            mark = tl.load(marks + at, mask=at < blocks, other=0).to(tl.int32)
            tl.store(ids + found + tl.cumsum(mark, axis=0) - 1, at, mask=mark > 0)
            found += tl.sum(mark, axis=0)
    tl.store(counts + row, found)


# --- what is compiled offline -----------------------------------------------------------------------------------------

# source, block size, LAST, pages, entries, list length
_VARIANTS = (
    ("row", 1, True, True, LONGEST, 1024),
    ("row", 1, True, True, 1024, 1024),
    ("row", 1, False, True, PIECE, 1024),
    ("row", 1, False, True, PIECE, 2048),
    ("pairs", 1, True, True, LONGEST, 1024),
    ("pairs", 1, True, True, 2048, 256),
    ("pairs", 1, False, True, PIECE, 2048),
    ("blocks", 8, True, False, LONGEST, 2048),
    ("blocks", 8, False, False, PIECE, 2048),
    ("pairs", 8, True, False, LONGEST, 2048),
    ("kept", 8, True, True, LONGEST, 1024),
    ("kept", 8, False, True, PIECE, 1024),
)


def _cases() -> list[TargetCase]:
    pointers = {"logits": "*fp32", "pairs": "*i64", "lists": "*i64", "marks": "*u8"}
    numbers = {"width", "count", "pieces", "k", "columns", "batches", "rows_a_batch", "table_width", "page_size",
               "given_count", "blocks", "kept"}  # fmt: skip
    cases = []

    def add(kernel: Any, label: str, constexprs: dict[str, Any], lanes: int, variant: dict[str, Any]) -> None:
        constexprs = {**constexprs, **variant["constexprs"]}
        names = [n for n in kernel.arg_names if n not in constexprs]
        signature = {n: "i32" if n in numbers or n.endswith("stride") else pointers.get(n, "*i32") for n in names}
        warps = lanes // variant.get("wave", 32)
        aligned = tuple(n for n in names if n not in numbers and n not in ("lengths_stride", "batch_stride"))
        cases.append(
            TargetCase(kernel, label, signature, constexprs, warps, aligned, targets=tuple(variant["targets"]))
        )

    for variant in DEVICE_VARIANTS:
        for source, block_size, last, paged, piece, cap in _VARIANTS:
            constexprs = {
                "SOURCE": source, "LAST": last, "SLOTS": paged, "PAGED": paged, "BY_ROW": False, "NEWEST": last and not
                paged, "BLOCK_SIZE": block_size, "PAGE_SHIFT": 6, "LIST": cap, "CAP": cap, "TAIL": cap // 2,
                "PIECE": piece,
            }  # fmt: skip
            label = f"{source} {piece} {f'to {cap}' if not last else 'last' if paged else 'last, blocks'}"
            add(pick_kernel, label, constexprs, _lanes(piece), variant)
        add(sort_ids_kernel, "ids", {"TILE": 1024}, 256, variant)
    return cases


CASES = _cases()
