"""Stage `index`: keys stored, stored plainly, read and decoded; queries packed with their head weights.

Pages of 64 keys, slots distinct and in random order, slots and positions int64, positions random in a table of 65536,
values, weight and queries bf16, ten partial sums of fp32 a head weight, weights bf16. Bytes that an op must move:

    store_index_key            for each key 256 read (values) + 16 read (slot, position) + 256 read (angles)
                               + 68 written; the norm's weight, 256 bytes a call, once
    store_index_key_plain      for each key 256 read + 8 read (slot) + 68 written
    load_index_key             for each key 8 read (slot) + 68 read + 68 written
    dequantize_index           for each key 68 read + 512 written
    pack_index_query_weights   for each token 8 read (position) + 256 read (angles) and for each of its heads 256 read
                               + 40 read (partial sums) + 64 written + 2 written (weight); the scales, 4 written a head
                               (packed) or 256 a token (flydsl)

Peer: `eager`, this library's reference run by PyTorch on the same device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import latentkv as lk
from latentkv.bench import Case, Peer
from latentkv.layout import INDEX_DIM, INDEX_PAYLOAD_BYTES, INDEX_ROW_BYTES, INDEX_SCALE_BYTES, ROPE_DIM
from latentkv.numerics import yarn_freqs
from latentkv.reference import index as reference

SIZES = (1, 16, 64, 256, 1536, 8192, 65536)
QUERY_SIZES = (1, 64, 256, 1536)
HEADS = (32, 64)
MAIN_LAYOUT = lk.IndexKeyLayout.FUSED  # measured at every size, the others at the largest
PEER_SIZES = (256, 8192)
QUERY_PEER_SIZES = (64, 1536)
PAGE = 64
TABLE_POSITIONS = 65536
EPS = 1e-20
RATIO = 2
SPLITS = 10
VALUE_BYTES = 2 * INDEX_DIM
NUMBER_BYTES = 8
ANGLE_BYTES = 4 * ROPE_DIM
FLYDSL_SCALE_BYTES = 256  # of a token


def cases(sizes: Sequence[int] | None = None) -> list[Case]:
    """Every case; `sizes` replaces those of keys and of queries."""
    keys, queries = tuple(sizes or SIZES), tuple(sizes or QUERY_SIZES)
    found = []
    for layout in lk.IndexKeyLayout:
        for size in keys if layout is MAIN_LAYOUT else keys[-1:]:
            found += [_store_case(layout, size), _plain_case(layout, size), _load_case(layout, size)]
    found += [_decode_case(size) for size in keys]
    for layout in lk.IndexQueryLayout:
        found += [_query_case(layout, heads, size) for heads in HEADS for size in queries]
    return found


def _store_case(layout: lk.IndexKeyLayout, size: int) -> Case:
    def build(device: torch.device, seed: int) -> Callable[[], object]:
        values, weight, cache, slots, positions, freqs = _key_inputs(layout, size, device, seed)
        return lambda: lk.store_index_key(values, weight, cache, slots, positions, freqs, eps=EPS, ratio=RATIO)

    def eager(device: torch.device, seed: int) -> Callable[[], object]:
        values, weight, cache, *others = _key_inputs(layout, size, device, seed)
        form = (EPS, RATIO, layout.value, PAGE)
        return lambda: reference.store_index_key(values, weight, cache.payload, cache.scale, *others, *form)

    moved = size * (VALUE_BYTES + 2 * NUMBER_BYTES + ANGLE_BYTES + INDEX_ROW_BYTES) + VALUE_BYTES
    return Case("store_index_key", layout.value, size, "keys", moved, build, peers=_key_peers(layout, size, eager))


def _plain_case(layout: lk.IndexKeyLayout, size: int) -> Case:
    def build(device: torch.device, seed: int) -> Callable[[], object]:
        values, _, cache, slots, *_ = _key_inputs(layout, size, device, seed)
        return lambda: lk.store_index_key_plain(values, cache, slots)

    def eager(device: torch.device, seed: int) -> Callable[[], object]:
        values, _, cache, slots, *_ = _key_inputs(layout, size, device, seed)
        form = (True, layout.value, PAGE)
        return lambda: reference.store_index_key_plain(values, cache.payload, cache.scale, slots, *form)

    moved = size * (VALUE_BYTES + NUMBER_BYTES + INDEX_ROW_BYTES)
    peers = _key_peers(layout, size, eager)
    return Case("store_index_key_plain", layout.value, size, "keys", moved, build, peers=peers)


def _load_case(layout: lk.IndexKeyLayout, size: int) -> Case:
    def build(device: torch.device, seed: int) -> Callable[[], object]:
        _, _, cache, slots, *_ = _key_inputs(layout, size, device, seed)
        return lambda: lk.load_index_key(cache, slots)

    def eager(device: torch.device, seed: int) -> Callable[[], object]:
        _, _, cache, slots, *_ = _key_inputs(layout, size, device, seed)
        return lambda: reference.load_index_key(cache.payload, cache.scale, slots, layout.value, PAGE)

    moved = size * (NUMBER_BYTES + 2 * INDEX_ROW_BYTES)
    return Case("load_index_key", layout.value, size, "keys", moved, build, peers=_key_peers(layout, size, eager))


def _decode_case(size: int) -> Case:
    def build(device: torch.device, seed: int) -> Callable[[], object]:
        generator = torch.Generator(device).manual_seed(seed)
        payload = torch.randint(-128, 128, (size, INDEX_PAYLOAD_BYTES), device=device, generator=generator).to(
            torch.int8
        )
        scale = torch.full((size,), 0x7F7F7F7F, dtype=torch.int32, device=device)
        return lambda: lk.dequantize_index(payload, scale)

    return Case("dequantize_index", "fp32", size, "keys", size * (INDEX_ROW_BYTES + 4 * INDEX_DIM), build)


def _query_case(layout: lk.IndexQueryLayout, heads: int, size: int) -> Case:
    factor = INDEX_DIM**-0.5 * heads**-0.5

    def build(device: torch.device, seed: int) -> Callable[[], object]:
        inputs = _query_inputs(heads, size, device, seed)
        return lambda: lk.pack_index_query_weights(*inputs, factor, layout=layout)

    def eager(device: torch.device, seed: int) -> Callable[[], object]:
        inputs, form = _query_inputs(heads, size, device, seed), (factor, layout.value, torch.bfloat16)
        return lambda: reference.pack_index_query_weights(*inputs, *form)

    head = VALUE_BYTES + 4 * SPLITS + INDEX_PAYLOAD_BYTES + 2
    packed = layout is lk.IndexQueryLayout.PACKED
    scales = heads * INDEX_SCALE_BYTES if packed else FLYDSL_SCALE_BYTES
    moved = size * (NUMBER_BYTES + ANGLE_BYTES + heads * head + scales)
    return Case(
        "pack_index_query_weights",
        f"{layout.value} {heads} heads",
        size,
        "tokens",
        moved,
        build,
        peers=(Peer("eager", eager, graph=False),) if packed and size in QUERY_PEER_SIZES else (),
    )


# --- inputs -----------------------------------------------------------------------------------------------------------


def _key_peers(layout: lk.IndexKeyLayout, size: int, eager: Callable[..., Callable[[], object]]) -> tuple[Peer, ...]:
    return (Peer("eager", eager, graph=False),) if layout is MAIN_LAYOUT and size in PEER_SIZES else ()


def _key_inputs(
    layout: lk.IndexKeyLayout, size: int, device: torch.device, seed: int
) -> tuple[Tensor, Tensor, lk.IndexKeyCache, Tensor, Tensor, Tensor]:
    """Values, weight, a cache of twice as many slots, distinct random slots, random positions, table."""
    generator = torch.Generator(device).manual_seed(seed)
    values = torch.randn(size, INDEX_DIM, device=device, generator=generator).bfloat16()
    pages = max(2, -(-2 * size // PAGE))
    cache = lk.new_index_key_cache(layout, pages, PAGE, device=device)
    slots = torch.randperm(pages * PAGE - 1, device=device, generator=generator)[:size] + 1
    positions = torch.randint(0, TABLE_POSITIONS, (size,), device=device, generator=generator)
    return values, torch.ones(INDEX_DIM, device=device, dtype=torch.bfloat16), cache, slots, positions, _table(device)


def _query_inputs(heads: int, size: int, device: torch.device, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, table, random positions, partial sums."""
    generator = torch.Generator(device).manual_seed(seed)
    query = torch.randn(size, heads, INDEX_DIM, device=device, generator=generator).bfloat16()
    positions = torch.randint(0, TABLE_POSITIONS, (size,), device=device, generator=generator)
    return query, _table(device), positions, torch.randn(SPLITS, size, heads, device=device, generator=generator)


def _table(device: torch.device) -> Tensor:
    """The rotation table, one for all sets."""
    if device not in _tables:
        _tables[device] = yarn_freqs(TABLE_POSITIONS, theta=160000.0).to(device)
    return _tables[device]


_tables: dict[torch.device, Tensor] = {}
