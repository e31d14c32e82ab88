"""Stage `compress`: `compress1` at decode and prefill sizes, `compress2` decoding, verifying drafts and in chunks.

Pages of 256 rows, raw slots and slots distinct and in random order, positions and requests int64, weights bf16. Bytes
that an op must move, R being the layout's bytes of a row; the norm's weight, 1024 bytes a call, once:

    compress1   for each row 1024 read (row) + 16 read (slot, position) + 256 read (angles) + 1024 written (latent) + R
    compress2   for each row 4096 read (kv and score) + 24 read (slot, position, request)
                for each pair 256 read + 1024 written + R written
                for each row that waits 4096 written (state), and 4096 read when a later call finds it there

Decoding: half of the requests park and half complete a pair from the state. Verifying: six tokens a request, the first
one at an even position in half of them. In chunks of 1024 tokens every pair lies in one chunk, and the last two rows
of a chunk are parked.

Peer: `eager`, this library's reference run by PyTorch on the same device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import latentkv as lk
from latentkv.bench import Case, Peer
from latentkv.layout import LATENT_DIM, ROPE_DIM
from latentkv.numerics import yarn_freqs
from latentkv.reference import compress as reference

SIZES = (1, 16, 64, 256, 1536, 8192, 65536)
DECODE_SIZES = (1, 16, 64, 256, 1536)
MAIN_LAYOUTS = (lk.KVLayout.V41, lk.KVLayout.V41_FP4)  # measured at every size, the others at the largest
PEER_SIZES = (256, 8192)
PAGE = 256
TABLE_POSITIONS = 65536
EPS = 1e-20
DRAFTS, REQUESTS = 6, 256
CHUNK = 1024
ROW_BYTES = LATENT_BYTES = WEIGHT_BYTES = 2 * LATENT_DIM
TOKEN_BYTES = 8 * LATENT_DIM
NUMBER_BYTES = 8
ANGLE_BYTES = 4 * ROPE_DIM


def cases(sizes: Sequence[int] | None = None) -> list[Case]:
    """Every case; `sizes` replaces those of `compress1` and of decoding."""
    found = []
    for layout in lk.KVLayout.members():
        main = layout in MAIN_LAYOUTS
        single, decoding = tuple(sizes or SIZES), tuple(sizes or DECODE_SIZES)
        found += [_single_case(layout, size) for size in (single if main else single[-1:])]
        if main:
            found += [_pair_case(layout, size, "decode") for size in decoding]
            found += [_pair_case(layout, REQUESTS * DRAFTS, "verify"), _pair_case(layout, 8 * CHUNK, "prefill")]
    return found


def _single_case(layout: lk.KVLayout, size: int) -> Case:
    def build(device: torch.device, seed: int) -> Callable[[], object]:
        rows, weight, cache, slots, positions, freqs, out = _single_inputs(layout, size, device, seed)
        form: dict[str, Any] = {"eps": EPS, "layout": layout, "page_size": PAGE, "out": out}
        return lambda: lk.compress1(rows, weight, cache, slots, positions, freqs, **form)

    def eager(device: torch.device, seed: int) -> Callable[[], object]:
        *inputs, out = _single_inputs(layout, size, device, seed)
        return lambda: reference.compress1(*inputs, EPS, layout.name, PAGE, out)

    row = ROW_BYTES + 2 * NUMBER_BYTES + ANGLE_BYTES + LATENT_BYTES + layout.row_bytes
    peers = (Peer("eager", eager, graph=False),) if layout in MAIN_LAYOUTS and size in PEER_SIZES else ()
    return Case("compress1", str(layout), size, "rows", size * row + WEIGHT_BYTES, build, peers=peers)


def _pair_case(layout: lk.KVLayout, size: int, form: str) -> Case:
    def build(device: torch.device, seed: int) -> Callable[[], object]:
        inputs, chunks, out = _pair_inputs(layout, size, form, device, seed)
        options: dict[str, Any] = {"eps": EPS, "layout": layout, "page_size": PAGE, "ring": _ring(form), "out": out}
        if form == "prefill":
            return lambda: lk.compress2_prefill(*inputs, *chunks, **options)
        return lambda: lk.compress2(*inputs, draft_len=_draft_len(form), **options)

    def eager(device: torch.device, seed: int) -> Callable[[], object]:
        inputs, chunks, out = _pair_inputs(layout, size, form, device, seed)
        options = (EPS, layout.name, PAGE, _ring(form))
        if form == "prefill":
            return lambda: reference.compress2_prefill(*inputs, *chunks, *options, out)
        return lambda: reference.compress2(*inputs, *options, _draft_len(form), out)

    return Case(
        "compress2_prefill" if form == "prefill" else "compress2",
        f"{layout} {form}",
        size,
        "rows",
        _pair_bytes(layout, size, form),
        build,
        peers=(Peer("eager", eager, graph=False),) if size in (*PEER_SIZES, REQUESTS * DRAFTS) else (),
    )


def _pair_bytes(layout: lk.KVLayout, size: int, form: str) -> int:
    positions = _positions(size, form)
    pairs = sum(p % 2 for p in positions)
    if form == "prefill":
        parked, found = 2 * (size // CHUNK), 0
    else:
        parked, found = size - pairs, sum(p % 2 for p in positions[:: _draft_len(form)])
    tokens = size * (TOKEN_BYTES + 3 * NUMBER_BYTES) + (parked + found) * TOKEN_BYTES
    return tokens + pairs * (ANGLE_BYTES + LATENT_BYTES + layout.row_bytes) + WEIGHT_BYTES


# --- inputs -----------------------------------------------------------------------------------------------------------


def _draft_len(form: str) -> int:
    return DRAFTS if form == "verify" else 1


def _ring(form: str) -> int:
    return 8 if form == "verify" else 2


def _positions(size: int, form: str) -> list[int]:
    """Positions of rows: every chunk from 0, requests of different lengths, the first and every other one odd."""
    if form == "prefill":
        return [n % CHUNK for n in range(size)]
    length = _draft_len(form)
    return [8 * (n // length) + (n // length + 1) % 2 + n % length for n in range(size)]


def _single_inputs(layout: lk.KVLayout, size: int, device: torch.device, seed: int) -> tuple[Tensor, ...]:
    """Rows, weight, a cache of twice as many slots, distinct random slots, random positions, table, output."""
    generator = torch.Generator(device).manual_seed(seed)
    rows = torch.randn(size, LATENT_DIM, device=device, generator=generator).bfloat16()
    pages = max(2, -(-2 * size // PAGE))
    cache = lk.new_kv_cache(layout, pages, PAGE, device=device)
    slots = torch.randperm(pages * PAGE - 1, device=device, generator=generator)[:size] + 1
    positions = torch.randint(0, TABLE_POSITIONS, (size,), device=device, generator=generator)
    return rows, _weight(device), cache, slots, positions, _table(device), torch.empty_like(rows)


def _pair_inputs(
    layout: lk.KVLayout, size: int, form: str, device: torch.device, seed: int
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Tensor]:
    """Arguments up to the table, the chunks of a prefill, and an output."""
    generator = torch.Generator(device).manual_seed(seed)
    rows = torch.randn(size, 2 * LATENT_DIM, device=device, generator=generator)
    length = CHUNK if form == "prefill" else _draft_len(form)
    requests = torch.arange(size, device=device) // length
    held = (size // length + 1) * _ring(form)
    state = torch.randn(held, 2 * LATENT_DIM, device=device, generator=generator)
    pages = max(2, -(-size // PAGE) + 1)
    cache = lk.new_kv_cache(layout, pages, PAGE, device=device)
    slots = torch.randperm(pages * PAGE - 1, device=device, generator=generator)[:size] + 1
    positions = torch.tensor(_positions(size, form), device=device)
    first = torch.arange(0, size, length, device=device, dtype=torch.int32)
    out = torch.zeros(size, LATENT_DIM, device=device, dtype=torch.bfloat16)
    inputs = (rows, state, _weight(device), cache, 2 * slots, positions, requests, _table(device))
    return inputs, (first, torch.full_like(first, length)), out


def _weight(device: torch.device) -> Tensor:
    return torch.ones(LATENT_DIM, device=device, dtype=torch.bfloat16)


def _table(device: torch.device) -> Tensor:
    """The rotation table, one for all sets."""
    if device not in _tables:
        _tables[device] = yarn_freqs(TABLE_POSITIONS, theta=10000.0).to(device)
    return _tables[device]


_tables: dict[torch.device, Tensor] = {}
