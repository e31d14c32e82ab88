"""Stage `route`: batch-invariant router logits and the sqrtsoftplus top-k gate."""

from __future__ import annotations

import torch
from torch import Tensor

from latentkv.ops import checks
from latentkv.ops._library import define
from latentkv.reference import route as reference

MAX_PICKS = 16
LANE64_EXPERTS = 384  # what the network of lane64 orders: six experts a lane
WEIGHT_DTYPES = (torch.bfloat16, torch.float32)


def linear_fp32(x: Tensor, w: Tensor) -> Tensor:
    """Linear layer of bf16 operands with fp32 accumulation and output, never rounded through bf16 on the way.

    Args:
        x: bf16 `[M, K]`, last stride 1.
        w: bf16 or fp32 `[N, K]`, last stride 1; fp32 weights keep fp32 products.

    Returns:
        fp32 `[M, N]`; a row's bits do not depend on the other rows.

    Raises:
        ValueError, TypeError: bad shapes, strides or dtypes.

    The CPU adds exact products in fp64 and rounds once. A GPU adds in fp32, 512 columns at a time: it is within 2^-19
    of the sum of the products' magnitudes, as long as fp32 weights are 0 or above 2^-110. Smaller ones lose bits there,
    and a subnormal one counts as 0.

    Semantics: the compressor's and the router's projections of DeepSeek-V4.1.
    """
    return torch.ops.latentkv.linear_fp32(*_operands(x, w))


def router_partials(x: Tensor, w: Tensor) -> Tensor:
    """Router logits in partial sums over 512 columns each, for a gate that sums them.

    Args:
        x: bf16 `[M, K]`, last stride 1.
        w: bf16 or fp32 `[N, K]`, last stride 1; fp32 weights keep fp32 products.

    Returns:
        fp32 `[ceil(K / 512), M, N]`; a row's bits do not depend on M or on where the row stands.

    Raises:
        ValueError, TypeError: bad shapes, strides or dtypes.

    Each is as exact as `linear_fp32`. Semantics: sglang's `rocm_router_gemv_split_k`, for any number of rows.
    """
    return torch.ops.latentkv.router_partials(*_operands(x, w))


def router_logits(x: Tensor, w: Tensor) -> Tensor:
    """Batch-invariant router logits: the partials of `router_partials` summed in order.

    Args:
        x: bf16 `[M, K]`, last stride 1.
        w: bf16 or fp32 `[N, K]`, last stride 1.

    Returns:
        fp32 `[M, N]`; a row's bits do not depend on M or on where the row stands.

    Raises:
        ValueError, TypeError: bad shapes, strides or dtypes.

    They are as exact as `linear_fp32`. Semantics: the router projection of DeepSeek-V4.1.
    """
    return torch.ops.latentkv.router_logits(*_operands(x, w))


def head_weights(x: Tensor, w: Tensor, scale: float) -> Tensor:
    """Index head weights: router partials, their sum rounded to bf16, times a scale, rounded to bf16.

    Args:
        x: bf16 `[M, K]`, last stride 1.
        w: bf16 or fp32 `[N, K]`, last stride 1.
        scale: rounded to fp32; 128^-0.5 * heads^-0.5 in DeepSeek-V4.1.

    Returns:
        bf16 `[M, N]`.

    Raises:
        ValueError, TypeError: bad shapes, strides or dtypes.

    The sum is as exact as `linear_fp32`. Semantics: sglang's `indexer_head_weights`.
    """
    x, w = _operands(x, w)
    return torch.ops.latentkv.head_weights(x, w, checks.fp32("scale", scale))


def route_topk(
    logits: Tensor | None,
    bias: Tensor | None = None,
    *,
    k: int,
    renormalize: bool = True,
    scale: float = 1.0,
    partials: Tensor | None = None,
    num_shared: int = 0,
    tie_order: str = "index",
    softplus: str = "log2",
) -> tuple[Tensor, Tensor]:
    """Pick each token's experts by sqrt(softplus(logit)) + bias and weigh them by the unbiased score.

    Args:
        logits: fp32 or bf16 `[M, N]`. With `partials` it is fp32 and *written*: it receives their in-order sum and must
            not overlap them; or None does not keep it.
        bias: fp32 or bf16 `[N]` correction of the choice, or None.
        k: picks, 1 to 16 and at most N.
        renormalize: divide the weights by their sum (at least 1e-20) before scaling.
        scale: factor of the weights.
        partials: fp32 `[P, M, N]` of `router_partials`, summed instead of reading `logits`.
        num_shared: further columns with ids N, N + 1, ... and weight 1.
        tie_order: "index", the lower id wins; "lane64", aiter's order for 384 experts, bit for bit.
        softplus: "log2" computes log2(1 + 2^(x log2 e)) ln 2; "log1p" keeps the order of very negative logits.

    Returns:
        weights fp32 `[M, k + num_shared]` and ids int32 `[M, k + num_shared]`, in pick order. Ids are distinct and in
        range whatever the logits are; a NaN choice counts as -inf, a NaN score weighs 0, +Inf is the largest number.
        Choices are compared in fp32. Weights are fp64 numbers rounded once, within a unit in the last place; a score
        that is zero in fp32 weighs 0.

    Raises:
        ValueError, TypeError: bad shapes, dtypes or options.
        NotImplementedError: `tie_order="lane64"` with a number of experts other than 384.

    Semantics: DeepSeek-V4.1's noaux_tc gate, aiter's `rocm_router_gate`.
    """
    source = partials if partials is not None else logits
    if source is None:
        raise ValueError("logits: None given, needed unless partials are given")
    if partials is not None:
        partials = checks.tensor("partials", partials, ("P", "M", "N"), (torch.float32,))
        if partials.shape[0] == 0:
            raise ValueError("partials: no partial given")
        if logits is not None:
            logits = checks.output("logits", logits, tuple(partials.shape[1:]), torch.float32, partials.device)
            checks.apart("logits", logits, partials=partials)
    else:
        logits = checks.tensor("logits", logits, ("M", "N"), WEIGHT_DTYPES)
    experts = source.shape[-1]
    if bias is not None:
        bias = checks.tensor("bias", bias, (experts,), WEIGHT_DTYPES, source.device)
    k = checks.integer("k", k, 1, min(MAX_PICKS, experts))
    num_shared = checks.integer("num_shared", num_shared, 0, 2**31 - 1 - experts)
    if tie_order not in ("index", "lane64"):
        raise ValueError(f"tie_order: {tie_order!r} given, 'index' or 'lane64' accepted")
    if tie_order == "lane64" and experts != LANE64_EXPERTS:
        raise NotImplementedError(f"tie_order: lane64 orders {LANE64_EXPERTS} experts, {experts} given; 'index' works")
    if softplus not in ("log2", "log1p"):
        raise ValueError(f"softplus: {softplus!r} given, 'log2' or 'log1p' accepted")
    renormalize, scale = checks.flag("renormalize", renormalize), checks.fp32("scale", scale)
    return torch.ops.latentkv.route_topk(logits, bias, partials, k, renormalize, scale, num_shared, tie_order, softplus)


def _operands(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    x = checks.tensor("x", x, ("M", "K"), (torch.bfloat16,))
    return x, checks.tensor("w", w, ("N", x.shape[1]), WEIGHT_DTYPES, x.device)


def _fake_matrix(x: Tensor, w: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], w.shape[0]), dtype=torch.float32)


def _fake_gate(
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
    source = partials if partials is not None else logits
    assert source is not None
    shape = (source.shape[-2], k + num_shared)
    return source.new_empty(shape, dtype=torch.float32), source.new_empty(shape, dtype=torch.int32)


define("route", "linear_fp32(Tensor x, Tensor w) -> Tensor", reference.linear_fp32, _fake_matrix, kernel="linear_fp32")
define(
    "route",
    "router_partials(Tensor x, Tensor w) -> Tensor",
    reference.router_partials,
    lambda x, w: x.new_empty((max(1, -(-x.shape[1] // reference.CHUNK)), x.shape[0], w.shape[0]), dtype=torch.float32),
    kernel="router_partials",
)
define(
    "route",
    "router_logits(Tensor x, Tensor w) -> Tensor",
    reference.router_logits,
    _fake_matrix,
    kernel="router_logits",
)
define(
    "route",
    "head_weights(Tensor x, Tensor w, float scale) -> Tensor",
    reference.head_weights,
    lambda x, w, scale: x.new_empty((x.shape[0], w.shape[0])),
    kernel="head_weights",
)
define(
    "route",
    "route_topk(Tensor(a!)? logits, Tensor? bias, Tensor? partials, int k, bool renormalize, float scale, "
    "int num_shared, str tie_order, str softplus) -> (Tensor, Tensor)",
    reference.route_topk,
    _fake_gate,
    kernel="route_topk",
)
