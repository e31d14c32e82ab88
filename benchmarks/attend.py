"""Stage `attend`: sparse attention at decode, verify and prefill sizes, and merging of partial results.

Every query attends to 128 window rows and 512 selected ones, with a sink and the inverse rotation. A query's rows are
its own, in random order, from pools of up to 2^18 rows; slots are int32. Bytes that a call must move, for a query:

    640 rows as stored (V41 528, V41_FP4 288, BF16 1024 bytes each) + 4 for each slot
    1024 read and 1024 + 4 written for each head; 256 read (angles) + 8 (position)

Flops: two products of 640 x 512 multiply-adds for each head, 4 * 640 * 512.

`x10` in a name: rows cut into ten parts (`splits=10`), merged by a second launch. Peers: `eager`, this library's
reference run by PyTorch on the same device; `sdpa`, PyTorch's attention over rows that are already bf16 and gathered,
without sink or rotation (what a dense kernel takes once the pages are unpacked).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import latentkv as lk
from latentkv.bench import Case, Peer
from latentkv.layout import LATENT_DIM
from latentkv.numerics import yarn_freqs
from latentkv.reference import attend as reference

WINDOW, SELECTED = 128, 512
PAGE = 256
MOST_ROWS = 1 << 18
V41, FP4, BF16 = lk.KVLayout.V41, lk.KVLayout.V41_FP4, lk.KVLayout.BF16
V4 = lk.KVLayout.V4
# heads, tokens, splits
SHAPES = ((64, 1, 1), (64, 1, 5), (64, 1, 10), (64, 64, 1), (64, 64, 2), (128, 64, 1), (64, 256, 1), (64, 1536, 1),
          (16, 64, 1), (16, 64, 2))  # fmt: skip
OTHER_PAIRS = ((V41, V41), (V4, V4), (BF16, BF16))  # at one size
EAGER_TOKENS, SDPA_TOKENS = 64, 256
TABLE_POSITIONS = 65536
MERGED = ((64, 8, 64), (1536, 2, 64))  # tokens, parts, heads


def cases(sizes: Sequence[int] | None = None) -> list[Case]:
    """Every case; with `sizes`, those numbers of queries of 64 heads instead."""
    shapes = SHAPES if sizes is None else tuple((64, n, 1) for n in sizes)
    found = [_case(V41, FP4, heads, tokens, splits) for heads, tokens, splits in shapes]
    if sizes is None:
        found += [_case(near, far, 64, 256, 1) for near, far in OTHER_PAIRS]
        found += [_merge_case(*shape) for shape in MERGED]
    return found


def _case(near: lk.KVLayout, far: lk.KVLayout, heads: int, tokens: int, splits: int) -> Case:
    def build(device: torch.device, seed: int) -> Callable[[], object]:
        query, window, extra, options = _inputs(near, far, heads, tokens, device, seed)
        return lambda: lk.sparse_mla(query, window, extra, splits=splits, **options)

    def eager(device: torch.device, seed: int) -> Callable[[], object]:
        query, window, extra, options = _inputs(near, far, heads, tokens, device, seed)
        flat = [x for r in (window, extra) for x in (r.cache, r.slots, r.lengths, r.layout.name, r.page_size)]
        scale, infinity = LATENT_DIM**-0.5, float("-inf")
        return lambda: reference.sparse_mla(query, *flat, scale, options["sink"], *options["inverse_rope"], infinity)

    def sdpa(device: torch.device, seed: int) -> Callable[[], object]:
        rows = torch.randn(tokens, 1, WINDOW + SELECTED, LATENT_DIM, device=device).bfloat16()
        query = torch.randn(tokens, 1, heads, LATENT_DIM, device=device).bfloat16()
        return lambda: torch.nn.functional.scaled_dot_product_attention(query, rows, rows)

    row = WINDOW * near.row_bytes + SELECTED * far.row_bytes + 4 * (WINDOW + SELECTED)
    peers = []
    if far == FP4 and splits == 1:
        peers += [Peer("sdpa", sdpa)] if tokens <= SDPA_TOKENS else []
        peers += [Peer("eager", eager, graph=False)] if tokens <= EAGER_TOKENS else []
    return Case(
        "sparse_mla",
        f"{near}+{far} H{heads}" + (f" x{splits}" if splits > 1 else ""),
        tokens,
        "queries",
        tokens * (row + heads * (4 * LATENT_DIM + 4) + 264),
        build,
        flops=4 * tokens * heads * (WINDOW + SELECTED) * LATENT_DIM,
        peers=tuple(peers),
    )


def _merge_case(tokens: int, parts: int, heads: int) -> Case:
    def inputs(device: torch.device, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator(device).manual_seed(seed)
        outs = torch.randn(parts, tokens, heads, LATENT_DIM, device=device, generator=generator)
        return outs, torch.randn(parts, tokens, heads, device=device, generator=generator)

    def build(device: torch.device, seed: int) -> Callable[[], object]:
        outs, lses = inputs(device, seed)
        return lambda: lk.merge_partials(outs, lses)

    def eager(device: torch.device, seed: int) -> Callable[[], object]:
        outs, lses = inputs(device, seed)
        return lambda: reference.merge_partials(outs, lses, None)

    moved = tokens * heads * (parts * (4 * LATENT_DIM + 4) + 2 * LATENT_DIM + 4)
    peers = (Peer("eager", eager, graph=False),)
    return Case("merge_partials", f"fp32 H{heads} x{parts}", tokens, "queries", moved, build, peers=peers)


# --- inputs -----------------------------------------------------------------------------------------------------------


def _inputs(
    near: lk.KVLayout, far: lk.KVLayout, heads: int, tokens: int, device: torch.device, seed: int
) -> tuple[Tensor, lk.Rows, lk.Rows, dict[str, Any]]:
    """Query, window rows, extra rows, and the options of a call."""
    generator = torch.Generator(device).manual_seed(seed)
    query = torch.randn(tokens, heads, LATENT_DIM, device=device, generator=generator).bfloat16()
    window = _rows(near, WINDOW, tokens, device, generator)
    extra = _rows(far, SELECTED, tokens, device, generator)
    positions = torch.randint(0, TABLE_POSITIONS, (tokens,), device=device, generator=generator)
    sink = torch.randn(heads, device=device, generator=generator)
    return query, window, extra, {"sink": sink, "inverse_rope": (_table(device), positions)}


def _rows(layout: lk.KVLayout, width: int, tokens: int, device: torch.device, generator: torch.Generator) -> lk.Rows:
    """A pool of stored rows, and for every query `width` of its own (of random ones where the pool is full)."""
    pages = -(-min(tokens * width, MOST_ROWS) // PAGE)
    cache = lk.new_kv_cache(layout, pages, PAGE, device=device)
    capacity = pages * PAGE
    rows = torch.randn(capacity, LATENT_DIM, device=device, generator=generator).bfloat16()
    lk.store_kv(rows, cache, torch.arange(capacity, device=device), layout=layout, page_size=PAGE)
    slots = torch.cat(
        [torch.randperm(capacity, device=device, generator=generator) for _ in range(-(-tokens * width // capacity))]
    )
    return lk.Rows(cache, slots[: tokens * width].reshape(tokens, width).int(), layout, PAGE)


def _table(device: torch.device) -> Tensor:
    """The rotation table, one for all sets."""
    if device not in _tables:
        _tables[device] = yarn_freqs(TABLE_POSITIONS, theta=10000.0).to(device)
    return _tables[device]


_tables: dict[torch.device, Tensor] = {}
