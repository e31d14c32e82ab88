"""Stage `route`: router logits, partials, the gate, and both together, at decode and prefill sizes.

Bytes that an op must move, M rows of K bf16 values, N experts, w bytes a weight, P = K / 512 partials:

    router_logits, linear_fp32   2 M K + w N K + 4 M N
    router_partials              2 M K + w N K + 4 P M N
    route_topk                   4 M N + 4 N (bias) + 8 M k
    route_topk after partials    2 M K + w N K + 4 N + 8 M k, both launches; what lies between is this library's choice

Peers. `cublas`: PyTorch's matrix product of the same bf16 operands with a bf16 result (fp32 weights: of fp32 operands);
its bits follow the batch. `cublas fp32`: the same with an fp32 result, where this PyTorch has `out_dtype`. `eager`:
this library's reference run by PyTorch on the same device. `in two steps`: `router_logits`, then `route_topk`, in one
graph; the sum of the two measured apart is the sum of their rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import latentkv as lk
from latentkv.bench import Case, Peer
from latentkv.reference import route as reference

WIDTH, EXPERTS = 5120, 384
SIZES = (1, 16, 64, 1536, 8192)
GATE_SIZES = (1, 64, 256, 1536, 8192)
FUSED_SIZES = (1, 64)
FP32_SIZES = (1, 8, 1536)
OTHER_SHAPES = ((4096, 256), (7168, 384))
PICKS = 6


def cases(sizes: Sequence[int] | None = None) -> list[Case]:
    """Every case; `sizes` replaces all sizes."""
    found = [_logits_case(size, WIDTH, EXPERTS, torch.bfloat16) for size in sizes or SIZES]
    found += [_gate_case(size) for size in sizes or GATE_SIZES]
    found += [_fused_case(size) for size in sizes or FUSED_SIZES]
    found += [_partials_case(size) for size in sizes or FUSED_SIZES]
    found += [_logits_case(size, WIDTH, EXPERTS, torch.float32) for size in sizes or FP32_SIZES]
    found += [_logits_case(size, *shape, torch.bfloat16) for shape in OTHER_SHAPES for size in sizes or (1, 64)]
    return found


def _logits_case(size: int, width: int, experts: int, dtype: torch.dtype) -> Case:
    def build(device: torch.device, seed: int) -> Callable[[], object]:
        x, w = _operands(size, width, experts, dtype, device, seed)
        return lambda: lk.router_logits(x, w)

    def cublas(device: torch.device, seed: int) -> Callable[[], object]:
        x, w = _operands(size, width, experts, dtype, device, seed)
        x, transposed = x.to(dtype), w.T
        return lambda: torch.mm(x, transposed)

    def cublas_fp32(device: torch.device, seed: int) -> Callable[[], object]:
        x, w = _operands(size, width, experts, dtype, device, seed)
        transposed = w.T
        try:
            torch.mm(x, transposed, out_dtype=torch.float32)
        except (TypeError, RuntimeError) as error:
            raise NotImplementedError(f"torch.mm without out_dtype ({error})") from error
        return lambda: torch.mm(x, transposed, out_dtype=torch.float32)

    name = "bf16" if dtype == torch.bfloat16 else "fp32"
    peers: tuple[Peer, ...] = (Peer("cublas", cublas),)
    if dtype == torch.bfloat16:
        peers += (Peer("cublas fp32", cublas_fp32),)
    moved = _read(size, width, experts, dtype) + 4 * size * experts
    flops = 2 * size * width * experts
    return Case("router_logits", f"{width}x{experts} {name}", size, "rows", moved, build, flops=flops, peers=peers)


def _partials_case(size: int) -> Case:
    def build(device: torch.device, seed: int) -> Callable[[], object]:
        x, w = _operands(size, WIDTH, EXPERTS, torch.bfloat16, device, seed)
        return lambda: lk.router_partials(x, w)

    moved = _read(size, WIDTH, EXPERTS, torch.bfloat16) + 4 * size * EXPERTS * WIDTH // reference.CHUNK
    return Case("router_partials", f"{WIDTH}x{EXPERTS} bf16", size, "rows", moved, build)


def _gate_case(size: int) -> Case:
    def build(device: torch.device, seed: int) -> Callable[[], object]:
        logits, bias = _logits(size, device, seed)
        return lambda: lk.route_topk(logits, bias, k=PICKS)

    def eager(device: torch.device, seed: int) -> Callable[[], object]:
        logits, bias = _logits(size, device, seed)
        return lambda: reference.route_topk(logits, bias, None, PICKS, True, 1.0, 0, "index", "log2")

    peers = (Peer("eager", eager, graph=False),) if size in (256, 8192) else ()
    moved = 4 * size * EXPERTS + 4 * EXPERTS + 8 * size * PICKS
    return Case("route_topk", f"top-{PICKS} of {EXPERTS}", size, "rows", moved, build, peers=peers)


def _fused_case(size: int) -> Case:
    def build(device: torch.device, seed: int) -> Callable[[], object]:
        x, w = _operands(size, WIDTH, EXPERTS, torch.bfloat16, device, seed)
        bias = _logits(1, device, seed)[1]
        return lambda: lk.route_topk(None, bias, k=PICKS, partials=lk.router_partials(x, w))

    def apart(device: torch.device, seed: int) -> Callable[[], object]:
        x, w = _operands(size, WIDTH, EXPERTS, torch.bfloat16, device, seed)
        bias = _logits(1, device, seed)[1]
        return lambda: lk.route_topk(lk.router_logits(x, w), bias, k=PICKS)

    moved = _read(size, WIDTH, EXPERTS, torch.bfloat16) + 4 * EXPERTS + 8 * size * PICKS
    name = f"top-{PICKS} of {EXPERTS} after partials"
    return Case("route_topk", name, size, "rows", moved, build, peers=(Peer("in two steps", apart),))


# --- inputs -----------------------------------------------------------------------------------------------------------


def _read(size: int, width: int, experts: int, dtype: torch.dtype) -> int:
    return 2 * size * width + dtype.itemsize * experts * width


def _operands(
    size: int, width: int, experts: int, dtype: torch.dtype, device: torch.device, seed: int
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(size, width, device=device, generator=generator).bfloat16()
    return x, (torch.randn(experts, width, device=device, generator=generator) * width**-0.5).to(dtype)


def _logits(size: int, device: torch.device, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(seed)
    logits = torch.randn(size, EXPERTS, device=device, generator=generator)
    return logits, torch.randn(EXPERTS, device=device, generator=generator) * 0.1
