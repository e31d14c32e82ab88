"""Stage `index`: FP4 index keys to their pages and back, packed index queries, head weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from latentkv import numerics
from latentkv.layout import (
    INDEX_DIM,
    INDEX_PAYLOAD_BYTES,
    IndexKeyLayout,
    IndexQueryLayout,
)
from latentkv.ops import checks
from latentkv.ops._library import define
from latentkv.reference import index as reference

MAX_INDEX_HEADS = 64
HEAD_TILE = 16  # FlyDSL arranges heads in tiles


@dataclass(frozen=True, eq=False)
class IndexKeyCache:
    """Pages of FP4 index keys: 68 bytes a key, 64 of payload and 4 of scale.

    Args:
        payload: uint8. FUSED: `[num_pages, page_stride]`, a page's 64-byte payload rows, then its 4-byte scale words.
            SPLIT64 and SPLIT8: `[num_pages, 1, 4, 64, 16]`. The page stride may exceed a page's bytes.
        scale: None for FUSED; uint8 `[num_pages, 1, 4, 64]` otherwise, any page stride.
        layout: an `IndexKeyLayout` or its name.
        page_size: keys a page: 64, or 128 for FUSED.

    Raises:
        ValueError, TypeError: tensors that do not hold such pages.

    The layouts are DeepGEMM's (FUSED) and aiter's FlyDSL kernels' (SPLIT64, SPLIT8).
    """

    payload: Tensor
    scale: Tensor | None
    layout: IndexKeyLayout
    page_size: int = 64

    def __post_init__(self) -> None:
        layout = IndexKeyLayout.parse(self.layout)
        object.__setattr__(self, "layout", layout)
        object.__setattr__(self, "page_size", checks.integer("page_size", self.page_size, 1))
        need = layout.page_bytes(self.page_size)
        if layout is IndexKeyLayout.FUSED:
            if self.scale is not None:
                raise ValueError("scale: given, but fused pages hold their scales; pass None")
            checks.tensor("payload", self.payload, ("num_pages", "page_stride"), (torch.uint8,))
            if self.payload.shape[1] < need:
                raise ValueError(
                    f"payload: pages of {self.payload.shape[1]} bytes given, "
                    f"a fused page of {self.page_size} keys takes {need}"
                )
            _check_pages("payload", self.payload, need)
        else:
            checks.tensor("payload", self.payload, ("num_pages", 1, 4, 64, 16), (torch.uint8,))
            checks.tensor("scale", self.scale, (self.payload.shape[0], 1, 4, 64), (torch.uint8,), self.payload.device)
            _check_pages("payload", self.payload, 4096)
            _check_pages("scale", self.scale, 256)

    @property
    def num_pages(self) -> int:
        """Pages."""
        return self.payload.shape[0]

    @property
    def capacity(self) -> int:
        """Slots: pages times keys a page."""
        return self.num_pages * self.page_size

    @property
    def device(self) -> torch.device:
        """Where the pages are."""
        return self.payload.device


def _check_pages(name: str, x: Tensor | None, need: int) -> None:
    assert x is not None
    inner, expected = x.stride()[2:], [64, 1] if x.dim() == 4 else [1024, 16, 1]
    if x.dim() > 2 and x.numel() and list(inner) != expected:
        raise ValueError(f"{name}: strides {x.stride()} given, each page must be contiguous")
    if x.shape[0] > 1 and x.stride(0) < need:
        raise ValueError(f"{name}: a page stride of {x.stride(0)} given, a page takes {need} bytes")


def new_index_key_cache(
    layout: IndexKeyLayout | str, num_pages: int, page_size: int = 64, *, device: torch.device | str | None = None
) -> IndexKeyCache:
    """Allocate a zeroed cache of index keys.

    Args:
        layout: an `IndexKeyLayout` or its name.
        num_pages: pages.
        page_size: keys a page: 64, or 128 for FUSED.
        device: where; PyTorch's default if None.

    Returns:
        The cache; page 0's slot 0 is the padded rows' and is never written by `store_index_key`.

    Raises:
        ValueError, TypeError: an unknown layout, a page size that it does not have, a negative number of pages.
    """
    layout = IndexKeyLayout.parse(layout)
    need = layout.page_bytes(checks.integer("page_size", page_size, 1))
    num_pages = checks.integer("num_pages", num_pages, 0)
    if layout is IndexKeyLayout.FUSED:
        return IndexKeyCache(torch.zeros(num_pages, need, dtype=torch.uint8, device=device), None, layout, page_size)
    payload = torch.zeros(num_pages, 1, 4, 64, 16, dtype=torch.uint8, device=device)
    scale = torch.zeros(num_pages, 1, 4, 64, dtype=torch.uint8, device=device)
    return IndexKeyCache(payload, scale, layout, page_size)


def store_index_key(
    values: Tensor,
    weight: Tensor,
    cache: IndexKeyCache,
    slots: Tensor,
    positions: Tensor,
    freqs: Tensor,
    *,
    eps: float,
    ratio: int,
) -> None:
    """Norm index keys, rotate their last 64 values, quantize them to FP4 in two stages and write them.

    Args:
        values: bf16, fp16 or fp32 `[n, 128]`, the projected latents before their norm; last stride 1.
        weight: bf16 or fp32 `[128]`, the norm's weight.
        cache: written in place.
        slots: int32 or int64 `[n]`. Slot 0 is a padded row's: 0, a negative slot and one past the cache write nothing.
            Duplicates in one call are a race.
        positions: int32 or int64 `[n]`, *token* positions; a key is rotated at its group's first, `position & -ratio`.
            Where that is outside the table it is row 0.
        freqs: fp32 `[max_pos, 64]` or complex64 `[max_pos, 32]`.
        eps: added to the mean square.
        ratio: tokens a key stands for, a power of two.

    Raises:
        ValueError, TypeError: bad shapes, strides or dtypes, a ratio that is not a power of two.

    In checked mode it is the rotating position that must be in the table. Values are rounded to bf16 after the norm and
    after the rotation. A NaN or Inf makes its group of 32 exponent 255,
    codes 0. On a GPU a normed value may differ from the CPU's by one bf16 step, as in `norm_rope_store_kv`.

    Semantics: sglang's `index_k_norm_rope_pack_store` and its split form, DeepSeek-V4.1.
    """
    values = checks.tensor("values", values, ("n", INDEX_DIM), checks.FLOATS)
    device, count = values.device, values.shape[0]
    weight = checks.tensor("weight", weight, (INDEX_DIM,), (torch.bfloat16, torch.float32), device)
    cache = check_cache(cache, device)
    slots = checks.slots(slots, count, device, cache.capacity, cache.page_size)
    freqs = checks.freqs(freqs, device)
    ratio = checks.power_of_two("ratio", ratio, 1, 2**30)
    positions = checks.positions(positions, count, device, freqs, ratio=ratio)
    torch.ops.latentkv.store_index_key(
        values, weight, cache.payload, cache.scale, slots, positions, freqs, checks.eps_value(eps), ratio, *_form(cache)
    )


def store_index_key_plain(values: Tensor, cache: IndexKeyCache, slots: Tensor, *, round_half_even: bool = True) -> None:
    """Quantize finished index keys to FP4 and write them: the pack stage alone.

    Args:
        values: bf16, fp16 or fp32 `[n, 128]`, normally the first stage's result; last stride 1.
        cache: written in place.
        slots: int32 or int64 `[n]`; slot 0 is written like any other, one outside the cache writes nothing.
            Duplicates in one call are a race.
        round_half_even: False rounds ties toward zero, as DeepSeek-V4's C4 indexer does.

    Raises:
        ValueError, TypeError: bad shapes, strides or dtypes.

    Semantics: the unfused index-key writers of sglang, DeepSeek-V4 and V4.1.
    """
    values = checks.tensor("values", values, ("n", INDEX_DIM), checks.FLOATS)
    cache = check_cache(cache, values.device)
    slots = checks.slots(slots, values.shape[0], values.device, cache.capacity, cache.page_size)
    torch.ops.latentkv.store_index_key_plain(
        values, cache.payload, cache.scale, slots, checks.flag("round_half_even", round_half_even), *_form(cache)
    )


def load_index_key(cache: IndexKeyCache, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Gather packed index keys.

    Args:
        cache: the pages.
        slots: int32 or int64 `[n]`; one outside the cache gives zeros.

    Returns:
        payload int8 `[n, 64]`, the even value in the low nibble, and scale int32 `[n]`, whose byte c, counted from the
        lowest, is the exponent of values 32c ..< 32c + 32 (a bit pattern: it may be negative).

    Raises:
        ValueError, TypeError: bad shapes, strides or dtypes.

    Semantics: the paged index-key readers of sglang.
    """
    cache = check_cache(cache)
    slots = checks.slots(slots, "n", cache.device, cache.capacity, cache.page_size)
    return torch.ops.latentkv.load_index_key(cache.payload, cache.scale, slots, *_form(cache))


def dequantize_index(payload: Tensor, scale: Tensor) -> Tensor:
    """Decode packed index keys or queries.

    Args:
        payload: int8 `[..., 64]`.
        scale: int32 `[...]`, as `load_index_key` and the PACKED query layout return them.

    Returns:
        fp32 `[..., 128]`; a group whose exponent is 255 is NaN.

    Raises:
        ValueError, TypeError: bad shapes or dtypes.

    Semantics: OCP MXFP4 values with a group of 32.
    """
    if not isinstance(payload, Tensor) or payload.dim() < 1:
        raise TypeError("payload: an int8 tensor [..., 64] needed")
    lead = tuple(payload.shape[:-1])
    payload = checks.tensor("payload", payload, (*lead, INDEX_PAYLOAD_BYTES), (torch.int8,))
    scale = checks.tensor("scale", scale, lead, (torch.int32,), payload.device, inner=False)
    return torch.ops.latentkv.dequantize_index(payload, scale)


def pack_index_query(
    query: Tensor, freqs: Tensor, positions: Tensor, *, layout: IndexQueryLayout | str
) -> tuple[Tensor, Tensor]:
    """Rotate the last 64 values of every query head and quantize them to FP4 in two stages.

    Args:
        query: bf16 `[T, H, 128]` or `[T, H * 128]`, last stride 1; up to 64 heads, a multiple of 16 for FLYDSL.
        freqs: fp32 `[max_pos, 64]` or complex64 `[max_pos, 32]`.
        positions: int32 or int64 `[T]`; one outside the table reads row 0.
        layout: an `IndexQueryLayout` or its name.

    Returns:
        PACKED: payload int8 `[T * H, 64]`, scale int32 `[T * H]`. FLYDSL: payload int8 `[T, H, 64]`, scale uint8
        `[T, 1, 4, 16, 4]` by group, head % 16 and head // 16, zero for heads past H.

    Raises:
        ValueError, TypeError: bad shapes, strides or dtypes.

    The rotated values are rounded to bf16; there is no norm. A NaN or Inf makes its group of 32 exponent 255, codes 0.

    Semantics: sglang's index-query rope and pack kernels, DeepSeek-V4.1.
    """
    query, freqs, positions, layout = _check_query(query, freqs, positions, layout)
    return torch.ops.latentkv.pack_index_query(query, freqs, positions, layout.value)


def pack_index_query_weights(
    query: Tensor,
    freqs: Tensor,
    positions: Tensor,
    partials: Tensor,
    scale: float,
    *,
    layout: IndexQueryLayout | str,
    weights_dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor, Tensor]:
    """`pack_index_query` and the head weights, in one launch.

    Args:
        query: bf16 `[T, H, 128]` or `[T, H * 128]`, last stride 1; up to 64 heads, a multiple of 16 for FLYDSL.
        freqs: fp32 `[max_pos, 64]` or complex64 `[max_pos, 32]`.
        positions: int32 or int64 `[T]`; one outside the table reads row 0.
        partials: fp32 `[splits, T, H]`, last stride 1: partial sums of the head weights, at least one.
        scale: factor of the weights, rounded to fp32; `128**-0.5 * H**-0.5` in DeepSeek-V4.1.
        layout: an `IndexQueryLayout` or its name.
        weights_dtype: bf16, or fp32 for the same bf16-rounded weights widened.

    Returns:
        payload and scale as `pack_index_query` returns them, and weights `[T, H]`: the partials added left to right in
        fp32, rounded to bf16, times `scale`, rounded to bf16.

    Raises:
        ValueError, TypeError: bad shapes, strides or dtypes.

    Semantics: sglang's `index_q_rope_pack_weights`, DeepSeek-V4.1.
    """
    query, freqs, positions, layout = _check_query(query, freqs, positions, layout)
    shape = ("splits", query.shape[0], query.shape[1])
    partials = checks.tensor("partials", partials, shape, (torch.float32,), query.device)
    if partials.shape[0] == 0:
        raise ValueError("partials: no partial sums given, at least one needed")
    if weights_dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"weights_dtype: {weights_dtype} given, bfloat16 or float32 accepted")
    return torch.ops.latentkv.pack_index_query_weights(
        query, freqs, positions, partials, checks.fp32("scale", scale), layout.value, weights_dtype
    )


def _check_query(
    query: Tensor, freqs: Tensor, positions: Tensor, layout: IndexQueryLayout | str
) -> tuple[Tensor, Tensor, Tensor, IndexQueryLayout]:
    layout = IndexQueryLayout.parse(layout)
    if isinstance(query, Tensor) and query.dim() == 2 and query.shape[1] % INDEX_DIM == 0:
        query = query.unflatten(1, (query.shape[1] // INDEX_DIM, INDEX_DIM))
    query = checks.tensor("query", query, ("T", "H", INDEX_DIM), (torch.bfloat16,))
    heads = query.shape[1]
    tile = HEAD_TILE if layout is IndexQueryLayout.FLYDSL else 1
    if not 0 < heads <= MAX_INDEX_HEADS or heads % tile:
        unit = f"a multiple of {tile} " if tile > 1 else "1 "
        raise ValueError(f"query: {heads} heads given, {unit}up to {MAX_INDEX_HEADS} accepted by {layout.value}")
    freqs = checks.freqs(freqs, query.device)
    positions = checks.positions(positions, query.shape[0], query.device, freqs)
    return query, freqs, positions, layout


def check_cache(cache: object, device: torch.device | None = None) -> IndexKeyCache:
    """Check that this is a cache of index keys, on the call's device."""
    if not isinstance(cache, IndexKeyCache):
        raise TypeError(f"cache: {type(cache).__name__} given, an IndexKeyCache needed (new_index_key_cache makes one)")
    if device is not None:
        checks.same_device(device, cache=cache.payload)
    return cache


def _form(cache: IndexKeyCache) -> tuple[str, int]:
    return cache.layout.value, cache.page_size


def _fake_load(
    payload: Tensor, scale: Tensor | None, slots: Tensor, layout: str, page_size: int
) -> tuple[Tensor, Tensor]:
    rows = payload.new_empty((slots.shape[0], INDEX_PAYLOAD_BYTES), dtype=torch.int8)
    return rows, payload.new_empty((slots.shape[0],), dtype=torch.int32)


def _fake_query(query: Tensor, freqs: Tensor, positions: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    tokens, heads = query.shape[:2]
    if layout == IndexQueryLayout.PACKED.value:
        payload = query.new_empty((tokens * heads, INDEX_PAYLOAD_BYTES), dtype=torch.int8)
        return payload, query.new_empty((tokens * heads,), dtype=torch.int32)
    payload = query.new_empty((tokens, heads, INDEX_PAYLOAD_BYTES), dtype=torch.int8)
    return payload, query.new_empty((tokens, *reference.FLYDSL_SCALE_SHAPE), dtype=torch.uint8)


def _fake_query_weights(
    query: Tensor,
    freqs: Tensor,
    positions: Tensor,
    partials: Tensor,
    weight_scale: float,
    layout: str,
    weights_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    weights = query.new_empty(tuple(query.shape[:2]), dtype=weights_dtype)
    return (*_fake_query(query, freqs, positions, layout), weights)


define(
    "index",
    "store_index_key(Tensor values, Tensor weight, Tensor(a!) payload, Tensor(b!)? scale, Tensor slots, "
    "Tensor positions, Tensor freqs, float eps, int ratio, str layout, int page_size) -> ()",
    reference.store_index_key,
    lambda *args: None,
    kernel="store_index_key",
)
define(
    "index",
    "store_index_key_plain(Tensor values, Tensor(a!) payload, Tensor(b!)? scale, Tensor slots, bool round_half_even, "
    "str layout, int page_size) -> ()",
    reference.store_index_key_plain,
    lambda *args: None,
    kernel="store_index_key_plain",
)
define(
    "index",
    "load_index_key(Tensor payload, Tensor? scale, Tensor slots, str layout, int page_size) -> (Tensor, Tensor)",
    reference.load_index_key,
    _fake_load,
    kernel="load_index_key",
)
define(
    "index",
    "dequantize_index(Tensor payload, Tensor scale) -> Tensor",
    numerics.dequantize_index,
    lambda payload, scale: payload.new_empty((*payload.shape[:-1], INDEX_DIM), dtype=torch.float32),
    kernel="dequantize_index",
)
define(
    "index",
    "pack_index_query(Tensor query, Tensor freqs, Tensor positions, str layout) -> (Tensor, Tensor)",
    reference.pack_index_query,
    _fake_query,
    kernel="pack_index_query",
)
define(
    "index",
    "pack_index_query_weights(Tensor query, Tensor freqs, Tensor positions, Tensor partials, float weight_scale, "
    "str layout, ScalarType weights_dtype) -> (Tensor, Tensor, Tensor)",
    reference.pack_index_query_weights,
    _fake_query_weights,
    kernel="pack_index_query_weights",
)
