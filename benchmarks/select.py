"""Stage `select`: schedules, index logits, top-k, candidate blocks.

Pages of 64 keys, every sequence's own and in random order, lengths all full, queries PACKED, head weights bf16; slots
come from the page table in the same launch. Bytes that an op must move:

    index_logits            for each sequence and key 68 read; for each row 64 + 4 + 2 read a head, 4 written a key, 4
                            read a page (the table) where the rows of a sequence share it
    select_topk             for each row 4 read an entry + 8 written and 4 read (the page) for each of k
    select_blocks           for each row 4 read an entry + 4 written a block
    select_topk_in_blocks   for each row 4 read a kept position + 4 read a block + 8 written and 4 read for each of k
    decode_schedule         for each row 4 read; 16 written a work unit
    prefill_schedule        for each row 8 read; 24 written a work unit

Flops of the logits: two for each row, head, key and dimension. A case `6 rows each` has six rows of one sequence behind
one another, as a verified draft has.

Peers: `eager`, this library's reference run by PyTorch on the same device; `scorer`, bf16 keys, unpacked before, and a
batched matrix product, relu and a weighted sum over heads in PyTorch; `torch.topk`, of the same logits,
without order, ties or slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import latentkv as lk
from latentkv.bench import Case, Peer
from latentkv.layout import INDEX_DIM, INDEX_PAYLOAD_BYTES, INDEX_ROW_BYTES, INDEX_SCALE_BYTES
from latentkv.reference import select as reference

PAGE = 64
FUSED = lk.IndexKeyLayout.FUSED
# rows, keys, heads, layout, rows a sequence
LOGITS = (
    (64, 65536, 32, FUSED, 1),
    (256, 8192, 32, FUSED, 1),
    (1, 131072, 32, FUSED, 1),
    (256, 8192, 64, FUSED, 1),
    (256, 8192, 16, FUSED, 1),
    (256, 8192, 32, lk.IndexKeyLayout.SPLIT64, 1),
    (256, 8192, 32, lk.IndexKeyLayout.SPLIT8, 1),
    (1536, 8192, 32, FUSED, 6),
)
TOPK = ((64, 65536, 512), (64, 8192, 512), (1, 131072, 512), (64, 65536, 2048), (1, 1048576, 512))  # rows, width, k
BLOCKS, BLOCK_SIZE = 256, 8
TWO_LEVELS = ((64, 65536, 512), (1, 131072, 512))
SCHEDULES = ((64, 65536), (1536, 131072))  # rows, longest
CHUNK = 256


def cases(sizes: Sequence[int] | None = None) -> list[Case]:
    """Every case; with `sizes`, those numbers of keys for one row each."""
    if sizes is not None:
        found = [_logits_case(1, size, 32, FUSED, 1) for size in sizes]
        return found + [_topk_case(1, size, min(512, size)) for size in sizes]
    found = [_logits_case(*shape) for shape in LOGITS] + [_topk_case(*shape) for shape in TOPK]
    found += [make(*shape) for shape in TWO_LEVELS for make in (_blocks_case, _in_blocks_case)]
    return found + [make(*shape) for shape in SCHEDULES for make in (_decode_case, _prefill_case)]


def _logits_case(rows: int, keys: int, heads: int, layout: lk.IndexKeyLayout, each: int) -> Case:
    def build(device: torch.device, seed: int) -> Callable[[], object]:
        query, weights, cache, table, lengths = _logits_inputs(rows, keys, heads, layout, each, device, seed)
        out = torch.empty(rows, keys, device=device)
        return lambda: lk.index_logits(query, weights, cache, table, lengths, max_len=keys, out=out)

    def eager(device: torch.device, seed: int) -> Callable[[], object]:
        query, weights, cache, table, lengths = _logits_inputs(rows, keys, heads, layout, each, device, seed)
        out = torch.empty(rows, keys, device=device)
        form = (None, None, True, "packed", layout.value, PAGE, out)
        return lambda: reference.index_logits(*query, weights, cache.payload, cache.scale, table, lengths, *form)

    def scorer(device: torch.device, seed: int) -> Callable[[], object]:
        generator = torch.Generator(device).manual_seed(seed)
        unpacked = torch.randn(rows // each, keys, INDEX_DIM, device=device, generator=generator).bfloat16()
        query = torch.randn(rows // each, each * heads, INDEX_DIM, device=device, generator=generator).bfloat16()
        weights = torch.rand(rows // each, each, 1, heads, device=device, generator=generator)

        def call() -> Tensor:
            products = torch.bmm(query, unpacked.transpose(1, 2)).relu_().unflatten(1, (each, heads))
            return (weights.bfloat16() @ products).squeeze(2)

        return call

    table = 4 * (rows // each) * keys // PAGE
    moved = rows // each * keys * INDEX_ROW_BYTES + 4 * rows * keys + table
    moved += rows * heads * (INDEX_PAYLOAD_BYTES + INDEX_SCALE_BYTES + 2)
    name = f"{layout.value} H{heads} {keys} keys" + (f", {each} rows each" if each > 1 else "")
    peers = [Peer("scorer", scorer)] if heads == 32 and layout is FUSED and each == 1 else []
    peers += [Peer("eager", eager, graph=False)] if peers and rows == 1 else []
    flops = 2 * rows * heads * keys * INDEX_DIM
    return Case("index_logits", name, rows, "rows", moved, build, flops=flops, peers=tuple(peers))


def _topk_case(rows: int, width: int, k: int) -> Case:
    def build(device: torch.device, seed: int) -> Callable[[], object]:
        logits, lengths, table = _scores(rows, width, device, seed)
        return lambda: lk.select_topk(logits, lengths, k, page_table=table, page_size=PAGE)

    def torch_topk(device: torch.device, seed: int) -> Callable[[], object]:
        logits, _, _ = _scores(rows, width, device, seed)
        return lambda: torch.topk(logits, k, sorted=False)

    moved = rows * (4 * width + 12 * k)
    return Case("select_topk", f"{k} of {width}", rows, "rows", moved, build, peers=(Peer("torch.topk", torch_topk),))


def _blocks_case(rows: int, width: int, k: int) -> Case:
    def build(device: torch.device, seed: int) -> Callable[[], object]:
        logits, lengths, _ = _scores(rows, width, device, seed)
        return lambda: lk.select_blocks(logits, lengths, blocks=BLOCKS, block_size=BLOCK_SIZE)

    name = f"{BLOCKS} blocks of {BLOCK_SIZE} of {width}"
    return Case("select_blocks", name, rows, "rows", rows * 4 * (width + BLOCKS), build)


def _in_blocks_case(rows: int, width: int, k: int) -> Case:
    def build(device: torch.device, seed: int) -> Callable[[], object]:
        logits, lengths, table = _scores(rows, width, device, seed)
        ids = lk.select_blocks(logits, lengths, blocks=BLOCKS, block_size=BLOCK_SIZE)
        pages = {"page_table": table, "page_size": PAGE}
        return lambda: lk.select_topk_in_blocks(logits, lengths, ids, k, block_size=BLOCK_SIZE, **pages)

    moved = rows * 4 * (BLOCKS * (BLOCK_SIZE + 1) + 3 * k)
    name = f"{k} of {BLOCKS} blocks of {BLOCK_SIZE}, {width}"
    return Case("select_topk_in_blocks", name, rows, "rows", moved, build)


def _decode_case(rows: int, longest: int) -> Case:
    def build(device: torch.device, seed: int) -> Callable[[], object]:
        lengths = _lengths(rows, longest, device, seed)
        workers = lk.schedule_workers(rows, longest, device=device)
        out = torch.empty(workers, 4, dtype=torch.int32, device=device)
        return lambda: lk.decode_schedule(lengths, workers=workers, max_len=longest, block=CHUNK, out=out)

    moved = 4 * rows + 16 * lk.schedule_workers(rows, longest)
    return Case("decode_schedule", f"up to {longest}", rows, "rows", moved, build)


def _prefill_case(rows: int, longest: int) -> Case:
    def build(device: torch.device, seed: int) -> Callable[[], object]:
        lengths = _lengths(rows, longest, device, seed)
        batch = torch.arange(rows, dtype=torch.int32, device=device) // 4
        workers = lk.schedule_workers(rows, longest, device=device)
        out = torch.empty(workers, 6, dtype=torch.int32, device=device)
        options = {"workers": workers, "max_len": longest, "block": CHUNK, "row_to_batch": batch, "out": out}
        return lambda: lk.prefill_schedule(lengths, **options)

    moved = 8 * rows + 24 * lk.schedule_workers(rows, longest)
    return Case("prefill_schedule", f"up to {longest}", rows, "rows", moved, build)


# --- inputs -----------------------------------------------------------------------------------------------------------


def _logits_inputs(
    rows: int, keys: int, heads: int, layout: lk.IndexKeyLayout, each: int, device: torch.device, seed: int
) -> tuple[tuple[Tensor, Tensor], Tensor, lk.IndexKeyCache, Tensor, Tensor]:
    """Packed queries, weights, a cache, a page table in random order, full lengths."""
    generator = torch.Generator(device).manual_seed(seed)
    sequences, columns = rows // each, -(-keys // PAGE)
    cache = lk.new_index_key_cache(layout, sequences * columns, PAGE, device=device)
    for part in (x for x in (cache.payload, cache.scale) if x is not None):
        flat = part.flatten()
        flat.copy_(torch.randint(0, 256, flat.shape, dtype=torch.uint8, device=device, generator=generator))
    exponents = cache.scale if cache.scale is not None else cache.payload[:, PAGE * INDEX_PAYLOAD_BYTES :]
    exponents.copy_(torch.randint(124, 128, exponents.shape, dtype=torch.uint8, device=device, generator=generator))
    table = torch.randperm(sequences * columns, device=device, generator=generator).view(sequences, columns).int()
    query = torch.randn(rows, heads, INDEX_DIM, device=device, generator=generator).bfloat16()
    angles = torch.tensor([1.0, 0.0], device=device).repeat(1, 32)  # positions do not matter here
    packed = lk.pack_index_query(query, angles, torch.zeros(rows, dtype=torch.int32, device=device), layout="packed")
    weights = torch.rand(rows, heads, device=device, generator=generator).bfloat16()
    return packed, weights, cache, table, torch.full((rows,), keys, dtype=torch.int32, device=device)


def _scores(rows: int, width: int, device: torch.device, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Normal logits, full lengths, a page table."""
    generator = torch.Generator(device).manual_seed(seed)
    logits = torch.randn(rows, width, device=device, generator=generator)
    columns = -(-width // PAGE)
    table = torch.randperm(rows * columns, device=device, generator=generator).view(rows, columns).int()
    return logits, torch.full((rows,), width, dtype=torch.int32, device=device), table


def _lengths(rows: int, longest: int, device: torch.device, seed: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randint(1, longest + 1, (rows,), dtype=torch.int32, device=device, generator=generator)
