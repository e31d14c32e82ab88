"""The dense forward: whole sequences, no pages, fake-quantized rows with straight-through gradients.

It trains the weights that the paged forward runs, and is the oracle that the paged forward is compared with: every
bf16 rounding point and every quantizer stands where the paged path has it. Sequences are `[batch, length]`; rows are
flattened to `[batch * length, ...]` between attention products, so that compiled pieces see one shape.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from latentkv import numerics
from latentkv.layout import INDEX_DIM, LATENT_DIM, ROPE_DIM, KVLayout
from latentkv.model import layers
from latentkv.model.config import Mode, ModelConfig, Role, rope_table
from latentkv.model.weights import Weights

BLOCK = 128  # queries of a block attend keys of their own and the previous block
_MASKED = -1e30  # finite, so that a row with nothing visible has no NaN


@dataclass(frozen=True)
class DenseOptions:
    """How a dense forward rounds and what it computes besides logits.

    Attributes:
        window: layout whose rounding window rows get.
        rows: layout whose rounding compressed rows get.
        math: dtype of the matrix products; fp64 for the oracle, bf16 for training.
        exact_ties: select with the lower index winning ties, instead of letting all of a tie in.
        index_loss: whether to compute the indexer's loss.
        index_topk: overrides the config's count of selected rows.
    """

    window: KVLayout = KVLayout.V41
    rows: KVLayout = KVLayout.V41_FP4
    math: torch.dtype = torch.float64
    exact_ties: bool = True
    index_loss: bool = False
    index_topk: int | None = None


@dataclass
class DenseOutput:
    """Results of a dense forward.

    Attributes:
        logits: fp32 `[batch, length, vocab]`.
        index_loss: mean KL divergence of the indexers' softmax from the attention on compressed rows, summed over index
            sources.
        loads: fp32 `[layers, experts]`, each expert's share of the picks.
        selections: bool `[batch, length, rows]` by index source.
        candidates: bool `[batch, length, rows]`, what the candidate source published.
    """

    logits: Tensor
    index_loss: Tensor
    loads: Tensor
    selections: dict[int, Tensor] = field(default_factory=dict)
    candidates: Tensor | None = None


@dataclass
class _Published:
    """What layers hand to later ones."""

    rows: Tensor | None = None  # [batch, R, 512]
    keys: Tensor | None = None  # [batch, R, 128]
    selection: Tensor | None = None  # bool [batch, length, R]
    candidates: Tensor | None = None


def forward(config: ModelConfig, weights: Weights, tokens: Tensor, options: DenseOptions | None = None) -> DenseOutput:
    """Run the model on whole sequences.

    Args:
        config: dimensions.
        weights: of `weight_shapes`, on the device of `tokens`; fp32 while training.
        tokens: integer `[batch, length]`, positions 0.. in each row.
        options: rounding and extras; the oracle's by default.
    """
    options = options or DenseOptions()
    batch, length = tokens.shape
    padded = -(-length // BLOCK) * BLOCK
    tokens = F.pad(tokens.long(), (0, padded - length))  # causal: what stands behind never shows
    run = _Run(config, weights, options, batch, padded, tokens.device)
    residual = run.bf16("embed")[tokens.flatten()].unsqueeze(1).expand(-1, config.streams, -1)
    read = torch.zeros(batch * padded, config.streams, device=tokens.device)
    read[:, 0] = 1.0
    for layer, role in enumerate(config.roles()):
        for sublayer in ("attn", "moe"):
            name = f"layers.{layer}.{sublayer}."
            next_read, write, mix = _hc_mix(
                residual,
                run.bf16(name + "hc_fn"),
                weights[name + "hc_scale"],
                weights[name + "hc_base"],
                config.norm_eps,
                config.hc_eps,
                config.sinkhorn_steps,
                torch.float64 if options.math == torch.float64 else torch.float32,
            )
            x = _read_norm(residual, read, weights[name + "norm"], config.norm_eps)
            y = run.attention(layer, role, x) if sublayer == "attn" else run.moe(layer, x)
            residual = _hc_write(residual, y, write, mix)
            read = next_read
    x = _read_norm(residual, read, weights["norm"], config.norm_eps)
    head = run.bf16("head")
    # in bf16 math the head's output is rounded once, which a loss does not see
    logits = F.linear(x.to(options.math), head.to(options.math)).float().view(batch, padded, -1)
    return DenseOutput(
        logits[:, :length],
        run.index_loss,
        torch.stack(run.loads),
        {s: m[:, :length] for s, m in run.selections.items()},
        None if run.published.candidates is None else run.published.candidates[:, :length],
    )


class _Run:
    """State of one forward: rounded weights, rotation tables, what layers published."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        options: DenseOptions,
        batch: int,
        length: int,
        device: torch.device,
    ) -> None:
        self.config, self.weights, self.options = config, weights, options
        self.batch, self.length = batch, length
        self.topk = options.index_topk or config.index_topk
        self.published = _Published()
        self.selections: dict[int, Tensor] = {}
        self.loads: list[Tensor] = []
        self.index_loss = torch.zeros((), device=device)
        self.tables = {kind: rope_table(config, kind, length).to(device) for kind in (0, 1)}
        block = torch.arange(BLOCK, device=device)
        keys = torch.arange(2 * BLOCK, device=device) - BLOCK
        near = (keys <= block[:, None]) & (keys > block[:, None] - config.window)
        near = near.expand(length // BLOCK, -1, -1).clone()
        near[0, :, :BLOCK] = False  # nothing stands before the first block
        self.near = near.view(length, 2 * BLOCK)

    def bf16(self, name: str) -> Tensor:
        """A weight rounded to bf16."""
        return self.weights[name].to(torch.bfloat16)

    def freqs(self, ratio: int, step: int = 1) -> Tensor:
        """Rotation factors of every flattened row, or of every `step`-th token."""
        return self.tables[min(ratio, 1)][::step].repeat(self.batch, 1)

    def visible(self, ratio: int) -> Tensor:
        """bool `[length, rows]`: group j is visible once its last token has been passed."""
        device = self.near.device
        length = (torch.arange(self.length, device=device) + 1) // ratio
        return torch.arange(self.length // ratio, device=device) < length[:, None]

    def attention(self, layer: int, role: Role, x: Tensor) -> Tensor:
        """The attention sublayer on normed rows `[n, d]`."""
        config, options, p = self.config, self.options, f"layers.{layer}."
        b, t, h = self.batch, self.length, config.heads
        freqs = self.freqs(role.ratio)
        qr = _norm(layers.project(x, self.bf16(p + "attn.wq_a"), options.math), self.weights[p + "attn.q_norm"], config)
        q = layers.project(qr, self.bf16(p + "attn.wq_b"), options.math).view(b * t, h, LATENT_DIM)
        q = _rotate_heads(q, freqs, False)
        kv = layers.project(x, self.bf16(p + "attn.wkv"), options.math)
        kv = _latent_row(kv, self.weights[p + "attn.kv_norm"], freqs, config.norm_eps, options.window, False)
        kv = kv.view(b, t // BLOCK, BLOCK, LATENT_DIM)
        near = torch.cat((F.pad(kv, (0, 0, 0, 0, 1, 0))[:, :-1], kv), dim=2)  # previous and own block

        math = options.math
        q = q.to(math)
        q_blocks = q.view(b, t // BLOCK, BLOCK * h, LATENT_DIM)
        near = near.to(math)
        near_scores = (q_blocks @ near.transpose(-1, -2)).view(b * t, h, 2 * BLOCK)
        far = far_scores = selection = None
        if role.mode is not Mode.WINDOW:
            if role.mode is Mode.FULL:
                self._compress(layer, role, x)
            assert self.published.rows is not None
            far = self.published.rows.to(math)
            far_scores = (q.view(b, t * h, LATENT_DIM) @ far.transpose(-1, -2)).view(b * t, h, -1)
            if role.mode in (Mode.FULL, Mode.REINDEX):
                self._select(layer, role, x, qr, far_scores)
            selection = self.published.selection
            assert selection is not None
            selection = selection.view(b * t, -1)
        sink = self.weights[p + "attn.sink"].float()
        near_mask = self.near.repeat(b, 1)
        p_near, p_far = _JointSoftmax.apply(near_scores, far_scores, near_mask, selection, sink, config.scale)
        out = (p_near.to(math).view(b, t // BLOCK, BLOCK * h, -1) @ near).view(b * t, h, LATENT_DIM)
        if far is not None:
            out = out + (p_far.to(math).view(b, t * h, -1) @ far).view(b * t, h, LATENT_DIM)
        out = _rotate_heads(out, freqs, True)  # the paged op rotates back before it rounds, too
        grouped = out.view(b * t, config.o_groups, -1)
        wo_a = self.bf16(p + "attn.wo_a").to(math)
        low = torch.einsum("ngi,goi->ngo", grouped.to(math), wo_a).to(torch.bfloat16)
        return layers.project(low.flatten(1), self.bf16(p + "attn.wo_b"), math)

    def _compress(self, layer: int, role: Role, x: Tensor) -> None:
        """Make the compressed rows and index keys of a source layer."""
        config, options, p = self.config, self.options, f"layers.{layer}."
        rows = self.length // role.ratio
        freqs = self.freqs(role.ratio, role.ratio)
        weight = self.bf16(p + "compress.wkv")
        if role.ratio == 1:
            pooled = layers.project(x, weight, options.math)
        else:
            both = F.linear(x.to(options.math), weight.to(options.math)).float()
            pooled = _pool_pairs(both)
        latent = _norm(pooled, self.weights[p + "compress.norm"], config)
        # the indexer learns from its own loss only: nothing flows back into the backbone
        keys = layers.project(latent.detach(), self.bf16(p + "index.wk"), options.math)
        keys = _index_values(_norm(keys, self.weights[p + "index.k_norm"], config), freqs)
        self.published.keys = keys.view(self.batch, rows, INDEX_DIM)
        stored = _latent_row(latent, None, freqs, config.norm_eps, options.rows, True)
        self.published.rows = stored.view(self.batch, rows, LATENT_DIM)

    def _select(self, layer: int, role: Role, x: Tensor, qr: Tensor, far_scores: Tensor) -> None:
        """Score the visible rows, publish a selection, and add to the indexer's loss."""
        config, options, p = self.config, self.options, f"layers.{layer}."
        b, t = self.batch, self.length
        assert self.published.keys is not None
        q = layers.project(qr.detach(), self.bf16(p + "index.wq_b"), options.math)
        q = _index_values(q.view(b * t, config.index_heads, INDEX_DIM), self.freqs(role.ratio))
        w = F.linear(x.detach().float(), self.bf16(p + "index.head_weights").float()).to(torch.bfloat16)
        w = (w.float() * config.index_scale).to(torch.bfloat16)
        keys = self.published.keys.to(options.math)
        dots = (q.to(options.math).view(b, t * config.index_heads, INDEX_DIM) @ keys.transpose(-1, -2)).view(
            b * t, config.index_heads, -1
        )
        logits = _IndexLogits.apply(dots, w)
        allowed = self.visible(role.ratio).repeat(b, 1)
        if role.mode is Mode.REINDEX:
            assert self.published.candidates is not None
            allowed = allowed & self.published.candidates.view(b * t, -1)
        with torch.no_grad():
            selection = select(logits, allowed, self.topk, exact=options.exact_ties)
            if role.publishes_candidates:
                kept = candidate_blocks(logits, allowed, config.candidate_blocks, config.candidate_block_size)
                self.published.candidates = kept.view(b, t, -1)
        self.published.selection = self.selections[layer] = selection.view(b, t, -1)
        if options.index_loss:
            with torch.no_grad():
                target = _attention_share(far_scores, allowed, config.scale)
            self.index_loss = self.index_loss + _index_divergence(logits, allowed, target)

    def moe(self, layer: int, x: Tensor) -> Tensor:
        """The feed-forward sublayer on normed rows `[n, d]`."""
        config, p = self.config, f"layers.{layer}.moe."
        logits = F.linear(x.float(), self.bf16(p + "router").float())
        route, load = _route(logits, self.weights[p + "router_bias"], config.experts_per_token, config.route_scale)
        self.loads.append(load)
        stacked = [
            layers.with_shared(self.bf16(f"{p}{n}"), self.bf16(f"{p}shared_{n}")) for n in ("gate", "up", "down")
        ]
        return _experts(x, route, *stacked, config.swiglu_limit, self.options.math)


# --- selection --------------------------------------------------------------------------------------------------------


def select(logits: Tensor, allowed: Tensor, k: int, *, exact: bool) -> Tensor:
    """bool mask of each row's `k` largest allowed logits, or of all allowed ones where they are fewer.

    Args:
        logits: fp32 `[n, R]`.
        allowed: bool `[n, R]`.
        k: how many.
        exact: the lower index wins ties; otherwise everything equal to the k-th value is let in.
    """
    if logits.shape[-1] <= k:
        return allowed
    masked = logits.masked_fill(~allowed, -torch.inf)
    if exact:
        order = masked.sort(dim=-1, descending=True, stable=True).indices[:, :k]
        return torch.zeros_like(allowed).scatter_(-1, order, True) & allowed
    return (masked >= masked.topk(k, dim=-1, sorted=False).values.amin(-1, keepdim=True)) & allowed


def candidate_blocks(logits: Tensor, visible: Tensor, blocks: int, block_size: int) -> Tensor:
    """bool mask of the rows in each query's best blocks; a block counts by its largest visible logit.

    The newest visible block is always kept.
    """
    n, rows = logits.shape
    if rows <= blocks * block_size:
        return visible
    masked = logits.masked_fill(~visible, -torch.inf).unflatten(-1, (-1, block_size))
    key, alive = masked.amax(-1), visible.unflatten(-1, (-1, block_size)).any(-1)
    newest = alive.sum(-1, keepdim=True) - 1
    key = key.scatter(-1, newest.clamp(min=0), torch.inf)
    kept = select(key, alive, blocks, exact=True)
    return kept.unsqueeze(-1).expand(-1, -1, block_size).reshape(n, rows) & visible


# --- compiled pieces --------------------------------------------------------------------------------------------------

_compile_enabled = False


def enable_compile(enabled: bool = True) -> None:
    """Compile the elementwise pieces from now on; one that does not compile runs eagerly, with one warning."""
    global _compile_enabled
    if enabled:
        import torch._dynamo.config
        import torch._inductor.config

        # the compiler would otherwise drop a rounding to bf16 that is widened again
        torch._inductor.config.emulate_precision_casts = True
        torch._dynamo.config.recompile_limit = 64
    _compile_enabled = enabled


def _piece(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled: list[Callable[..., Any] | None] = []

    def call(*args: Any) -> Any:
        if not _compile_enabled:
            return function(*args)
        if not compiled:
            compiled.append(torch.compile(function, dynamic=False))
        if compiled[0] is None:
            return function(*args)
        try:
            return compiled[0](*args)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # the compiler's own failures are of many types
            warnings.warn(f"{function.__name__} runs eagerly: {type(error).__name__}: {error}"[:500], stacklevel=2)
            compiled[0] = None
            return function(*args)

    return call


@_piece
def _hc_mix(
    residual: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    norm_eps: float,
    hc_eps: float,
    steps: int,
    math: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    return layers.hc_mix(residual, fn, scale, base, norm_eps=norm_eps, hc_eps=hc_eps, steps=steps, math=math)


@_piece
def _hc_write(residual: Tensor, y: Tensor, write: Tensor, mix: Tensor) -> Tensor:
    return layers.hc_write(residual, y, write, mix)


@_piece
def _read_norm(residual: Tensor, read: Tensor, weight: Tensor, eps: float) -> Tensor:
    return layers.norm(layers.hc_read(residual, read), weight.to(torch.bfloat16), eps)


@_piece
def _norm_piece(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return layers.norm(x, weight.to(torch.bfloat16), eps)


def _norm(x: Tensor, weight: Tensor, config: ModelConfig) -> Tensor:
    return _norm_piece(x, weight, config.norm_eps)


def _rotate_tail(x: Tensor, freqs: Tensor, inverse: bool = False) -> Tensor:
    """Rotate the last 64 of rows `[..., w]` and round all to bf16."""
    tail = numerics.rotate(x[..., -ROPE_DIM:].float(), freqs, inverse=inverse).to(torch.bfloat16)
    return torch.cat((x[..., :-ROPE_DIM].to(torch.bfloat16), tail), dim=-1)


@_piece
def _rotate_heads(q: Tensor, freqs: Tensor, inverse: bool) -> Tensor:
    return _rotate_tail(q, freqs.unsqueeze(1), inverse)


def fake_quant(x: Tensor, layout: KVLayout, *, compressed: bool) -> Tensor:
    """What a page of `layout` gives back for fp32 rows `[n, 512]`; a compressed row is rounded to fp4 first.

    Only pages of V4 and V41 need that first rounding; BF16 pages keep rows as they are.
    """
    if layout.groups == 0:
        return x
    if compressed and layout.element.bits == 8:
        x = numerics.fake_quant_latent(x)
    body = x[..., : layout.quantized_values]
    values = numerics.dequantize(*numerics.quantize(body.contiguous(), layout), layout)
    return torch.cat((values, x[..., layout.quantized_values :]), dim=-1)


def _straight_through(x: Tensor, quantizer: Callable[[Tensor], Tensor]) -> Tensor:
    """The quantizer's bf16 value with the gradient of the identity."""
    x = x.float()
    with torch.no_grad():
        q = quantizer(x.detach())
    return (x + (q - x).detach()).to(torch.bfloat16)


@_piece
def _latent_row(
    x: Tensor, weight: Tensor | None, freqs: Tensor, eps: float, layout: KVLayout, compressed: bool
) -> Tensor:
    if weight is not None:
        x = layers.norm(x, weight.to(torch.bfloat16), eps)
    return _straight_through(_rotate_tail(x, freqs), lambda v: fake_quant(v, layout, compressed=compressed))


@_piece
def _index_values(x: Tensor, freqs: Tensor) -> Tensor:
    freqs = freqs.unsqueeze(1) if x.dim() == 3 else freqs
    return _straight_through(_rotate_tail(x, freqs), numerics.fake_quant_index)


@_piece
def _pool_pairs(both: Tensor) -> Tensor:
    """bf16 `[n / 2, 512]`: per channel, the softmax over a pair's scores weighs its values."""
    kv, score = both.view(-1, 2, 2 * LATENT_DIM).split(LATENT_DIM, dim=-1)
    difference = score[:, 0] - score[:, 1]
    small = torch.exp(-difference.abs())
    first, second = torch.where(difference >= 0, 1.0, small), torch.where(difference >= 0, small, 1.0)
    return ((kv[:, 0] * first + kv[:, 1] * second) / (1.0 + small)).to(torch.bfloat16)


@_piece
def _route(logits: Tensor, bias: Tensor, k: int, scale: float) -> tuple[Tensor, Tensor]:
    """Weights `[n, E + 1]` of the routed experts and of the shared one, and the load of each expert."""
    scores = F.softplus(logits).sqrt()
    picks = (scores.detach() + bias).topk(k, dim=-1).indices
    picked = torch.zeros_like(scores).scatter(-1, picks, 1.0)
    weights = scores * picked
    weights = weights * (scale / weights.sum(-1, keepdim=True).clamp(min=1e-20))
    return torch.cat((weights, torch.ones_like(weights[:, :1])), dim=-1), picked.mean(0) / k


@_piece
def _experts(
    x: Tensor, route: Tensor, gate: Tensor, up: Tensor, down: Tensor, limit: float, math: torch.dtype
) -> Tensor:
    return layers.experts(x, route, gate, up, down, limit=limit, math=math)


@_piece
def _attention_share(scores: Tensor, allowed: Tensor, scale: float) -> Tensor:
    """fp32 `[n, R]`: attention over the allowed compressed rows alone, averaged over heads."""
    scores = (scores.float() * scale).masked_fill(~allowed.unsqueeze(1), _MASKED)
    return scores.softmax(-1).mean(1) * allowed


@_piece
def _index_divergence(logits: Tensor, allowed: Tensor, target: Tensor) -> Tensor:
    """Mean KL divergence of the indexer's softmax from `target`, over queries that see a row."""
    log_q = logits.masked_fill(~allowed, _MASKED).log_softmax(-1)
    divergence = (target * (target.clamp(min=1e-20).log() - log_q)).sum(-1)
    seen = allowed.any(-1)
    return (divergence * seen).sum() / seen.sum().clamp(min=1)


@_piece
def _joint_softmax(
    near: Tensor, far: Tensor | None, near_mask: Tensor, far_mask: Tensor | None, sink: Tensor, scale: float
) -> tuple[Tensor, Tensor | None, Tensor]:
    # training keeps probabilities in bf16, the oracle unrounded
    dtype = torch.bfloat16 if near.dtype == torch.bfloat16 else torch.float32
    s = (near.float() * scale).masked_fill(~near_mask.unsqueeze(1), -torch.inf)
    top = torch.maximum(s.amax(-1), sink)
    f = None
    if far is not None and far_mask is not None:
        f = (far.float() * scale).masked_fill(~far_mask.unsqueeze(1), -torch.inf)
        top = torch.maximum(top, f.amax(-1))
    s = (s - top.unsqueeze(-1)).exp()
    share = (sink - top).exp()
    total = s.sum(-1) + share
    if f is not None:
        f = (f - top.unsqueeze(-1)).exp()
        total = total + f.sum(-1)
        f = (f / total.unsqueeze(-1)).to(dtype)
    return (s / total.unsqueeze(-1)).to(dtype), f, share / total


@_piece
def _joint_softmax_backward(
    p_near: Tensor, p_far: Tensor | None, share: Tensor, d_near: Tensor, d_far: Tensor | None, scale: float
) -> tuple[Tensor, Tensor | None, Tensor]:
    delta = (p_near.float() * d_near.float()).sum(-1)
    if p_far is not None and d_far is not None:
        delta = delta + (p_far.float() * d_far.float()).sum(-1)
    near = (p_near.float() * (d_near.float() - delta.unsqueeze(-1)) * scale).to(d_near.dtype)
    far = None
    if p_far is not None and d_far is not None:
        far = (p_far.float() * (d_far.float() - delta.unsqueeze(-1)) * scale).to(d_far.dtype)
    return near, far, -(share * delta).sum(0)


class _JointSoftmax(torch.autograd.Function):
    """One softmax over window scores, selected scores and the sink; keeps the probabilities only."""

    @staticmethod
    def forward(ctx: Any, near: Tensor, far: Tensor | None, near_mask: Tensor, far_mask: Tensor | None, sink: Tensor,
                scale: float) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        p_near, p_far, share = _joint_softmax(near, far, near_mask, far_mask, sink, scale)
        ctx.save_for_backward(p_near, p_far, share)
        ctx.scale, ctx.dtype = scale, near.dtype
        return p_near, p_far

    @staticmethod
    def backward(ctx: Any, d_near: Tensor, d_far: Tensor | None) -> tuple[Tensor | None, ...]:
        p_near, p_far, share = ctx.saved_tensors
        near, far, sink = _joint_softmax_backward(p_near, p_far, share, d_near, d_far, ctx.scale)
        return near.to(ctx.dtype), None if far is None else far.to(ctx.dtype), None, None, sink, None


@_piece
def _index_sum(dots: Tensor, weights: Tensor) -> Tensor:
    return (dots.float().relu() * weights.float().unsqueeze(-1)).sum(1)


@_piece
def _index_sum_backward(dots: Tensor, weights: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    d_dots = torch.where(dots > 0, grad.unsqueeze(1) * weights.float().unsqueeze(-1), 0.0).to(dots.dtype)
    return d_dots, (dots.float().relu() * grad.unsqueeze(1)).sum(-1).to(weights.dtype)


class _IndexLogits(torch.autograd.Function):
    """`sum_h relu(dots_h) * w_h` of dots `[n, H, R]` and weights `[n, H]`, fp32 `[n, R]`."""

    @staticmethod
    def forward(ctx: Any, dots: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(dots, weights)
        return _index_sum(dots, weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return _index_sum_backward(*ctx.saved_tensors, grad)
