"""Stage `route` in Triton: products of rows with a weight, in chunks of 512 columns whose sums are added in order.

Every path multiplies with the same matrix instruction, walks a chunk in the same order from a fresh accumulator, and
adds chunks from the first to the last, so a row's bits depend on the row and the weight alone. Few rows are spread over
chunks and tiles, and a second launch (or the gate) adds; many rows are one program a tile, which walks all chunks.
"""

# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"
# Triton concatenates tuples and does not unpack them
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from latentkv.kernels import device as dev
from latentkv.kernels import gate
from latentkv.kernels.gate import route_topk
from latentkv.kernels.launch import DEVICE_VARIANTS, TargetCase, common_options, is_hopper, is_rdna, on_device
from latentkv.kernels.store import case_of
from latentkv.reference.route import CHUNK

__all__ = ["TARGET_CASES", "head_weights", "linear_fp32", "route_topk", "router_logits", "router_partials"]

SUMMED = 256  # logits a program of `sum_partials_kernel` adds


@dataclass(frozen=True)
class Tile:
    """What a program of `logits_kernel` takes: rows and columns of the result, the step along a chunk, the launch.

    `more` columns lie beside the first, in a product of their own: a tile need not be a power of two wide.
    """

    rows: int
    columns: int
    step: int
    warps: int
    stages: int
    walk: bool = False
    more: int = 0


INTERPRETED_TILE = Tile(64, 128, 256, 4, 1)  # the interpreter takes as long for small tiles as for large ones


def router_partials(x: Tensor, w: Tensor) -> Tensor:
    """Launch `logits_kernel` over chunks."""
    return _partials(x, w, split_tile(x.shape[0], w.dtype, is_even(x), device_kind(x.device)))


def router_logits(x: Tensor, w: Tensor) -> Tensor:
    """Sum of the partials, in one launch for many rows and in two for few."""
    return _logits(x, w, None)


linear_fp32 = router_logits


def head_weights(x: Tensor, w: Tensor, scale: float) -> Tensor:
    """As `router_logits`, rounded to bf16, scaled, and rounded again."""
    return _logits(x, w, scale)


def _logits(x: Tensor, w: Tensor, scale: float | None, tile: Tile | None = None) -> Tensor:
    count, experts = x.shape[0], w.shape[0]
    dtype = torch.float32 if scale is None else torch.bfloat16
    out = torch.empty(count, experts, dtype=dtype, device=x.device)
    if out.numel() == 0:
        return out
    tile = tile or logits_tile(count, experts, w.dtype, is_even(x), device_kind(x.device))
    if tile.walk:
        _launch(x, w, out, tile, scale)
        return out
    partials = _partials(x, w, tile)
    with on_device(x):
        sum_partials_kernel[(triton.cdiv(out.numel(), SUMMED),)](
            partials,
            out,
            out.numel(),
            0.0 if scale is None else scale,
            PARTIALS=partials.shape[0],
            HEAD=scale is not None,
            BLOCK=SUMMED,
            num_warps=2,
            **common_options(x.device),
        )
    return out


def _partials(x: Tensor, w: Tensor, tile: Tile) -> Tensor:
    chunks = max(1, triton.cdiv(x.shape[1], CHUNK))
    out = torch.empty(chunks, x.shape[0], w.shape[0], dtype=torch.float32, device=x.device)
    if out.numel():
        _launch(x, w, out, tile, None)
    return out


def _launch(x: Tensor, w: Tensor, out: Tensor, tile: Tile, scale: float | None) -> None:
    count, width = x.shape
    experts = w.shape[0]
    chunks = max(1, triton.cdiv(width, CHUNK))
    programs = triton.cdiv(count, tile.rows) * triton.cdiv(experts, tile.columns + tile.more)
    programs *= 1 if tile.walk else chunks
    with on_device(x):
        logits_kernel[(programs,)](
            x,
            x.stride(0),
            w,
            w.stride(0),
            out,
            count,
            experts,
            width,
            chunks,
            0.0 if scale is None else scale,
            WALK=tile.walk,
            EVEN=is_even(x),
            HEAD=scale is not None,
            PREFETCH=bulk_prefetch(x, w) and not tile.walk,
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            MORE=tile.more,
            STEP=tile.step,
            num_warps=tile.warps,
            num_stages=tile.stages,
            **matrix_options(x.device),
            **common_options(x.device),
        )


def device_kind(device: torch.device) -> str:
    """What tells tiles apart: "hopper", "rdna" or anything else."""
    return "hopper" if is_hopper(device) else "rdna" if is_rdna(device) else ""


def is_even(x: Tensor) -> bool:
    """Whether chunks are all full."""
    return x.shape[1] > 0 and x.shape[1] % CHUNK == 0


def bulk_prefetch(x: Tensor, w: Tensor) -> bool:
    """Whether rows of the weight can be fetched into the L2 cache by one instruction a row."""
    if not common_options(x.device)["OVERLAP"]:
        return False
    step = 16 // w.element_size()
    return w.data_ptr() % 16 == 0 and w.stride(0) % step == 0 and is_even(w)


def matrix_options(device: torch.device) -> dict[str, Any]:
    """AMD: the 16-wide matrix instruction for every tile, so that no tile changes the order of a sum."""
    return {"matrix_instr_nonkdim": 16} if device.type == "cuda" and torch.version.hip is not None else {}


def logits_tile(count: int, experts: int, dtype: torch.dtype, even: bool, kind: str) -> Tile:
    """The tile of reduced logits: chunks are spread over programs as long as tiles alone do not fill the device."""
    if count <= (1024 if dtype == torch.bfloat16 else 512):
        return split_tile(count, dtype, even, kind)
    if dev.INTERPRETED:
        return replace(INTERPRETED_TILE, walk=True)
    if dtype == torch.float32 or not even or kind != "hopper":
        return replace(split_tile(count, dtype, even, kind), walk=True)
    if count * experts <= 2048 * 384:
        return Tile(64, 64, 128, 4, 3, walk=True)
    return Tile(128, 64, 64, 8, 4, walk=True)


def split_tile(count: int, dtype: torch.dtype, even: bool, kind: str) -> Tile:
    """The tile of partials.

    A width that is no multiple of 512 takes masks, and an fp32 weight three operands: small tiles hold them. With an
    fp32 weight the step is part of the order of a sum, so it is the same for every number of rows.
    """
    if dev.INTERPRETED:
        return INTERPRETED_TILE
    if kind == "rdna":
        return Tile(64, 32, 32, 4, 2)
    if dtype == torch.float32 or not even:
        return Tile(64, 32, 32, 4, 4) if kind == "hopper" else Tile(64, 32, 32, 8, 2)
    if count <= 64:
        return Tile(64, 64, 64, 4, 8) if kind == "hopper" else Tile(64, 32, 64, 4, 3)
    return Tile(64, 64, 64, 4, 5) if kind == "hopper" else Tile(64, 64, 64, 8, 3)


# --- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["count", "chunks"])
def logits_kernel(
    x,
    x_stride,
    w,
    w_stride,
    out,
    count,
    experts,
    width,
    chunks,
    scale,
    WALK: tl.constexpr,
    EVEN: tl.constexpr,
    HEAD: tl.constexpr,
    PREFETCH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    MORE: tl.constexpr,
    STEP: tl.constexpr,
    CAST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A tile of the products of one chunk (`out` fp32 `[chunks, count, experts]`), or with WALK of all chunks' sum."""
    # bytes of an expert's weight a chunk
    CHUNK_BYTES: tl.constexpr = 512 * w.dtype.element_ty.primitive_bitwidth // 8
    program = tl.program_id(0)
    tiles = tl.cdiv(experts, COLUMNS + MORE)
    column = (program % tiles) * (COLUMNS + MORE)
    rest = program // tiles
    chunk = program * 0
    if not WALK:
        chunk = rest % chunks
        rest = rest // chunks
    row = rest.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < count
    columns = (column + tl.arange(0, COLUMNS),)
    if MORE:
        columns = columns + (column + COLUMNS + tl.arange(0, MORE),)
    w_rows, known = (), ()
    for part in tl.static_range(len(columns)):
        known = known + (columns[part] < experts,)
        w_rows = w_rows + (w + columns[part].to(tl.int64) * w_stride,)
        if PREFETCH:  # reading into the L2 cache is safe before what precedes has finished: it sees later writes
            at = w + tl.where(columns[part] < experts, columns[part], 0).to(tl.int64) * w_stride
            fetch_rows(at + chunk * 512, CHUNK_BYTES)
    dev.begin(OVERLAP)
    x_row = x + row * x_stride
    if WALK:
        # -0, the one start that changes no sum
        totals = filled(-2147483648, ROWS, COLUMNS, MORE)
        # one loop of steps, so that loads run ahead over the end of a chunk
        for n in tl.range(0, chunks, flatten=True):
            products = chunk_products(x_row, live, w_rows, known, n * 512, width, EVEN, ROWS, COLUMNS, MORE, STEP)
            totals = sums(totals, products)
        to = out + row * experts
    else:
        totals = chunk_products(x_row, live, w_rows, known, chunk * 512, width, EVEN, ROWS, COLUMNS, MORE, STEP)
        to = out + (chunk.to(tl.int64) * count + row) * experts
    for part in tl.static_range(len(columns)):
        at = to[:, None] + columns[part][None, :]
        tl.store(at, finished(totals[part], scale, HEAD), mask=live[:, None] & known[part][None, :])


@triton.jit
def filled(BITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, MORE: tl.constexpr):
    """Sums of both parts' columns that start from an fp32 number."""
    first = (dev.bits_float(tl.full([ROWS, COLUMNS], BITS, tl.int32)),)
    if MORE:
        return first + (dev.bits_float(tl.full([ROWS, MORE], BITS, tl.int32)),)
    else:
        return first


@triton.jit
def sums(a, b):
    """Tensors of two tuples added."""
    found = ()
    for part in tl.static_range(len(a)):
        found = found + (a[part] + b[part],)
    return found


@triton.jit
def chunk_products(
    x_row, live, w_rows, known, first, width, EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    MORE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """fp32 `[ROWS, COLUMNS]` and `[ROWS, MORE]` products of 512 columns from `first` on.

    An fp32 weight is the exact sum of three bf16 numbers; the products with the first are added by themselves.
    """
    FP32: tl.constexpr = w_rows[0].dtype.element_ty == tl.float32
    highs = filled(0, ROWS, COLUMNS, MORE)
    lows = filled(0, ROWS, COLUMNS, MORE)
    for step in range(0, 512, STEP):
        k = first + step + tl.arange(0, STEP)
        x_mask = live[:, None]
        if not EVEN:
            x_mask = x_mask & (k < width)[None, :]
        rows = tl.load(x_row[:, None] + k[None, :], mask=x_mask, other=0.0)
        new_highs, new_lows = (), ()
        for part in tl.static_range(len(w_rows)):
            w_mask = known[part][:, None]
            if not EVEN:
                w_mask = w_mask & (k < width)[None, :]
            weights = tl.load(w_rows[part][:, None] + k[None, :], mask=w_mask, other=0.0)
            if FP32:
                first_part, second, third = three_parts(weights)
                # a row's Inf times a part that is zero would be a NaN that the weight does not have
                bits = rows.to(tl.int16, bitcast=True)
                finite = tl.where((bits & 0x7FFF) < 0x7F80, bits, 0).to(tl.bfloat16, bitcast=True)
                new_highs = new_highs + (product(rows, first_part, highs[part]),)
                new_lows = new_lows + (product(finite, third, product(finite, second, lows[part])),)
            else:
                new_highs = new_highs + (product(rows, weights, highs[part]),)
        highs = new_highs
        if FP32:
            lows = new_lows
    return sums(highs, lows) if FP32 else highs


@triton.jit
def product(rows, weights, total):
    """total + rows @ weights.T of bf16 operands; the interpreter multiplies what it widens."""
    if dev.INTERPRETED:
        return tl.dot(dev.to_fp32(rows), tl.trans(dev.to_fp32(weights)), total, input_precision="ieee")
    else:
        return tl.dot(rows, tl.trans(weights), total)


@triton.jit
def three_parts(x):
    """bf16 numbers whose sum is an fp32 number, exactly as long as it is at least 2^-110; of Inf and NaN the first."""
    bits = dev.float_bits(x)
    finite = (bits & 0x7FFFFFFF) < 0x7F800000
    first = bits & -65536
    second = tl.where(finite, x - dev.bits_float(first), 0.0)
    kept = dev.float_bits(second) & -65536
    third = second - dev.bits_float(kept)
    first = tl.where(x == x, first, 0x7FC00000)
    return high_half(first), high_half(kept), high_half(dev.float_bits(third))


@triton.jit
def high_half(bits):
    """The bf16 number in the upper half of fp32 bits."""
    return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def finished(total, scale, HEAD: tl.constexpr):
    """Logits, or the head weights that they are."""
    if HEAD:
        return dev.to_bf16(dev.to_fp32(dev.to_bf16(total)) * scale)
    else:
        return total


@triton.jit
def fetch_rows(at, BYTES: tl.constexpr):
    """Start reading BYTES from each of the addresses into the L2 cache (sm_90 and later)."""
    tl.inline_asm_elementwise(
        "{ cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r",
        [at.to(tl.int64), tl.full(at.shape, BYTES, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=["size"])
def sum_partials_kernel(
    partials,
    out,
    size,
    scale,
    PARTIALS: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK: tl.constexpr,
    CAST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Add BLOCK logits' partials, `size` apart, in order."""
    dev.begin(OVERLAP)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = gate.sum_in_order(partials + at, size, at < size, PARTIALS, PARTIALS, True)
    tl.store(out + at, finished(total, scale, HEAD), mask=at < size)


# --- what is compiled offline -----------------------------------------------------------------------------------------

_TYPES = {"w": "*bf16", "partials": "*fp32", "scale": "fp32", "out": "*fp32"}
_ALIGNED = ("w_stride", "experts", "width")


def _cases() -> list[TargetCase]:
    cases = []
    for variant in DEVICE_VARIANTS:
        amd = variant["targets"][0].startswith("gfx")
        kind = {"sm90": "hopper", "gfx1201": "rdna"}.get(variant["targets"][0], "")
        for dtype, name in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
            tiles: dict[tuple[Tile, bool], str] = {}
            for even, ragged in ((True, ""), (False, ", ragged")):
                tiles.setdefault((split_tile(64, dtype, even, kind), even), f"partials {name}{ragged}")
                tiles.setdefault((split_tile(512, dtype, even, kind), even), f"partials many {name}{ragged}")
                tiles.setdefault((logits_tile(1536, 384, dtype, even, kind), even), f"logits {name}{ragged}")
                tiles.setdefault((logits_tile(8192, 384, dtype, even, kind), even), f"logits many {name}{ragged}")
            for (tile, even), label in tiles.items():
                head = tile.walk and not even
                numbers = {"WALK": tile.walk, "EVEN": even, "HEAD": head, "ROWS": tile.rows, "COLUMNS": tile.columns,
                           "MORE": tile.more, "STEP": tile.step,
                           "PREFETCH": even and not tile.walk and variant["constexprs"]["OVERLAP"]}  # fmt: skip
                types = {**_TYPES, "w": f"*{name}", "out": "*bf16" if head else "*fp32"}
                case = case_of(logits_kernel, label, variant, tile.warps, types, _ALIGNED if even else (), **numbers)
                options = {"num_stages": tile.stages, **({"matrix_instr_nonkdim": 16} if amd else {})}
                cases.append(replace(case, options={**case.options, **options}))
        cases.append(case_of(sum_partials_kernel, "sum", variant, 2, _TYPES, PARTIALS=10, HEAD=False, BLOCK=SUMMED))
        cases += gate.target_cases(variant)
    return cases


TARGET_CASES = _cases()
