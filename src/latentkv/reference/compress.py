"""Stage `compress` in plain PyTorch: ratio-1 and ratio-2 pooling of tokens into one latent, then `store`."""

from __future__ import annotations

import torch
from torch import Tensor

from latentkv import numerics
from latentkv.layout import LATENT_DIM, KVLayout
from latentkv.reference.store import BF16, F32, rotate_tail, write_rows


def compress1(
    rows: Tensor,
    weight: Tensor,
    cache: Tensor,
    slots: Tensor,
    positions: Tensor,
    freqs: Tensor,
    eps: float,
    layout: str,
    page_size: int,
    out: Tensor,
) -> None:
    """Norm every row into `out`; rotate, quantize and write those whose slot is not padding."""
    latent = numerics.round_bf16(numerics.rms_norm(rows, weight, eps))
    out.copy_(latent)
    write_latents(latent, cache, slots, positions, freqs, KVLayout.parse(layout), page_size, first_slot=1)


def compress2(
    rows: Tensor,
    state: Tensor,
    weight: Tensor,
    cache: Tensor,
    raw_slots: Tensor,
    positions: Tensor,
    requests: Tensor,
    freqs: Tensor,
    eps: float,
    layout: str,
    page_size: int,
    ring: int,
    draft_len: int,
    out: Tensor,
) -> None:
    """Odd positions pool with the row before them in their request's block, or with the state; even ones park."""
    row = torch.arange(rows.shape[0], device=rows.device)
    active = _active(raw_slots, cache, page_size, requests, state, ring)
    chained = (row % draft_len != 0) & _after(active)
    _pool_and_write(
        rows, state, weight, cache, raw_slots, positions, requests, freqs, eps, layout, page_size, ring, active,
        chained, out,
    )  # fmt: skip
    _park(rows, state, positions, requests, ring, active & (positions % 2 == 0))


def compress2_prefill(
    rows: Tensor,
    state: Tensor,
    weight: Tensor,
    cache: Tensor,
    raw_slots: Tensor,
    positions: Tensor,
    requests: Tensor,
    freqs: Tensor,
    first_row: Tensor,
    row_count: Tensor,
    eps: float,
    layout: str,
    page_size: int,
    ring: int,
    out: Tensor,
) -> None:
    """Odd positions pool with the row before them if it is their predecessor, else with the state; last rows park."""
    active = _active(raw_slots, cache, page_size, requests, state, ring)
    follows = (requests == requests.roll(1)) & (positions == positions.roll(1) + 1)
    _pool_and_write(
        rows, state, weight, cache, raw_slots, positions, requests, freqs, eps, layout, page_size, ring, active,
        follows & _after(active), out,
    )  # fmt: skip
    # parked only now: a chunk that starts odd and ends even reads and writes the same ring slot
    row = torch.arange(rows.shape[0], device=rows.device).unsqueeze(-1)
    first = first_row.long()
    end = first + row_count.clamp(min=0)
    last = ((row >= torch.maximum(first, end - ring)) & (row < end)).any(-1)
    _park(rows, state, positions, requests, ring, active & last)


def pool_pairs(
    kv: Tensor,
    score: Tensor,
    positions: Tensor,
    raw_slots: Tensor,
    slots: Tensor,
    requests: Tensor,
    state_kv: Tensor,
    state_score: Tensor,
    pad_row: int,
    ring: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The pooling alone, one row a request."""
    padded = (raw_slots <= 0) | ~_has_state(requests, state_kv, ring)
    odd = positions % 2 == 1
    partner = torch.where(padded, pad_row, requests * ring + (positions - 1) % ring).long()
    own = torch.where(padded, pad_row, requests * ring + positions % ring).long()
    pooled = pool(state_kv[partner], kv, state_score[partner], score)
    parked = ~padded & ~odd
    state_kv[own[parked]], state_score[own[parked]] = kv[parked], score[parked]
    pooled = torch.where((odd & ~padded).unsqueeze(-1), pooled, 0.0)
    return pooled, torch.where(odd, positions - 1, positions), slots.clamp(min=0)


# --- shared -----------------------------------------------------------------------------------------------------------


def pool(kv_a: Tensor, kv_b: Tensor, score_a: Tensor, score_b: Tensor) -> Tensor:
    """Softmax over the pair's scores weighs its values, per channel; products rounded on their own."""
    e = numerics.exp_nonpositive(-(score_a - score_b).abs())
    first = score_a >= score_b
    weight_a, weight_b = torch.where(first, 1.0, e), torch.where(first, e, 1.0)
    return (kv_a * weight_a + kv_b * weight_b) / (1.0 + e)


def write_latents(
    latent: Tensor,
    cache: Tensor,
    slots: Tensor,
    positions: Tensor,
    freqs: Tensor,
    layout: KVLayout,
    page_size: int,
    *,
    first_slot: int,
) -> None:
    """Rotate bf16-valued latents `[n, 512]` at `positions`, quantize and write them."""
    values = rotate_tail(latent, numerics.freqs_at(freqs, positions), BF16)
    if layout.element.value == "e4m3":  # the model sees fp4 numerics whatever the page holds
        values = numerics.fake_quant_latent(values)
    write_rows(numerics.canonical_nan(values), cache, slots, layout, page_size, first_slot=first_slot)


def _pool_and_write(
    rows: Tensor,
    state: Tensor,
    weight: Tensor,
    cache: Tensor,
    raw_slots: Tensor,
    positions: Tensor,
    requests: Tensor,
    freqs: Tensor,
    eps: float,
    layout: str,
    page_size: int,
    ring: int,
    active: Tensor,
    chained: Tensor,
    out: Tensor,
) -> None:
    """Pool the active rows of odd positions with their partners, norm into `out`, and write the latents."""
    at = (active & (positions % 2 == 1)).nonzero().squeeze(-1)
    own = rows[at]
    parked = state[(requests[at] * ring + (positions[at] - 1) % ring).long()]
    partner = torch.where(chained[at].unsqueeze(-1), rows[at - 1], parked)
    pooled = pool(partner[:, :LATENT_DIM], own[:, :LATENT_DIM], partner[:, LATENT_DIM:], own[:, LATENT_DIM:])
    latent = numerics.round_bf16(numerics.rms_norm(numerics.round_bf16(pooled), weight, eps))
    out[at] = latent.to(BF16)
    kind = KVLayout.parse(layout)
    write_latents(latent, cache, raw_slots[at] // 2, positions[at] - 1, freqs, kind, page_size, first_slot=0)


def _active(raw_slots: Tensor, cache: Tensor, page_size: int, requests: Tensor, state: Tensor, ring: int) -> Tensor:
    """Rows that are not padding: a raw slot of the cache other than 0, and a request that has state."""
    raw_slots = raw_slots.long()  # a capacity may be past int32
    inside = (raw_slots > 0) & (raw_slots < 2 * cache.shape[0] * page_size)
    return inside & _has_state(requests, state, ring)


def _has_state(requests: Tensor, state: Tensor, ring: int) -> Tensor:
    return (requests >= 0) & (requests < state.shape[0] // ring)


def _after(active: Tensor) -> Tensor:
    """Whether the row before is active; the first row has none before it."""
    before = active.roll(1)
    before[:1] = False
    return before


def _park(rows: Tensor, state: Tensor, positions: Tensor, requests: Tensor, ring: int, which: Tensor) -> None:
    at = which.nonzero().squeeze(-1)
    state[(requests[at] * ring + positions[at] % ring).long()] = rows[at].to(F32)
