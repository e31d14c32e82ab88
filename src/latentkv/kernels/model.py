"""What the packaged model does between the stages, in Triton: the hyper-connection, norms and gated experts.

These are no public ops: their twins are the functions of `latentkv.model.layers`, which run wherever sums are exact.
In plain PyTorch a sublayer's hyper-connection alone is 130 launches, most of them Sinkhorn iterations on 4 x 4 values.

fp32 throughout, rounded to bf16 where the twins round. The order of a sum depends on the model's dimensions and never
on the batch. Against the twins a bf16 result is at most one step off, and a coefficient 1e-5 of its size.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from latentkv.kernels import device as dev
from latentkv.kernels.launch import DEVICE_VARIANTS, TargetCase, common_options, on_device

BLOCK_VALUES_A_WARP = 512  # 16 a lane of 32: few rows wait for one program, and none spills


def mix(
    residual: Tensor,
    read: Tensor,
    logits: Tensor,
    scale: Tensor,
    base: Tensor,
    weight: Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
    steps: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch `mix_kernel`: twin of `layers.hc_mix` behind its linear layer, and of `layers.norm(layers.hc_read(...))`.

    Args:
        residual: bf16 `[n, S, d]`, contiguous; S is a power of two.
        read: fp32 `[n, S]`, contiguous.
        logits: fp32 `[n, 2 S + S^2]`, contiguous: the linear layer of the residual.
        scale: fp32 `[3]`.
        base: fp32 `[2 S + S^2]`.
        weight: bf16 `[d]`, of the norm.
        norm_eps: floor of both mean squares.
        hc_eps: floor of the coefficients and of the Sinkhorn sums.
        steps: Sinkhorn iterations.

    Returns:
        The sublayer's input bf16 `[n, d]`, then read, write and mix as `layers.hc_mix` returns them.
    """
    rows, streams, width = residual.shape
    x = residual.new_empty(rows, width)
    next_read, write = torch.empty_like(read), torch.empty_like(read)
    mixed = read.new_empty(rows, streams, streams)
    _launch_mix(residual, read, (logits, scale, base, next_read, write, mixed), weight, x, norm_eps, hc_eps, steps)
    return x, next_read, write, mixed


def read_norm(residual: Tensor, read: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Launch `mix_kernel` for the sublayer's input alone: twin of `layers.norm(layers.hc_read(...))`."""
    x = residual.new_empty(residual.shape[0], residual.shape[2])
    _launch_mix(residual, read, (read,) * 6, weight, x, eps, 0.0, 0)
    return x


def _launch_mix(
    residual: Tensor,
    read: Tensor,
    mixing: tuple[Tensor, ...],
    weight: Tensor,
    x: Tensor,
    norm_eps: float,
    hc_eps: float,
    steps: int,
) -> None:
    rows, streams, width = residual.shape
    if rows == 0:
        return
    block = triton.next_power_of_2(width)
    with on_device(residual):
        mix_kernel[(rows,)](
            residual, read, *mixing, weight, x, norm_eps, hc_eps,
            WIDTH=width, BLOCK=block, STREAMS=streams, STEPS=steps,
            num_warps=_warps(streams * block), **_options(residual.device),
        )  # fmt: skip


def write(residual: Tensor, y: Tensor, weights: Tensor, mixed: Tensor) -> Tensor:
    """Launch `write_kernel`: twin of `layers.hc_write`; all contiguous."""
    rows, streams, width = residual.shape
    out = torch.empty_like(residual)
    if rows == 0:
        return out
    block = triton.next_power_of_2(width)
    with on_device(residual):
        write_kernel[(rows,)](
            residual, y, weights, mixed, out,
            WIDTH=width, BLOCK=block, STREAMS=streams, num_warps=_warps(streams * block), **_options(residual.device),
        )  # fmt: skip
    return out


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Launch `norm_kernel`: twin of `layers.norm` on bf16 rows `[n, d]`, last stride 1."""
    rows, width = x.shape
    out = x.new_empty(rows, width)
    if rows == 0:
        return out
    block = triton.next_power_of_2(width)
    with on_device(x):
        norm_kernel[(rows,)](
            x, x.stride(0), weight, out, eps, WIDTH=width, BLOCK=block, num_warps=_warps(block), **_options(x.device)
        )
    return out


def gated(gate_up: Tensor, weights: Tensor, ids: Tensor, *, experts: int, limit: float) -> Tensor:
    """Launch `gated_kernel`: twin of the activation of `layers.experts`.

    Args:
        gate_up: bf16 `[n, 2 E width]`, contiguous: every expert's gate, then every expert's up.
        weights: fp32 `[n, k]`, contiguous, as `route_topk` returns them.
        ids: int32 `[n, k]`, contiguous.
        experts: E, the shared one included.
        limit: clamp of the activations.

    Returns:
        bf16 `[n, E width]`, zero for experts that are not picked.
    """
    rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, columns)
    if rows == 0:
        return out
    block = triton.next_power_of_2(columns)
    with on_device(gate_up):
        gated_kernel[(rows,)](
            gate_up, weights, ids, out, limit,
            COLUMNS=columns, BLOCK=block, WIDTH=columns // experts, PICKS=ids.shape[1],
            num_warps=_warps(block), **_options(gate_up.device),
        )  # fmt: skip
    return out


def _warps(values: int) -> int:
    return max(1, min(16, values // BLOCK_VALUES_A_WARP))


def _options(device: torch.device) -> dict[str, Any]:
    """The device's options without CAST: nothing here is packed."""
    return {name: value for name, value in common_options(device).items() if name != "CAST"}


# --- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit
def mix_kernel(
    residual,
    read,
    logits,
    scale,
    base,
    next_read,
    write,
    mixed,
    weight,
    x,
    norm_eps,
    hc_eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    STREAMS: tl.constexpr,
    STEPS: tl.constexpr,  # 0: the sublayer's input alone
    OVERLAP: tl.constexpr,
):
    """One row: the sublayer's input, and the coefficients of its output and of the next input."""
    dev.begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    stream = tl.arange(0, STREAMS)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    at = residual + (row * STREAMS + stream[:, None]) * WIDTH + column[None, :]
    values = dev.to_fp32(tl.load(at, mask=inside[None, :], other=0.0))
    share = tl.load(read + row * STREAMS + stream)
    norm_weight = dev.to_fp32(tl.load(weight + column, mask=inside, other=0.0))
    taken = dev.to_fp32(dev.to_bf16(tl.sum(values * share[:, None], axis=0)))
    y = _rms_normed(taken, norm_weight, norm_eps, WIDTH)
    tl.store(x + row * WIDTH + column, dev.to_bf16(y), mask=inside)
    if STEPS > 0:
        squares = tl.sum(tl.sum(values * values, axis=1), axis=0)
        inverse = 1.0 / tl.sqrt(squares / (STREAMS * WIDTH) + norm_eps)
        m = logits + row * (2 * STREAMS + STREAMS * STREAMS)
        to_read = tl.load(m + stream) * inverse * tl.load(scale) + tl.load(base + stream)
        tl.store(next_read + row * STREAMS + stream, _sigmoid(to_read) + hc_eps)
        to_write = tl.load(m + STREAMS + stream) * inverse * tl.load(scale + 1) + tl.load(base + STREAMS + stream)
        tl.store(write + row * STREAMS + stream, 2.0 * _sigmoid(to_write))
        cell = stream[:, None] * STREAMS + stream[None, :]
        c = tl.load(m + 2 * STREAMS + cell) * inverse * tl.load(scale + 2) + tl.load(base + 2 * STREAMS + cell)
        c = tl.exp(c - tl.max(c, axis=1)[:, None])
        c = c / tl.sum(c, axis=1)[:, None] + hc_eps
        c = c / (tl.sum(c, axis=0)[None, :] + hc_eps)
        for _ in range(1, STEPS):
            c = c / (tl.sum(c, axis=1)[:, None] + hc_eps)
            c = c / (tl.sum(c, axis=0)[None, :] + hc_eps)
        tl.store(mixed + row * STREAMS * STREAMS + cell, c)


@triton.jit
def write_kernel(
    residual,
    y,
    weights,
    mixed,
    out,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    STREAMS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One row: the mixed streams plus the sublayer's output."""
    dev.begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    stream = tl.arange(0, STREAMS)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    total = tl.zeros((STREAMS, BLOCK), tl.float32)
    for source in tl.static_range(STREAMS):
        values = dev.to_fp32(tl.load(residual + (row * STREAMS + source) * WIDTH + column, mask=inside, other=0.0))
        share = tl.load(mixed + (row * STREAMS + source) * STREAMS + stream)
        total += share[:, None] * values[None, :]
    own = dev.to_fp32(tl.load(y + row * WIDTH + column, mask=inside, other=0.0))
    total += tl.load(weights + row * STREAMS + stream)[:, None] * own[None, :]
    at = out + (row * STREAMS + stream[:, None]) * WIDTH + column[None, :]
    tl.store(at, dev.to_bf16(total), mask=inside[None, :])


@triton.jit
def norm_kernel(x, x_stride, weight, out, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """One row's RMSNorm."""
    dev.begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    values = dev.to_fp32(tl.load(x + row * x_stride + column, mask=inside, other=0.0))
    norm_weight = dev.to_fp32(tl.load(weight + column, mask=inside, other=0.0))
    tl.store(out + row * WIDTH + column, dev.to_bf16(_rms_normed(values, norm_weight, eps, WIDTH)), mask=inside)


@triton.jit
def gated_kernel(
    gate_up,
    weights,
    ids,
    out,
    limit,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    PICKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One row: silu(gate) * up of every expert, weighed by the router."""
    dev.begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < COLUMNS
    gate = dev.to_fp32(tl.load(gate_up + row * 2 * COLUMNS + column, mask=inside, other=0.0))
    up = dev.to_fp32(tl.load(gate_up + (row * 2 + 1) * COLUMNS + column, mask=inside, other=0.0))
    expert = column // WIDTH
    share = tl.zeros((BLOCK,), tl.float32)
    for pick in tl.static_range(PICKS):
        weight = tl.load(weights + row * PICKS + pick)
        share = tl.where(expert == tl.load(ids + row * PICKS + pick), weight, share)
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    tl.store(out + row * COLUMNS + column, dev.to_bf16(gate * _sigmoid(gate) * up * share), mask=inside)


@triton.jit
def _rms_normed(values, weight, eps, WIDTH: tl.constexpr):
    """RMSNorm of one row whose values past WIDTH are zero."""
    return values * (1.0 / tl.sqrt(tl.sum(values * values, axis=0) / WIDTH + eps)) * weight


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


# --- what is compiled offline -----------------------------------------------------------------------------------------

_POINTERS = {
    **dict.fromkeys(("residual", "weight", "x", "y", "out", "gate_up"), "*bf16"),
    **dict.fromkeys(("read", "logits", "scale", "base", "next_read", "write", "mixed", "weights"), "*fp32"),
}


def _cases() -> list[TargetCase]:
    types = {**_POINTERS, "ids": "*i32", "norm_eps": "fp32", "hc_eps": "fp32", "eps": "fp32", "limit": "fp32"}
    streams = {"WIDTH": 256, "BLOCK": 256, "STREAMS": 4}
    variants: tuple[tuple[Any, str, int, dict[str, Any]], ...] = (
        (mix_kernel, "mix", _warps(1024), {**streams, "STEPS": 20}),
        (mix_kernel, "read and norm", _warps(1024), {**streams, "STEPS": 0}),
        (write_kernel, "write", _warps(1024), streams),
        (norm_kernel, "norm", _warps(64), {"WIDTH": 64, "BLOCK": 64}),
        (gated_kernel, "gated", _warps(512), {"COLUMNS": 288, "BLOCK": 512, "WIDTH": 32, "PICKS": 3}),
    )
    cases = []
    for device in DEVICE_VARIANTS:
        for kernel, label, warps, constants in variants:
            constexprs = {**constants, "OVERLAP": device["constexprs"]["OVERLAP"]}
            signature = {name: types.get(name, "i32") for name in kernel.arg_names if name not in constexprs}
            aligned = tuple(name for name, kind in signature.items() if kind.startswith("*") or name == "x_stride")
            cases.append(TargetCase(kernel, label, signature, constexprs, warps, aligned, targets=device["targets"]))
    return cases


TARGET_CASES = _cases()
