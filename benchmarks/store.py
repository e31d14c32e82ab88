"""Stage `store`: `store_kv`, `norm_rope_store_kv` and `load_kv` at decode and prefill sizes.

Pages of 256 rows in random order, slots random and distinct, rows bf16, slots and positions int64. Bytes that an op
must move for each row, R being the layout's bytes of a row and S of its scales (V4's closing zero byte is written but
need not be read):

    store_kv            1024 read (row) + 8 read (slot) + R written
    norm_rope_store_kv  the same + 8 read (position) + 256 read (64 fp32 of the rotation table); the norm's weight, 1024
                        bytes a call, once
    load_kv             R read (less the padding byte) + 8 read (slot) + 1024 written

Peers: `eager`, this library's reference run by PyTorch on the same device; `compiled`, the reference quantizer (or its
inverse) alone under `torch.compile`, without norm, rotation and paging, so that it does less than the op beside it;
`sglang`, the kernel that its engine launches for the layout.
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
from latentkv.reference import store as reference

SIZES = (1, 16, 64, 256, 1536, 8192, 65536)
MAIN_LAYOUTS = (lk.KVLayout.V41, lk.KVLayout.V41_FP4)  # measured at every size, the others at the largest
PEER_SIZES = (256, 65536)
PAGE = 256
TABLE_POSITIONS = 65536
EPS = 1e-20
ROW_BYTES = 2 * LATENT_DIM
SLOT_BYTES = 8
ANGLE_BYTES = 4 * ROPE_DIM


def cases(sizes: Sequence[int] | None = None) -> list[Case]:
    """Every case; `sizes` replaces `SIZES`."""
    sizes = tuple(sizes or SIZES)
    found = []
    for make in (_store_case, _norm_case, _load_case):
        for layout in lk.KVLayout.members():
            found += [make(layout, size) for size in (sizes if layout in MAIN_LAYOUTS else sizes[-1:])]
    return found


def _store_case(layout: lk.KVLayout, size: int) -> Case:
    def build(device: torch.device, seed: int) -> Callable[[], object]:
        rows, cache, slots = _inputs(layout, size, device, seed)
        return lambda: lk.store_kv(rows, cache, slots, layout=layout, page_size=PAGE)

    def eager(device: torch.device, seed: int) -> Callable[[], object]:
        rows, cache, slots = _inputs(layout, size, device, seed)
        return lambda: reference.store_kv(rows, cache, slots, layout.name, PAGE, None)

    def sglang(device: torch.device, seed: int) -> Callable[[], object]:
        from sglang.kernels.ops.attention.dsv4.attn import fused_store_cache

        rows, cache, slots = _inputs(layout, size, device, seed)
        more = {} if layout == lk.KVLayout.V4 else {"layout": layout.name}
        return lambda: fused_store_cache(rows, cache, slots, page_size=PAGE, type="flashmla", **more)

    moved = size * (ROW_BYTES + SLOT_BYTES + layout.row_bytes)
    peers = [Peer("eager", eager, graph=False), Peer("sglang", _for_sglang(layout, sglang))]
    if size == max(PEER_SIZES):
        peers.append(Peer("compiled", _compiled_quantizer(layout, size)))
    return Case("store_kv", str(layout), size, "rows", moved, build, peers=_peers(layout, size, peers))


def _norm_case(layout: lk.KVLayout, size: int) -> Case:
    def build(device: torch.device, seed: int) -> Callable[[], object]:
        rows, cache, slots = _inputs(layout, size, device, seed)
        weight, positions, freqs = _norm_inputs(size, device, seed)
        form: dict[str, Any] = {"eps": EPS, "layout": layout, "page_size": PAGE}
        return lambda: lk.norm_rope_store_kv(rows, weight, cache, slots, positions, freqs, **form)

    def eager(device: torch.device, seed: int) -> Callable[[], object]:
        rows, cache, slots = _inputs(layout, size, device, seed)
        weight, positions, freqs = _norm_inputs(size, device, seed)
        arguments = (rows, weight, cache, slots, positions, freqs, EPS, layout.name, PAGE, None)
        return lambda: reference.norm_rope_store_kv(*arguments)

    def sglang(device: torch.device, seed: int) -> Callable[[], object]:
        from sglang.kernels.ops.attention.dsv4.elementwise import fused_k_norm_rope_flashmla

        rows, cache, slots = _inputs(layout, size, device, seed)
        weight, positions, freqs = _norm_inputs(size, device, seed)
        angles = torch.view_as_complex(freqs.unflatten(1, (-1, 2)))
        arguments = (rows, weight, EPS, angles, positions, slots.int(), cache, PAGE, layout.name)
        return lambda: fused_k_norm_rope_flashmla(*arguments)

    moved = size * (ROW_BYTES + 2 * SLOT_BYTES + ANGLE_BYTES + layout.row_bytes) + 2 * LATENT_DIM
    peers = [Peer("eager", eager, graph=False), Peer("sglang", _for_sglang(layout, sglang))]
    return Case("norm_rope_store_kv", str(layout), size, "rows", moved, build, peers=_peers(layout, size, peers))


def _load_case(layout: lk.KVLayout, size: int) -> Case:
    def build(device: torch.device, seed: int) -> Callable[[], object]:
        out, cache, slots = _filled(layout, size, device, seed)
        return lambda: lk.load_kv(cache, slots, layout=layout, page_size=PAGE, out=out)

    def eager(device: torch.device, seed: int) -> Callable[[], object]:
        out, cache, slots = _filled(layout, size, device, seed)
        return lambda: reference.load_kv(cache, slots, layout.name, PAGE, out)

    def sglang(device: torch.device, seed: int) -> Callable[[], object]:
        from sglang.kernels.ops.attention.dsv4.dequant_k_cache import dequantize_k_cache_paged

        out, cache, slots = _filled(layout, size, device, seed)
        out = out.unsqueeze(1)
        return lambda: dequantize_k_cache_paged(cache, slots, page_size=PAGE, out=out, layout=layout.name)

    moved = size * (layout.row_bytes - layout.scale_pad + SLOT_BYTES + ROW_BYTES)
    peers = [Peer("eager", eager, graph=False), Peer("sglang", _for_sglang(layout, sglang))]
    if size == max(PEER_SIZES):
        peers.append(Peer("compiled", _compiled_reader(layout, size)))
    return Case("load_kv", str(layout), size, "rows", moved, build, peers=_peers(layout, size, peers))


# --- inputs -----------------------------------------------------------------------------------------------------------


def _inputs(layout: lk.KVLayout, size: int, device: torch.device, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, a cache of twice as many slots, and distinct random slots."""
    generator = torch.Generator(device).manual_seed(seed)
    rows = torch.randn(size, LATENT_DIM, device=device, generator=generator).bfloat16()
    pages = max(2, -(-2 * size // PAGE))
    cache = lk.new_kv_cache(layout, pages, PAGE, device=device)
    slots = torch.randperm(pages * PAGE, device=device, generator=generator)[:size].contiguous()
    return rows, cache, slots


def _norm_inputs(size: int, device: torch.device, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Weight, random positions, and the rotation table, one for all sets."""
    generator = torch.Generator(device).manual_seed(seed)
    if device not in _tables:
        _tables[device] = yarn_freqs(TABLE_POSITIONS, theta=10000.0).to(device)
    weight = torch.ones(LATENT_DIM, device=device, dtype=torch.bfloat16)
    positions = torch.randint(0, TABLE_POSITIONS, (size,), device=device, generator=generator)
    return weight, positions, _tables[device]


_tables: dict[torch.device, Tensor] = {}


def _filled(layout: lk.KVLayout, size: int, device: torch.device, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """An output, a cache whose random slots hold random rows, and those slots."""
    rows, cache, slots = _inputs(layout, size, device, seed)
    lk.store_kv(rows, cache, slots, layout=layout, page_size=PAGE)
    return rows, cache, slots


# --- peers ------------------------------------------------------------------------------------------------------------


def _peers(layout: lk.KVLayout, size: int, peers: list[Peer]) -> tuple[Peer, ...]:
    return tuple(peers) if layout in MAIN_LAYOUTS and size in PEER_SIZES else ()


def _compiled_quantizer(layout: lk.KVLayout, size: int) -> Callable[..., Callable[[], object]]:
    def build(device: torch.device, seed: int) -> Callable[[], object]:
        _needs_gpu(device)
        rows, _, _ = _inputs(layout, size, device, seed)
        quantize = torch.compile(lambda rows: reference.encode_rows(rows.float(), layout), dynamic=False)
        return lambda: quantize(rows)

    return build


def _compiled_reader(layout: lk.KVLayout, size: int) -> Callable[..., Callable[[], object]]:
    def build(device: torch.device, seed: int) -> Callable[[], object]:
        _needs_gpu(device)
        rows, _, _ = _inputs(layout, size, device, seed)
        data, scales = reference.encode_rows(rows.float(), layout)
        read = torch.compile(lambda data, scales: reference.decode_rows(data, scales, layout).bfloat16(), dynamic=False)
        return lambda: read(data, scales)

    return build


def _needs_gpu(device: torch.device) -> None:
    if device.type != "cuda":
        raise NotImplementedError("compiled on a GPU only")


def _for_sglang(layout: lk.KVLayout, build: Callable[..., Any]) -> Callable[..., Callable[[], object]]:
    def checked(device: torch.device, seed: int) -> Callable[[], object]:
        try:
            return build(device, seed)
        except ImportError as error:
            raise NotImplementedError(f"sglang has no kernel for {layout} here ({error})") from error

    return checked
