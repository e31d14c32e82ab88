"""Stage `store`: write latent rows to their pages and read them back."""

from __future__ import annotations

import torch
from torch import Tensor

from latentkv.layout import LATENT_DIM, KVLayout
from latentkv.ops import checks
from latentkv.ops._library import define
from latentkv.reference import store as reference


def new_kv_cache(
    layout: KVLayout | str, num_pages: int, page_size: int, *, device: torch.device | str | None = None
) -> Tensor:
    """Allocate a zeroed key-value cache.

    Args:
        layout: a `KVLayout` or its name.
        num_pages: pages.
        page_size: rows a page, a power of two.
        device: where; PyTorch's default if None.

    Returns:
        uint8 `[num_pages, layout.page_bytes(page_size)]`.

    Raises:
        ValueError, TypeError: an unknown layout, a page size that is not a power of two, a negative number of pages.
    """
    layout = KVLayout.parse(layout)
    page_bytes = layout.page_bytes(checks.power_of_two("page_size", page_size))
    return torch.zeros(checks.integer("num_pages", num_pages, 0), page_bytes, dtype=torch.uint8, device=device)


def store_kv(
    rows: Tensor,
    cache: Tensor,
    slots: Tensor,
    *,
    layout: KVLayout | str,
    page_size: int,
    freqs: Tensor | None = None,
) -> None:
    """Quantize latent rows and write each to its slot.

    Args:
        rows: bf16, fp16 or fp32 `[n, 512]`, last stride 1, any row stride.
        cache: uint8 `[num_pages, page_stride]`, written in place; bytes between pages are never touched.
        slots: int32 or int64 `[n]`, page * page_size + offset. One outside the cache writes nothing. Duplicates in one
            call are a race.
        layout: the cache's `KVLayout`.
        page_size: rows a page.
        freqs: fp32 `[n, 64]` or complex64 `[n, 32]`, one (cos, sin) row a token: the last 64 values are rotated and
            rounded to the rows' dtype first. None stores the rows as they are.

    Raises:
        ValueError, TypeError: bad shapes, strides or dtypes.

    Semantics: FlashMLA's V4 / V4.1 rows, sglang's `fused_store_cache`.
    """
    rows = checks.latent_rows("rows", rows)
    cache, layout = checks.kv_cache(cache, layout, page_size)
    checks.same_device(rows.device, cache=cache)
    slots = checks.slots(slots, rows.shape[0], rows.device, cache.shape[0] * page_size, page_size)
    if freqs is not None:
        freqs = checks.freqs(freqs, rows.device, rows=rows.shape[0])
    torch.ops.latentkv.store_kv(rows, cache, slots, layout.name, page_size, freqs)


def norm_rope_store_kv(
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
    query: Tensor | None = None,
) -> None:
    """Norm latent rows, rotate their tails, quantize them and write each to its slot, in one launch.

    Args:
        rows: bf16, fp16 or fp32 `[n, 512]`, last stride 1, any row stride.
        weight: bf16 or fp32 `[512]`, the norm's weight.
        cache: uint8 `[num_pages, page_stride]`, written in place.
        slots: int32 or int64 `[n]`; one outside the cache writes nothing.
        positions: int32 or int64 `[n]`; one outside the table reads row 0.
        freqs: fp32 `[max_pos, 64]` or complex64 `[max_pos, 32]`.
        eps: added to the mean square.
        layout: the cache's `KVLayout`.
        page_size: rows a page.
        query: bf16 `[n, heads, 512]`, last stride 1: the last 64 values of every head are rotated in place at the same
            positions, for every row, also for one whose slot writes nothing.

    Raises:
        ValueError, TypeError: bad shapes, strides or dtypes.

    The row is rounded to bf16 after the norm and after the rotation (V4 rounds only its tail, once). The sum of squares
    has no fixed order: on a GPU a normed value may differ from the CPU's by one bf16 step, at most 1 value in 10^4 of
    random rows. Everything after that rounding is bitwise equal.

    Semantics: sglang's `fused_k_norm_rope_flashmla`.
    """
    rows = checks.latent_rows("rows", rows)
    device, count = rows.device, rows.shape[0]
    weight = checks.tensor("weight", weight, (LATENT_DIM,), (torch.bfloat16, torch.float32), device)
    cache, layout = checks.kv_cache(cache, layout, page_size)
    checks.same_device(device, cache=cache)
    slots = checks.slots(slots, count, device, cache.shape[0] * page_size, page_size)
    freqs = checks.freqs(freqs, device)
    positions = checks.positions(positions, count, device, freqs)
    if query is not None:
        query = checks.output("query", query, (count, "heads", LATENT_DIM), torch.bfloat16, device)
        checks.apart("query", query, rows=rows, weight=weight, freqs=freqs)
    torch.ops.latentkv.norm_rope_store_kv(
        rows, weight, cache, slots, positions, freqs, checks.eps_value(eps), layout.name, page_size, query
    )


def load_kv(
    cache: Tensor, slots: Tensor, *, layout: KVLayout | str, page_size: int, out: Tensor | None = None
) -> Tensor:
    """Gather latent rows as bf16.

    Args:
        cache: uint8 `[num_pages, page_stride]`.
        slots: int32 or int64 `[n]`; one outside the cache gives a zero row.
        layout: the cache's `KVLayout`.
        page_size: rows a page.
        out: bf16 `[n, 512]`, last stride 1, written in place; allocated if None.

    Returns:
        bf16 `[n, 512]`; a group with a NaN scale (ue8m0 255, e4m3 0x7F) reads as NaN, whose bits are the device's own.

    Raises:
        ValueError, TypeError: bad shapes, strides or dtypes.

    Semantics: sglang's `dequantize_k_cache_paged_v41`.
    """
    cache, layout = checks.kv_cache(cache, layout, page_size)
    slots = checks.slots(slots, "n", cache.device, cache.shape[0] * page_size, page_size)
    if out is None:
        out = torch.empty(slots.shape[0], LATENT_DIM, dtype=torch.bfloat16, device=cache.device)
    else:
        out = checks.output("out", out, (slots.shape[0], LATENT_DIM), torch.bfloat16, cache.device)
        checks.apart("out", out, cache=cache, slots=slots)
    torch.ops.latentkv.load_kv(cache, slots, layout.name, page_size, out)
    return out


def load_kv_pages(cache: Tensor, *, layout: KVLayout | str, page_size: int) -> Tensor:
    """Read every row of every page as bf16.

    Args:
        cache: uint8 `[num_pages, page_stride]`.
        layout: the cache's `KVLayout`.
        page_size: rows a page.

    Returns:
        bf16 `[num_pages, page_size, 512]`.

    Raises:
        ValueError, TypeError: bad shapes, strides or dtypes.

    Semantics: FlashMLA's V4 / V4.1 pages, read whole.
    """
    cache, layout = checks.kv_cache(cache, layout, page_size)
    return torch.ops.latentkv.load_kv_pages(cache, layout.name, page_size)


def rope_fake_quant(
    x: Tensor, freqs: Tensor, *, kind: str, positions: Tensor | None = None, inverse: bool = False
) -> Tensor:
    """Rotate the last values of rows, then quantize and dequantize them instead of storing them.

    Args:
        x: bf16, fp16 or fp32 `[T, ..., D]`; the rows of a token share its angles.
        freqs: fp32 `[rows, width]` or complex64 `[rows, width / 2]`; `width` <= D last values are rotated.
        kind: "index" (per 32 values, power-of-two scale) or "latent" (per 16 values, e4m3 scale).
        positions: int32 or int64 `[T]`, rows of `freqs`; one outside reads row 0. None: `freqs` has one row a token.
        inverse: rotate by the conjugate.

    Returns:
        A tensor like `x`; the rotated tail was rounded through bf16, whatever the dtype.

    Raises:
        ValueError: an unknown kind, D not a multiple of the group, an odd or too large rotated width.
        TypeError: bad dtypes.

    Semantics: sglang's `rope_tail_fake_quant_fp4`.
    """
    groups = {"index": 32, "latent": 16}
    if kind not in groups:
        raise ValueError(f"kind: {kind!r} given, 'index' or 'latent' accepted")
    if not isinstance(x, Tensor) or x.dtype not in checks.FLOATS:
        raise TypeError(f"x: {getattr(x, 'dtype', type(x).__name__)} given, a bf16, fp16 or fp32 tensor needed")
    if x.dim() < 2 or x.shape[-1] % groups[kind]:
        raise ValueError(f"x: shape {list(x.shape)} given, [T, ..., D] with D a multiple of {groups[kind]} needed")
    width = _rope_width(freqs, x.shape[-1])
    freqs = checks.freqs(freqs, x.device, rows=x.shape[0] if positions is None else None, width=width)
    if positions is not None:
        positions = checks.positions(positions, x.shape[0], x.device, freqs)
    return torch.ops.latentkv.rope_fake_quant(x, freqs, kind, positions, checks.flag("inverse", inverse))


def _rope_width(freqs: Tensor, limit: int) -> int:
    if not isinstance(freqs, Tensor):
        raise TypeError(f"freqs: {type(freqs).__name__} given, a tensor is needed")
    if freqs.dim() != 2:
        raise ValueError(f"freqs: shape {list(freqs.shape)} given, [rows, width] needed")
    width = freqs.shape[1] * (2 if freqs.is_complex() else 1)
    if width % 2 or not 0 < width <= limit:
        raise ValueError(f"freqs: a rotated width of {width} given, an even width up to {limit} needed")
    return width


define(
    "store",
    "store_kv(Tensor rows, Tensor(a!) cache, Tensor slots, str layout, int page_size, Tensor? freqs) -> ()",
    reference.store_kv,
    lambda *args: None,
    kernel="store_kv",
)
define(
    "store",
    "norm_rope_store_kv(Tensor rows, Tensor weight, Tensor(a!) cache, Tensor slots, Tensor positions, Tensor freqs, "
    "float eps, str layout, int page_size, Tensor(b!)? query) -> ()",
    reference.norm_rope_store_kv,
    lambda *args: None,
    kernel="norm_rope_store_kv",
)
define(
    "store",
    "load_kv(Tensor cache, Tensor slots, str layout, int page_size, Tensor(a!) out) -> ()",
    reference.load_kv,
    lambda *args: None,
    kernel="load_kv",
)
define(
    "store",
    "load_kv_pages(Tensor cache, str layout, int page_size) -> Tensor",
    reference.load_kv_pages,
    lambda cache, layout, page_size: cache.new_empty((cache.shape[0], page_size, LATENT_DIM), dtype=torch.bfloat16),
    kernel="load_kv_pages",
)
define(
    "store",
    "rope_fake_quant(Tensor x, Tensor freqs, str kind, Tensor? positions, bool inverse) -> Tensor",
    reference.rope_fake_quant,
    lambda x, *args: torch.empty_like(x, memory_format=torch.contiguous_format),
    kernel="rope_fake_quant",
)
