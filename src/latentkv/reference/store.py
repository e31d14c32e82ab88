"""Stage `store` in plain PyTorch: norm, rotate, quantize a latent row and write it to its page; read rows back."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from latentkv import numerics
from latentkv.layout import LATENT_DIM, NOPE_DIM, KVLayout

F32 = torch.float32
BF16 = torch.bfloat16


def store_kv(rows: Tensor, cache: Tensor, slots: Tensor, layout: str, page_size: int, freqs: Tensor | None) -> None:
    """Quantize rows and write them; with `freqs`, rotate the tail first and round it to the rows' dtype."""
    values = rows.to(F32)
    if freqs is not None:
        values = rotate_tail(values, freqs, rows.dtype)
    if freqs is not None or rows.dtype != BF16:  # only an untouched bf16 row keeps a NaN's bits
        values = numerics.canonical_nan(values)
    write_rows(values, cache, slots, KVLayout.parse(layout), page_size)


def norm_rope_store_kv(
    rows: Tensor,
    weight: Tensor,
    cache: Tensor,
    slots: Tensor,
    positions: Tensor,
    freqs: Tensor,
    eps: float,
    layout: str,
    page_size: int,
    query: Tensor | None,
) -> None:
    """Norm, rotate at `positions`, quantize and write; rotate the tail of every query head in place."""
    kind = KVLayout.parse(layout)
    angles = numerics.freqs_at(freqs, positions)
    values = numerics.rms_norm(rows, weight, eps)
    if kind == KVLayout.V4:  # V4 quantizes the fp32 values; its bf16 tail is rounded once, when stored
        values = rotate_tail(values, angles, F32)
    else:
        values = rotate_tail(numerics.round_bf16(values), angles, BF16)
    write_rows(numerics.canonical_nan(values), cache, slots, kind, page_size)
    if query is not None:
        tail = query[..., NOPE_DIM:]
        tail.copy_(numerics.rotate(tail.to(F32), angles.unsqueeze(1)).to(BF16))


def load_kv(cache: Tensor, slots: Tensor, layout: str, page_size: int, out: Tensor) -> None:
    """Gather rows as bf16; a slot outside the cache reads zeros."""
    slots = slots.long()  # a capacity may be past int32
    inside = (slots >= 0) & (slots < cache.shape[0] * page_size)
    if cache.shape[0] == 0:
        out.zero_()
        return
    values = read_rows(cache, torch.where(inside, slots, 0), KVLayout.parse(layout), page_size)
    out.copy_(torch.where(inside.unsqueeze(-1), values, 0.0))


def load_kv_pages(cache: Tensor, layout: str, page_size: int) -> Tensor:
    """Every row of every page as bf16 `[num_pages, page_size, 512]`."""
    slots = torch.arange(cache.shape[0] * page_size, device=cache.device)
    return read_rows(cache, slots, KVLayout.parse(layout), page_size).to(BF16).unflatten(0, (-1, page_size))


def rope_fake_quant(x: Tensor, freqs: Tensor, kind: str, positions: Tensor | None, inverse: bool) -> Tensor:
    """Rotate the tail (rounded through bf16), then quantize and dequantize."""
    tokens = x.shape[0]
    angles = freqs if positions is None else numerics.freqs_at(freqs, positions)
    rows = x.reshape(tokens, math.prod(x.shape[1:-1]), x.shape[-1]).to(F32)
    width = freqs.shape[-1]
    tail = numerics.round_bf16(numerics.rotate(rows[..., -width:], angles.unsqueeze(1), inverse=inverse))
    rows = torch.cat((rows[..., :-width], tail), dim=-1)
    quantize = numerics.fake_quant_index if kind == "index" else numerics.fake_quant_latent
    return quantize(rows).to(x.dtype).reshape(x.shape)


# --- shared by the stages that write latents --------------------------------------------------------------------------


def rotate_tail(values: Tensor, angles: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 rows with their last 64 values rotated by one (cos, sin) row each and rounded to `dtype`."""
    tail = numerics.rotate(values[..., NOPE_DIM:], angles).to(dtype).to(F32)
    return torch.cat((values[..., :NOPE_DIM], tail), dim=-1)


def write_rows(
    values: Tensor, cache: Tensor, slots: Tensor, layout: KVLayout, page_size: int, *, first_slot: int = 0
) -> None:
    """Quantize fp32 rows `[n, 512]` and write them to slots in `first_slot ..< capacity`; other rows write nothing."""
    slots = slots.long()  # a capacity may be past int32
    inside = (slots >= first_slot) & (slots < cache.shape[0] * page_size)
    slots, values = slots[inside], values[inside]
    page, offset = slots // page_size, slots % page_size
    for place, encoded in zip(_row_bytes(cache, layout, page_size), encode_rows(values, layout), strict=True):
        place[page, offset] = encoded


def read_rows(cache: Tensor, slots: Tensor, layout: KVLayout, page_size: int) -> Tensor:
    """fp32 rows `[n, 512]` at int64 slots that are all inside the cache."""
    page, offset = slots // page_size, slots % page_size
    data, scales = (place[page, offset] for place in _row_bytes(cache, layout, page_size))
    return decode_rows(data, scales, layout)


def encode_rows(values: Tensor, layout: KVLayout) -> tuple[Tensor, Tensor]:
    """Data bytes `[n, data_bytes]` and scale bytes `[n, scale_bytes]` of fp32 rows `[n, 512]`."""
    head, tail = values[:, : layout.quantized_values], values[:, layout.quantized_values :]
    tail_bytes = numerics.bf16_bytes(tail)
    if layout == KVLayout.BF16:
        return numerics.bf16_bytes(values), tail_bytes
    codes, scales = numerics.quantize(head, layout)
    payload = numerics.pack_nibbles(codes) if layout.element.bits == 4 else codes
    return torch.cat((payload, tail_bytes), -1), torch.nn.functional.pad(scales, (0, layout.scale_pad))


def decode_rows(data: Tensor, scales: Tensor, layout: KVLayout) -> Tensor:
    """fp32 rows `[n, 512]` of data and scale bytes."""
    if layout == KVLayout.BF16:
        return data.contiguous().view(BF16).to(F32).reshape(-1, LATENT_DIM)
    payload, tail = data[:, : layout.payload_bytes], data[:, layout.payload_bytes :]
    codes = numerics.unpack_nibbles(payload) if layout.element.bits == 4 else payload
    values = numerics.dequantize(codes, scales[:, : layout.groups], layout)
    return torch.cat((values, tail.contiguous().view(BF16).to(F32)), -1) if layout.tail_values else values


def _row_bytes(cache: Tensor, layout: KVLayout, page_size: int) -> tuple[Tensor, Tensor]:
    """Views of every row's data bytes `[num_pages, page_size, data_bytes]` and of its scale bytes."""

    def view(in_page: Callable[[int, int], int], size: int) -> Tensor:
        base = in_page(0, page_size)
        step = in_page(1, page_size) - base  # addresses are affine in the offset
        shape = (cache.shape[0], page_size, size)
        return cache.as_strided(shape, (cache.stride(0), step, 1), cache.storage_offset() + base)

    return view(layout.data_in_page, layout.data_bytes), view(layout.scale_in_page, layout.scale_bytes)
