"""Stage `select` in Triton: exact top-k of rows, of blocks of a row, and of the kept blocks' positions.

A score becomes a key, an int32 with the same order. A program takes a piece of a row, searches a key that at least k
and at most a list's length of them reach, and moves those to the list in order of position. A row longer than a piece
goes through several lists, which the next launch takes as its row. The last list is searched to the exact split.
Nothing that is searched or guessed changes the result, which is unique.
"""

# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"
# Triton concatenates tuples and does not unpack them
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from latentkv.kernels import device as dev
from latentkv.kernels import search
from latentkv.kernels.launch import DEVICE_VARIANTS, TargetCase, common_options, on_device, wave_size

PIECE = 8192  # entries a program
LANES = 256  # 32 entries each: as many instructions go to counting, fewer to what all lanes do alike
BLOCKS_A_PROGRAM = 256


# --- launches ---------------------------------------------------------------------------------------------------------


def select_topk(
    logits: Tensor, lengths: Tensor, k: int, page_table: Tensor | None, row_to_batch: Tensor | None, page_size: int
) -> tuple[Tensor, Tensor]:
    """Launch `pick_kernel` over the rows' positions."""
    pages = _Pages(page_table, row_to_batch, page_size)
    return _pick(logits, lengths, k, k, "row", logits.shape[1], logits.shape[1], pages=pages)


def select_blocks(logits: Tensor, lengths: Tensor, blocks: int, block_size: int) -> Tensor:
    """Launch `block_keys_kernel`, then `pick_kernel` over the keys; the newest block follows what is picked."""
    rows, width = logits.shape
    block_size = min(block_size, triton.next_power_of_2(max(1, width)))  # a larger one would be walked in vain
    count = triton.cdiv(width, block_size)
    keys = torch.empty(rows, count, dtype=torch.int32, device=logits.device)
    if rows and count and blocks > 1:
        tiles = triton.cdiv(count, BLOCKS_A_PROGRAM)
        with on_device(logits):
            block_keys_kernel[(rows * tiles,)](
                logits,
                logits.stride(0),
                lengths,
                lengths.stride(0),
                keys,
                width,
                count,
                tiles,
                BLOCK_SIZE=block_size,
                TILE=BLOCKS_A_PROGRAM,
                num_warps=BLOCKS_A_PROGRAM // wave_size(logits.device),
                **common_options(logits.device),
            )
    count = count if blocks > 1 else min(count, 1)  # nothing is picked from them
    return _pick(keys, lengths, blocks - 1, blocks, "blocks", count, width, block_size=block_size)[0]


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
    block_size = min(block_size, triton.next_power_of_2(max(1, width)))
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
        logits, lengths, k, k, source, n, width, block_size=block_size, pages=pages, names=ids, counts=counts,
    )  # fmt: skip


@dataclass(frozen=True)
class _Pages:
    table: Tensor | None
    row_to_batch: Tensor | None
    page_size: int


def _pick(
    scores: Tensor,
    lengths: Tensor,
    k: int,
    columns: int,
    source: str,
    count: int,
    width: int,
    *,
    block_size: int = 1,
    pages: _Pages | None = None,
    names: Tensor | None = None,
    counts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Pick k of each row's `count` entries; `[rows, columns]` int32 positions (or ids) and slots.

    Args:
        scores: fp32 logits, or int32 keys where `source` is "blocks".
        lengths: positions of each row, clamped to 0 ..= width.
        k: entries to pick.
        columns: of the result.
        source: "row" (entries are positions), "blocks" (entries are blocks), "kept" (positions of the blocks `names`).
        count: entries of a row.
        width: positions of a row.
        block_size: positions a block.
        pages: how positions become slots; None: there are no slots, and the newest block follows what is picked.
        names: ids of kept blocks int32 `[rows, ids]`.
        counts: how many ids a row has.
    """
    rows, device = scores.shape[0], scores.device
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
    most = PIECE
    if device.type == "cpu":  # interpreted: small, so that tests see several pieces
        most = 4 * max(256, triton.next_power_of_2(k))
    with on_device(scores):
        while True:
            piece = min(most, max(128, triton.next_power_of_2(count)))
            pieces = max(1, triton.cdiv(count, piece))
            last = pieces == 1
            # few entries for the next launch; but up to 2 k end the search early, and a piece can hold back no fewer
            # than k
            cap = k if last else max(k, min(2 * k, most // pieces))
            keys, entries = torch.empty(2, rows, 0 if last else pieces * cap, dtype=torch.int32, device=device)
            pick_kernel[(rows * pieces,)](
                scores,
                scores.stride(0),
                lengths,
                lengths.stride(0),
                names if names is not None else positions,
                names.stride(0) if names is not None else 0,
                counts if counts is not None else positions,
                keys,
                entries,
                positions,
                slots,
                table if table is not None else positions,
                table.stride(0) if table is not None else 0,
                of_rows,
                of_rows.stride(0),
                width,
                count,
                pieces,
                k,
                cap,
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
                BLOCK_SIZE=block_size,
                PAGE_SHIFT=_shift(page_size),
                TAIL=triton.next_power_of_2(columns if last else cap),
                PIECE=piece,
                ENTRIES=_places(piece, source),
                num_warps=_lanes(piece, source) // wave_size(device),
                **options,
            )
            if last:
                return positions, slots
            scores, names, source, count = keys, entries, "list", pieces * cap


def _lanes(piece: int, source: str) -> int:
    return min(512 if source == "kept" else LANES, max(128, piece // 8))


def _places(piece: int, source: str) -> int:
    """Tensors in a program's tuple: as many as compilers hold in registers without spills, and few, for their time."""
    return 4 if dev.INTERPRETED else min(8 if source == "kept" else 16, piece // _lanes(piece, source))


def _shift(page_size: int) -> int:
    """Of a power of two; -1 for another page size, which costs divisions."""
    return page_size.bit_length() - 1 if page_size & (page_size - 1) == 0 else -1


# --- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit(
    do_not_specialize=[
        "scores_stride", "width", "count", "pieces", "k", "cap", "columns", "batches", "rows_a_batch",
        "table_width", "page_size",
    ]
)  # fmt: skip
def pick_kernel(
    scores,
    scores_stride,
    lengths,
    lengths_stride,
    names,
    names_stride,
    counts,
    list_keys,
    list_entries,
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
    cap,
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
    BLOCK_SIZE: tl.constexpr,
    PAGE_SHIFT: tl.constexpr,
    TAIL: tl.constexpr,
    PIECE: tl.constexpr,
    ENTRIES: tl.constexpr,
    CAST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One piece of one row: its k best entries to the outputs (LAST), or at most `cap` with them to a list."""
    dev.begin(OVERLAP)
    row = (tl.program_id(0) // pieces).to(tl.int64)
    piece = tl.program_id(0) % pieces
    length = tl.load(lengths + row * lengths_stride).to(tl.int64)
    length = tl.minimum(tl.maximum(length, 0), width).to(tl.int32)
    scores += row * scores_stride
    names += row * names_stride
    end = count
    if SOURCE == "row":
        end = tl.minimum(length, count)
    elif SOURCE == "blocks":  # without the newest
        end = tl.where(k > 0, (length + BLOCK_SIZE - 1) // BLOCK_SIZE - 1, 0)
    elif SOURCE == "kept":
        end = tl.load(counts + row) * BLOCK_SIZE
    first = piece * PIECE + _first_entries(PIECE, ENTRIES)
    keys = _keys(scores, names, first, end, length, SOURCE, BLOCK_SIZE, ENTRIES)
    low, high, above, reached = search.key_range(keys, end - piece * PIECE, PIECE, SOURCE, ENTRIES)
    low, high, above, reached = search.narrow(keys, low, high, above, reached, k, cap, ENTRIES, CAST)
    low = tl.maximum(low, search.NOT_A_KEY + 1)
    crowded = reached > cap
    found = tl.where(crowded, k, reached)
    if crowded:  # only the first of those that equal the lowest key
        keys = search.without_late_ties(keys, low, k - above, ENTRIES)
    ranks = search.ranks_of(keys, low, ENTRIES)
    # entries first, packed; what they stand for is looked up after that, all at once
    if LAST:
        to = positions + row * columns
    else:
        to = list_entries + (row * pieces + piece) * cap
        list_keys += (row * pieces + piece) * cap
    for n in tl.static_range(ENTRIES):
        picked = keys[n] >= low
        if not LAST:
            tl.store(list_keys + ranks[n], keys[n], mask=picked)
        tl.store(to + ranks[n], first + n * search.WIDTH, mask=picked)
    place = tl.arange(0, TAIL)
    there = place < found
    if (SLOTS and LAST) or SOURCE == "list" or SOURCE == "kept":
        tl.debug_barrier()
        index = tl.load(to + place, mask=there, other=0)
        if SOURCE == "list" or SOURCE == "kept":
            index = _position(names, index, there, SOURCE, BLOCK_SIZE)
            tl.store(to + place, index, mask=there)
        if SLOTS and LAST:
            if PAGED:
                if BY_ROW:
                    batch = tl.load(row_to_batch + row * batch_stride).to(tl.int64)
                else:
                    batch = row // rows_a_batch
                known = (batch >= 0) & (batch < batches)
                page_table += tl.where(known, batch, 0) * table_stride
                index = _slots(page_table, index, there, tl.where(known, table_width, 0), page_size, PAGE_SHIFT)
            slots += row * columns
            tl.store(slots + place, tl.where(there, index, -1), mask=place < columns)
    if LAST:
        if not SLOTS:  # the newest block has the largest id
            newest = (length + BLOCK_SIZE - 1) // BLOCK_SIZE - 1
            tl.store(to + found, newest, mask=newest >= 0)
            found += tl.where(newest >= 0, 1, 0)
        tl.store(to + place, -1, mask=(place >= found) & (place < columns))
    else:
        tl.store(list_keys + place, search.NOT_A_KEY, mask=(place >= found) & (place < cap))


# A program's entries are a tuple of tensors [WIDTH, columns] in order of column, place in the tuple, and place in the
# column. A column lies in one wave of lanes, which has one or more of them. Loads and scattered stores both take that
# layout, so nothing is converted.


@triton.jit
def _first_entries(PIECE: tl.constexpr, ENTRIES: tl.constexpr):
    """Offsets of the tuple's first tensor; the next are WIDTH further each."""
    COLUMNS: tl.constexpr = PIECE // (search.WIDTH * ENTRIES)
    return tl.arange(0, search.WIDTH)[:, None] + tl.arange(0, COLUMNS)[None, :] * (search.WIDTH * ENTRIES)


@triton.jit
def _keys(scores, names, first, end, length, SOURCE: tl.constexpr, BLOCK_SIZE: tl.constexpr, ENTRIES: tl.constexpr):
    """Keys of the entries; NOT_A_KEY from `end` on, where nothing is read."""
    loaded = ()
    some = tl.full(first.shape, 0, tl.int32) < end
    for n in tl.static_range(ENTRIES):
        if SOURCE == "kept":
            there = first < end - n * search.WIDTH
            index = _position(names, first + n * search.WIDTH, there, SOURCE, BLOCK_SIZE)
            there &= index < length
            loaded = loaded + (
                tl.where(there, search.score_key(tl.load(scores + index, mask=there, other=0)), search.NOT_A_KEY),
            )
        else:
            # a mask for each would be more predicates than there are, and the compiler would wait for some loads first
            loaded = loaded + (tl.load(scores + tl.minimum(first + n * search.WIDTH, end - 1), mask=some, other=0),)
    if SOURCE == "kept":
        return loaded
    keys = ()
    for n in tl.static_range(ENTRIES):
        keys = keys + (tl.where(first < end - n * search.WIDTH, search.key_of(loaded[n], SOURCE), search.NOT_A_KEY),)
    return keys


@triton.jit
def _position(names, entry, mask, SOURCE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """The position (or block) that an entry stands for."""
    if SOURCE == "kept":
        return tl.load(names + entry // BLOCK_SIZE, mask=mask, other=0) * BLOCK_SIZE + entry % BLOCK_SIZE
    elif SOURCE == "list":
        return tl.load(names + entry, mask=mask, other=0)
    else:
        return entry


@triton.jit
def _slots(table, position, mask, width, page_size, PAGE_SHIFT: tl.constexpr):
    """page * page_size + offset of positions; -1 without a page, and where int32 does not hold it."""
    if PAGE_SHIFT >= 0:
        column = position >> PAGE_SHIFT
    else:
        column = position // page_size
    page = tl.load(table + column, mask=mask & (column < width), other=-1)
    slot = page.to(tl.int64) * page_size + (position - column * page_size)
    return tl.where((page >= 0) & (slot < 2147483648), slot, -1).to(tl.int32)


@triton.jit(do_not_specialize=["width", "count", "tiles"])
def block_keys_kernel(
    logits,
    logits_stride,
    lengths,
    lengths_stride,
    keys,
    width,
    count,
    tiles,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    CAST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The largest key of each block of a row before its newest."""
    dev.begin(OVERLAP)
    row = (tl.program_id(0) // tiles).to(tl.int64)
    block = tl.program_id(0) % tiles * TILE + tl.arange(0, TILE)
    length = tl.load(lengths + row * lengths_stride).to(tl.int64)
    length = tl.minimum(tl.maximum(length, 0), width).to(tl.int32)
    older = block < (length + BLOCK_SIZE - 1) // BLOCK_SIZE - 1
    STEP: tl.constexpr = BLOCK_SIZE if BLOCK_SIZE < 8 else 8
    key = tl.full([TILE], search.NOT_A_KEY, tl.int32)
    at = logits + row * logits_stride + block.to(tl.int64) * BLOCK_SIZE
    for start in range(0, BLOCK_SIZE, STEP):
        score = tl.load(at[:, None] + (start + tl.arange(0, STEP))[None, :], mask=older[:, None], other=0.0)
        key = tl.maximum(key, tl.max(search.score_key(score), axis=1))
    tl.store(keys + row * count + block, key, mask=older)


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

# source, LAST, pages, entries
_VARIANTS = (
    ("row", True, True, PIECE),
    ("row", True, True, 2048),
    ("row", False, True, PIECE),
    ("list", True, True, PIECE),
    ("list", True, False, 2048),
    ("list", False, True, PIECE),
    ("blocks", True, False, PIECE),
    ("blocks", False, False, PIECE),
    ("kept", True, True, PIECE),
    ("kept", False, True, PIECE),
)


def _cases() -> list[TargetCase]:
    pointers = {"logits": "*fp32", "marks": "*u8"}
    numbers = {"stride", "width", "count", "pieces", "k", "cap", "columns", "batches", "rows_a_batch", "table_width",
               "page_size", "given_count", "blocks", "kept", "tiles"}  # fmt: skip
    cases = []

    def add(kernel: Any, label: str, constexprs: dict[str, Any], lanes: int, variant: dict[str, Any]) -> None:
        constexprs = {**constexprs, **variant["constexprs"]}
        scores = "*fp32" if constexprs.get("SOURCE") in ("row", "kept") else "*i32"
        names = [n for n in kernel.arg_names if n not in constexprs]
        types = {**pointers, "scores": scores}
        signature = {n: "i32" if n in numbers or n.endswith("stride") else types.get(n, "*i32") for n in names}
        warps = lanes // variant.get("wave", 32)
        unaligned = numbers | {"scores_stride", "lengths_stride", "batch_stride"}
        aligned = tuple(n for n in names if n not in unaligned)
        cases.append(
            TargetCase(kernel, label, signature, constexprs, warps, aligned, targets=tuple(variant["targets"]))
        )

    for variant in DEVICE_VARIANTS:
        for source, last, paged, piece in _VARIANTS:
            constexprs = {
                "SOURCE": source, "LAST": last, "SLOTS": paged, "PAGED": paged, "BY_ROW": False, "BLOCK_SIZE": 8,
                "PAGE_SHIFT": 6, "TAIL": 512 if last and paged else 2048, "PIECE": piece,
                "ENTRIES": _places(piece, source),
            }  # fmt: skip
            label = f"{source} {piece} {'last' if last else 'to a list'}"
            add(pick_kernel, label, constexprs, _lanes(piece, source), variant)
        add(block_keys_kernel, "blocks of 8", {"BLOCK_SIZE": 8, "TILE": BLOCKS_A_PROGRAM}, BLOCKS_A_PROGRAM, variant)
        add(sort_ids_kernel, "ids", {"TILE": 1024}, 256, variant)
    return cases


CASES = _cases()
