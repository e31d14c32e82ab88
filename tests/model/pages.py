"""The bytes that a request has in the pools, read through its page tables row by row."""

from __future__ import annotations

import torch
from torch import Tensor

from latentkv.layout import IndexKeyLayout, KVLayout
from latentkv.model.cache import INDEX_PAGE_ROWS, PAGE_TOKENS, WINDOW_PAGE_ROWS, ModelCache


def contents(cache: ModelCache, request: int) -> dict[str, Tensor]:
    """Window rows of the last 128 tokens, compressed rows, index keys and the pending token, by pool."""
    length, config = cache.length(request), cache.config
    window_pages, pages = cache._owned[request]
    last = range(max(0, length - config.window), length)
    ring = [p % cache.ring_rows for p in last]
    slots = [window_pages[r // WINDOW_PAGE_ROWS] * WINDOW_PAGE_ROWS + r % WINDOW_PAGE_ROWS for r in ring]
    found = {
        f"window {layer}": rows_of(pool, slots, cache.window_layout, WINDOW_PAGE_ROWS)
        for layer, pool in enumerate(cache.window)
    }
    for layer, role in enumerate(config.roles()):
        if layer not in cache.rows:
            continue
        size = PAGE_TOKENS // role.ratio
        slots = [pages[j // size] * size + j % size for j in range(length // role.ratio)]
        found[f"rows {layer}"] = rows_of(cache.rows[layer], slots, cache.row_layout, size)
        found[f"keys {layer}"] = keys_of(cache.keys[layer].payload, slots)
        if layer in cache.pairs and length % 2:
            found[f"pending {layer}"] = cache.pairs[layer][request * cache.pair_ring + (length - 1) % cache.pair_ring]
    return {name: tensor.cpu() for name, tensor in found.items()}


def rows_of(pool: Tensor, slots: list[int], layout: KVLayout, page_size: int) -> Tensor:
    stride = pool.stride(0)
    data = [layout.data_offset(s, page_size, stride) for s in slots]
    scales = [layout.scale_offset(s, page_size, stride) for s in slots] if layout.scale_bytes else data
    return torch.cat((gather(pool, data, layout.data_bytes), gather(pool, scales, layout.scale_bytes)), 1)


def keys_of(pool: Tensor, slots: list[int]) -> Tensor:
    page, fused = pool.stride(0), IndexKeyLayout.FUSED
    starts = [(s // INDEX_PAGE_ROWS * page, s % INDEX_PAGE_ROWS) for s in slots]
    payload = [base + fused.payload_in_page(offset, 0) for base, offset in starts]
    scales = [base + fused.scale_in_page(offset, 0) for base, offset in starts]
    return torch.cat((gather(pool, payload, 64), gather(pool, scales, 4)), 1)


def gather(pool: Tensor, starts: list[int], count: int) -> Tensor:
    at = torch.tensor(starts, dtype=torch.int64).reshape(-1, 1) + torch.arange(count)
    return pool.cpu().flatten()[at]


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
