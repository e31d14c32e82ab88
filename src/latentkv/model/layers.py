"""The pieces of a layer that have no cache: hyper-connection, feed-forward experts, rounding rules of a projection.

Both forwards use them, the paged one on rows of many requests and the dense one on whole sequences; all work on rows
`[n, ...]` and are differentiable.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from latentkv import numerics


def project(x: Tensor, weight: Tensor, math: torch.dtype = torch.float64) -> Tensor:
    """A bias-free linear layer of bf16 operands, rounded once to bf16.

    Args:
        x: bf16 `[..., in]`.
        weight: `[out, in]`, of bf16 values in any dtype.
        math: dtype of the matrix product. fp64 sums round to the same bf16 in whatever order a library takes them, so
            a row does not depend on its batch; bf16 leaves the accumulation to the device.
    """
    return F.linear(x.to(math), weight.to(math)).to(torch.bfloat16)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm in fp32, rounded to bf16."""
    return numerics.rms_norm(x, weight, eps).to(torch.bfloat16)


# --- hyper-connection (spec/model.md 2.1) -----------------------------------------------------------------------------


def hc_mix(
    residual: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
    steps: int,
    math: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    """The mixing coefficients that a sublayer derives from the streams.

    Args:
        residual: bf16 `[n, S, d]`.
        fn: `[2 S + S^2, S d]`.
        scale: fp32 `[3]`, for reading, writing and mixing.
        base: fp32 `[2 S + S^2]`.
        norm_eps: floor of the mean square.
        hc_eps: floor of the coefficients and of the Sinkhorn sums.
        steps: Sinkhorn iterations.
        math: dtype up to the sigmoids; fp64 keeps a row independent of its batch, as in `project`.

    Returns:
        read `[n, S]` for the *next* sublayer, write `[n, S]` and mix `[n, S, S]` (from, to), all fp32.
    """
    streams = residual.shape[1]
    x = residual.flatten(1).to(math)
    m = F.linear(x, fn.to(math)) * (x.square().mean(-1, keepdim=True) + norm_eps).rsqrt()
    scale, base = scale.to(math), base.to(math)
    read, write, mix = m.split((streams, streams, streams * streams), dim=-1)
    read = torch.sigmoid(read * scale[0] + base[:streams]) + hc_eps
    write = 2.0 * torch.sigmoid(write * scale[1] + base[streams : 2 * streams])
    mix = (mix * scale[2] + base[2 * streams :]).to(torch.float32).unflatten(-1, (streams, streams))
    return read.to(torch.float32), write.to(torch.float32), sinkhorn(mix, eps=hc_eps, steps=steps)


def sinkhorn(mix: Tensor, *, eps: float, steps: int) -> Tensor:
    """Make `[n, S, S]` logits nearly doubly stochastic: softmax over rows, then column and row sums in turn."""
    mix = mix.softmax(-1) + eps
    mix = mix / (mix.sum(-2, keepdim=True) + eps)
    for _ in range(steps - 1):
        mix = mix / (mix.sum(-1, keepdim=True) + eps)
        mix = mix / (mix.sum(-2, keepdim=True) + eps)
    return mix


def hc_read(residual: Tensor, read: Tensor) -> Tensor:
    """bf16 `[n, d]`: the streams' sum weighted by `read`, which the previous sublayer handed over."""
    return (read.unsqueeze(-1) * residual.to(torch.float32)).sum(1).to(torch.bfloat16)


def hc_write(residual: Tensor, y: Tensor, write: Tensor, mix: Tensor) -> Tensor:
    """bf16 `[n, S, d]`: the mixed streams plus a sublayer's output `y` `[n, d]`."""
    mixed = (mix.unsqueeze(-1) * residual.to(torch.float32).unsqueeze(2)).sum(1)
    return (write.unsqueeze(-1) * y.to(torch.float32).unsqueeze(1) + mixed).to(torch.bfloat16)


# --- experts ----------------------------------------------------------------------------------------------------------


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """fp32 `silu(gate) * up`, the gate clamped above and `up` on both sides."""
    gate, up = gate.to(torch.float32).clamp(max=limit), up.to(torch.float32).clamp(-limit, limit)
    return F.silu(gate) * up


def experts(
    x: Tensor,
    route: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    *,
    limit: float,
    math: torch.dtype = torch.float64,
) -> Tensor:
    """Every expert on every row, weighted before the down projection; unpicked experts weigh zero.

    Eight experts of width 32 cost less in one product than a gather per row would. The shared expert is the last one,
    of weight 1.

    Args:
        x: bf16 `[n, d]`.
        route: fp32 `[n, E]`, the weight of each expert.
        gate: `[E, width, d]`; `up` is alike.
        up: see `gate`.
        down: `[E, d, width]`.
        limit: clamp of the activations.
        math: dtype of the matrix products.

    Returns:
        bf16 `[n, d]`, the sum over experts rounded once.
    """
    count, width, _ = gate.shape
    hidden = swiglu(project(x, gate.flatten(0, 1), math), project(x, up.flatten(0, 1), math), limit)
    hidden = (hidden.unflatten(-1, (count, width)) * route.unsqueeze(-1)).to(torch.bfloat16).flatten(1)
    return project(hidden, down.permute(1, 0, 2).flatten(1), math)


def with_shared(routed: Tensor, shared: Tensor) -> Tensor:
    """Append the shared expert's weight to the routed experts' `[E, ...]`."""
    return torch.cat((routed, shared.unsqueeze(0)))
