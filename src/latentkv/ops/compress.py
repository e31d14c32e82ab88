"""Stage `compress`: pool tokens into latents and write them."""

from __future__ import annotations

import torch
from torch import Tensor

from latentkv.layout import LATENT_DIM, KVLayout
from latentkv.ops import checks
from latentkv.ops._library import define
from latentkv.reference import compress as reference

F32 = (torch.float32,)
BF16 = (torch.bfloat16,)


def compress1(
    rows: Tensor,
    weight: Tensor,
    cache: Tensor,
    slots: Tensor,
    positions: Tensor,
    freqs: Tensor,
    *,
    eps: float,
    layout: KVLayout | str,
    page_size: int,
    out: Tensor | None = None,
) -> Tensor:
    """Ratio-1 compressor: norm a projection into a latent, return it, and write it rotated and quantized.

    Args:
        rows: bf16 `[n, 512]`, last stride 1, any row stride.
        weight: bf16 or fp32 `[512]`, the norm's weight.
        cache: uint8 `[num_pages, page_stride]`, written in place.
        slots: int32 or int64 `[n]`; 0 (a padded row) and any slot outside the cache write nothing.
        positions: int32 or int64 `[n]`; one outside the table reads row 0.
        freqs: fp32 `[max_pos, 64]` or complex64 `[max_pos, 32]`.
        eps: added to the mean square.
        layout: the cache's `KVLayout`.
        page_size: rows a page.
        out: bf16 `[n, 512]`, last stride 1, for the latents; allocated if None.

    Returns:
        bf16 `[n, 512]`, the normed latent before its rotation, of every row, padded ones too.

    Raises:
        ValueError, TypeError: bad shapes, strides or dtypes.

    V4 and V41 pages hold the latent fake-quantized per 16 first, V41_FP4 and V41_MXFP4 pages round it once, BF16 pages
    hold it as rotated. The norm's exception is that of `norm_rope_store_kv`. Semantics: sglang's
    `c1_decode_norm_rope_store`.
    """
    rows = checks.latent_rows("rows", rows, BF16)
    count, device = rows.shape[0], rows.device
    weight, cache, layout, freqs, positions = _common(
        weight, cache, layout, page_size, freqs, positions, count, device, ratio=1
    )
    slots = checks.slots(slots, count, device, cache.shape[0] * page_size, page_size)
    out = _latents(out, count, device, rows=rows, cache=cache, freqs=freqs, weight=weight)
    torch.ops.latentkv.compress1(
        rows, weight, cache, slots, positions, freqs, checks.eps_value(eps), layout.name, page_size, out
    )
    return out


def compress2(
    rows: Tensor,
    state: Tensor,
    weight: Tensor,
    cache: Tensor,
    raw_slots: Tensor,
    positions: Tensor,
    requests: Tensor,
    freqs: Tensor,
    *,
    eps: float,
    layout: KVLayout | str,
    page_size: int,
    ring: int = 2,
    draft_len: int = 1,
    out: Tensor | None = None,
) -> Tensor:
    """Ratio-2 compressor for decoding and for verifying drafts: pool pairs of tokens, norm, rotate, quantize, write.

    Args:
        rows: fp32 `[n, 1024]`, `| kv 512 | score 512 |`; `draft_len` consecutive rows a request.
        state: fp32 `[state_rows, 1024]`, written in place; row request * ring + position % ring holds a pending token.
        weight: bf16 or fp32 `[512]`, the norm's weight.
        cache: uint8 `[num_pages, page_stride]`, written in place at slot raw_slot // 2.
        raw_slots: int32 or int64 `[n]`, slots counted in tokens; 0 (a padded row) and one outside the cache touch
            neither state nor page.
        positions: int32 or int64 `[n]`, token positions.
        requests: int32 or int64 `[n]`, each in one block of `draft_len` rows only; of a padded row it may be anything,
            and a row whose request has no state counts as padded.
        freqs: fp32 `[max_pos, 64]` or complex64 `[max_pos, 32]`.
        eps: added to the mean square.
        layout: the cache's `KVLayout`.
        page_size: rows a page.
        ring: state rows a request; a power of two of at least `draft_len` + 1.
        draft_len: rows a request, 1 when decoding.
        out: bf16 `[n, 512]` for the latents; rows without one keep what it holds.

    Returns:
        bf16 `[n, 512]`, the normed latent before its rotation of each odd position; zeros elsewhere unless `out` is
        given.

    Raises:
        ValueError, TypeError: bad shapes, strides, dtypes, ring or draft length.

    A token at an even position is parked in the state. One at an odd position pools with its predecessor: the previous
    row of its request in this call, or the state. The latent stands for the pair's first token, whose position rotates
    it. The norm's exception is that of `norm_rope_store_kv`. Semantics: sglang's `c2_decode_norm_rope_store`; the
    exponential is `numerics.exp_nonpositive`.
    """
    rows, count, device = _pair_rows(rows)
    state, ring = _pair_state("state", state, 2 * LATENT_DIM, ring, device)
    weight, cache, layout, freqs, positions = _common(
        weight, cache, layout, page_size, freqs, positions, count, device, ratio=2
    )
    draft_len = checks.integer("draft_len", draft_len, 1)
    if count % draft_len:
        raise ValueError(f"draft_len: {draft_len} does not divide {count} rows")
    if ring < draft_len + 1:
        raise ValueError(f"ring: {ring} given, at least draft_len + 1 = {draft_len + 1} needed")
    raw_slots, requests = _raw(raw_slots, requests, count, state, ring, cache, page_size)
    out = _latents(out, count, device, rows=rows, cache=cache, freqs=freqs, weight=weight, state=state)
    checks.apart("state", state, rows=rows, cache=cache, freqs=freqs)
    torch.ops.latentkv.compress2(
        rows, state, weight, cache, raw_slots, positions, requests, freqs, checks.eps_value(eps), layout.name,
        page_size, ring, draft_len, out,
    )  # fmt: skip
    return out


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
    *,
    eps: float,
    layout: KVLayout | str,
    page_size: int,
    ring: int = 2,
    out: Tensor | None = None,
) -> Tensor:
    """Ratio-2 compressor for prompts in chunks of any length.

    Args:
        rows: fp32 `[n, 1024]`, `| kv 512 | score 512 |`, the tokens of a request consecutive.
        state: as in `compress2`; a request's last `ring` rows are parked after all pooling.
        weight: as in `compress2`.
        cache: as in `compress2`.
        raw_slots: as in `compress2`.
        positions: as in `compress2`.
        requests: int32 or int64 `[n]`, each in one chunk only; otherwise as in `compress2`.
        freqs: as in `compress2`.
        first_row: int32 `[R]`, each request's first row.
        row_count: int32 `[R]`, its rows; a negative count is 0. Padded rows count, so a chunk's padding belongs behind
            it. Rows outside the call are ignored, and a row that no request names is pooled but not parked.
        eps: added to the mean square.
        layout: the cache's `KVLayout`.
        page_size: rows a page.
        ring: state rows a request, a power of two.
        out: as in `compress2`.

    Returns:
        bf16 `[n, 512]` as in `compress2`.

    Raises:
        ValueError, TypeError: bad shapes, strides, dtypes or ring.

    A token at an odd position pools with the row before it if that is the same request's previous position and not
    padded, otherwise with the state. The norm's exception is that of `norm_rope_store_kv`. Semantics: sglang's ratio-2
    prefill compressor.
    """
    rows, count, device = _pair_rows(rows)
    state, ring = _pair_state("state", state, 2 * LATENT_DIM, ring, device)
    weight, cache, layout, freqs, positions = _common(
        weight, cache, layout, page_size, freqs, positions, count, device, ratio=2
    )
    raw_slots, requests = _raw(raw_slots, requests, count, state, ring, cache, page_size)
    first_row = checks.tensor("first_row", first_row, ("R",), (torch.int32,), device, inner=False)
    row_count = checks.tensor("row_count", row_count, (first_row.shape[0],), (torch.int32,), device, inner=False)
    out = _latents(out, count, device, rows=rows, cache=cache, freqs=freqs, weight=weight, state=state)
    checks.apart("state", state, rows=rows, cache=cache, freqs=freqs)
    torch.ops.latentkv.compress2_prefill(
        rows, state, weight, cache, raw_slots, positions, requests, freqs, first_row, row_count,
        checks.eps_value(eps), layout.name, page_size, ring, out,
    )  # fmt: skip
    return out


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
    *,
    ring: int = 2,
) -> tuple[Tensor, Tensor, Tensor]:
    """Pool one decoded token a request with its parked predecessor, and nothing else.

    Args:
        kv: fp32 `[n, 512]`.
        score: fp32 `[n, 512]`.
        positions: int32 or int64 `[n]`, token positions.
        raw_slots: int32 or int64 `[n]`; 0 or less marks a padded row, which leaves the state alone.
        slots: int32 or int64 `[n]`, slots of the latents.
        requests: int32 or int64 `[n]`, each once; of a padded row it may be anything, and a row whose request has no
            state counts as padded.
        state_kv: fp32 `[state_rows, 512]`, written in place at request * ring + position % ring for even positions.
        state_score: fp32 `[state_rows, 512]`, likewise.
        pad_row: a spare state row, which padded rows read in the reference and no row writes.
        ring: state rows a request, a power of two.

    Returns:
        pooled fp32 `[n, 512]` (zeros for even positions and padded rows), the positions of the groups `[n]` in
        `positions`' dtype (position - 1 for odd ones), and max(slot, 0), `[n]` in `slots`' dtype.

    Raises:
        ValueError, TypeError: bad shapes, strides, dtypes, ring or pad row.

    The pooled value is a softmax over the pair's scores followed by the sum of separately rounded products; the
    exponential may differ from another library's in its last bit. Semantics: sglang's `c2_decode_pool`.
    """
    kv = checks.latent_rows("kv", kv, F32)
    count, device = kv.shape[0], kv.device
    score = checks.tensor("score", score, (count, LATENT_DIM), F32, device)
    ints = {"positions": positions, "raw_slots": raw_slots, "slots": slots}
    for name, x in ints.items():
        checks.tensor(name, x, (count,), checks.INTS, device, inner=False)
    state_kv, ring = _pair_state("state_kv", state_kv, LATENT_DIM, ring, device)
    state_score, ring = _pair_state("state_score", state_score, LATENT_DIM, ring, device)
    requests = checks.requests(requests, raw_slots, state_kv.shape[0], ring)
    if state_score.shape != state_kv.shape:
        raise ValueError(f"state_score: {state_score.shape[0]} rows given, {state_kv.shape[0]} as state_kv needed")
    checks.apart("state_kv", state_kv, state_score=state_score, kv=kv, score=score)
    checks.apart("state_score", state_score, kv=kv, score=score)
    pad_row = checks.integer("pad_row", pad_row, 0, state_kv.shape[0] - 1)
    return torch.ops.latentkv.pool_pairs(
        kv, score, positions, raw_slots, slots, requests, state_kv, state_score, pad_row, ring
    )


def _common(
    weight: Tensor,
    cache: Tensor,
    layout: KVLayout | str,
    page_size: int,
    freqs: Tensor,
    positions: Tensor,
    count: int,
    device: torch.device,
    ratio: int,
) -> tuple[Tensor, Tensor, KVLayout, Tensor, Tensor]:
    weight = checks.tensor("weight", weight, (LATENT_DIM,), (torch.bfloat16, torch.float32), device)
    cache, layout = checks.kv_cache(cache, layout, page_size)
    checks.same_device(device, cache=cache)
    freqs = checks.freqs(freqs, device)
    return weight, cache, layout, freqs, checks.positions(positions, count, device, freqs, ratio=ratio)


def _pair_rows(rows: Tensor) -> tuple[Tensor, int, torch.device]:
    rows = checks.tensor("rows", rows, ("n", 2 * LATENT_DIM), F32)
    return rows, rows.shape[0], rows.device


def _pair_state(name: str, state: Tensor, width: int, ring: int, device: torch.device) -> tuple[Tensor, int]:
    ring = checks.power_of_two("ring", ring, 2, 2**30)
    return checks.output(name, state, ("state_rows", width), torch.float32, device), ring


def _raw(
    raw_slots: Tensor, requests: Tensor, count: int, state: Tensor, ring: int, cache: Tensor, page_size: int
) -> tuple[Tensor, Tensor]:
    capacity = 2 * cache.shape[0] * page_size
    raw_slots = checks.slots(raw_slots, count, state.device, capacity, 2 * page_size, name="raw_slots")
    return raw_slots, checks.requests(requests, raw_slots, state.shape[0], ring)


def _latents(out: Tensor | None, count: int, device: torch.device, **read: Tensor) -> Tensor:
    if out is None:
        return torch.zeros(count, LATENT_DIM, dtype=torch.bfloat16, device=device)
    out = checks.output("out", out, (count, LATENT_DIM), torch.bfloat16, device)
    checks.apart("out", out, **read)
    return out


define(
    "compress",
    "compress1(Tensor rows, Tensor weight, Tensor(a!) cache, Tensor slots, Tensor positions, Tensor freqs, float eps, "
    "str layout, int page_size, Tensor(b!) out) -> ()",
    reference.compress1,
    lambda *args: None,
    kernel="compress1",
)
define(
    "compress",
    "compress2(Tensor rows, Tensor(a!) state, Tensor weight, Tensor(b!) cache, Tensor raw_slots, Tensor positions, "
    "Tensor requests, Tensor freqs, float eps, str layout, int page_size, int ring, int draft_len, Tensor(c!) out) "
    "-> ()",
    reference.compress2,
    lambda *args: None,
    kernel="compress2",
)
define(
    "compress",
    "compress2_prefill(Tensor rows, Tensor(a!) state, Tensor weight, Tensor(b!) cache, Tensor raw_slots, "
    "Tensor positions, Tensor requests, Tensor freqs, Tensor first_row, Tensor row_count, float eps, str layout, "
    "int page_size, int ring, Tensor(c!) out) -> ()",
    reference.compress2_prefill,
    lambda *args: None,
    kernel="compress2_prefill",
)
define(
    "compress",
    "pool_pairs(Tensor kv, Tensor score, Tensor positions, Tensor raw_slots, Tensor slots, Tensor requests, "
    "Tensor(a!) state_kv, Tensor(b!) state_score, int pad_row, int ring) -> (Tensor, Tensor, Tensor)",
    reference.pool_pairs,
    lambda kv, score, positions, raw_slots, slots, *args: (
        torch.empty_like(kv, memory_format=torch.contiguous_format),
        torch.empty_like(positions),
        torch.empty_like(slots),
    ),
    kernel="pool_pairs",
)
