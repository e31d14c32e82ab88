"""Stage `route` in plain PyTorch: router logits whose bits no batch can change, and the sqrtsoftplus top-k gate."""

from __future__ import annotations

import math

import torch
from torch import Tensor

CHUNK = 512  # columns of x a partial covers
F32 = torch.float32
FLT_MAX = torch.finfo(torch.float32).max
# compare-exchange pairs that order six values, the larger first
LANE_NETWORK = ((0, 1), (2, 3), (4, 5), (0, 2), (1, 4), (3, 5), (0, 1), (2, 3), (4, 5), (1, 2), (3, 4), (2, 3))
LANES = 64


def linear_fp32(x: Tensor, w: Tensor) -> Tensor:
    """x @ w.T with exact products, accumulated in fp64 and rounded once to fp32."""
    return (x.double() @ w.double().T).to(F32)


def router_partials(x: Tensor, w: Tensor) -> Tensor:
    """Each chunk of 512 columns by itself, fp32 `[chunks, M, N]`."""
    chunks = range(0, max(x.shape[1], 1), CHUNK)
    return torch.stack([linear_fp32(x[:, c : c + CHUNK], w[:, c : c + CHUNK]) for c in chunks])


def router_logits(x: Tensor, w: Tensor) -> Tensor:
    """The partials' sum in order."""
    return sum_partials(router_partials(x, w))


def head_weights(x: Tensor, w: Tensor, scale: float) -> Tensor:
    """bf16(bf16(sum of partials) * fp32(scale))."""
    return (router_logits(x, w).to(torch.bfloat16).to(F32) * scale).to(torch.bfloat16)


def sum_partials(partials: Tensor) -> Tensor:
    """fp32 sum over the first dimension, left to right."""
    total = partials[0].clone()
    for partial in partials[1:]:
        total += partial
    return total


def route_topk(
    logits: Tensor | None,
    bias: Tensor | None,
    partials: Tensor | None,
    k: int,
    renormalize: bool,
    scale: float,
    num_shared: int,
    tie_order: str,
    softplus: str,
) -> tuple[Tensor, Tensor]:
    """Score every expert, pick the k best by score plus bias, weigh them by their unbiased scores."""
    if partials is not None:
        total = sum_partials(partials)
        if logits is not None:
            logits.copy_(total)
        logits = total
    assert logits is not None
    logits = logits.to(F32)
    score = gate_scores(logits, softplus)
    choice = score if bias is None else score + bias.to(F32)
    choice = torch.where(torch.isnan(choice), -torch.inf, choice)
    picks = _lane64_order(choice, k) if tie_order == "lane64" else _index_order(choice, k)
    weights = wide_scores(logits.gather(1, picks), score.gather(1, picks))
    factor = torch.full_like(weights[:, :1], scale)
    if renormalize:
        factor = factor / weights.sum(1, keepdim=True).clamp(min=1e-20)
    weights = (weights * factor).to(F32)
    shared = torch.arange(logits.shape[1], logits.shape[1] + num_shared, device=logits.device).expand(len(logits), -1)
    weights = torch.cat((weights, torch.ones_like(shared, dtype=F32)), 1)
    return weights, torch.cat((picks, shared), 1).to(torch.int32)


def gate_scores(logits: Tensor, softplus: str) -> Tensor:
    """sqrt(softplus(logits)), each operation rounded once to fp32; +Inf counts as the largest number, NaN stays.

    fp64 gives functions (the root too) that are correctly rounded, so scores, and with them ties, are the same on every
    device.
    """
    x = torch.where(logits == torch.inf, FLT_MAX, logits)
    if softplus == "log1p":
        soft = torch.log1p(torch.exp(x.double()).to(F32).double()).to(F32)
    else:
        t = torch.exp2((x * math.log2(math.e)).double()).to(F32)
        soft = torch.log2((1.0 + t).double()).to(F32) * math.log(2.0)
    return torch.where(x > 20.0, x, soft).double().sqrt().to(F32)


def wide_scores(logits: Tensor, scores: Tensor) -> Tensor:
    """sqrt(softplus(logits)) in fp64, zero where the fp32 scores are zero or NaN."""
    x = torch.where(logits == torch.inf, FLT_MAX, logits).double()
    wide = torch.where(x > 20.0, x, torch.log1p(torch.exp(x))).sqrt()
    return torch.where((scores > 0), wide, 0.0)


def _index_order(choice: Tensor, k: int) -> Tensor:
    """Picks of the largest choices, the lower id first among equals."""
    return choice.sort(dim=-1, descending=True, stable=True).indices[:, :k]


def _lane64_order(choice: Tensor, k: int) -> Tensor:
    """Picks in the order of 64 lanes that each sort their experts e % 64 by a fixed network and offer the best."""
    rows, experts = choice.shape
    depth = experts // LANES
    values = list(choice.view(rows, depth, LANES).unbind(1))
    ids = list(torch.arange(experts, device=choice.device).view(depth, LANES).expand(rows, -1, -1).unbind(1))
    for a, b in LANE_NETWORK:
        swap = values[a] < values[b]
        values[a], values[b] = torch.where(swap, values[b], values[a]), torch.where(swap, values[a], values[b])
        ids[a], ids[b] = torch.where(swap, ids[b], ids[a]), torch.where(swap, ids[a], ids[b])
    values_by_lane = torch.stack(values, -1)
    ids_by_lane = torch.stack(ids, -1)
    used = torch.zeros(rows, LANES, dtype=torch.long, device=choice.device)
    picks = []
    for _ in range(k):
        head = values_by_lane.gather(2, used.clamp(max=depth - 1).unsqueeze(-1)).squeeze(-1)
        open_lane = used < depth
        best = torch.where(open_lane, head, -torch.inf).amax(-1, keepdim=True)
        lane = ((head == best) & open_lane).to(torch.int8).sort(dim=-1, descending=True, stable=True).indices[:, :1]
        depth_used = used.gather(1, lane)
        picks.append(ids_by_lane[torch.arange(rows, device=choice.device), lane[:, 0], depth_used[:, 0]])
        used = used.scatter(1, lane, depth_used + 1)
    return torch.stack(picks, 1)
