"""The paged forward: the model on the public ops, several requests a step, chunks and single tokens alike.

A layer walks the six stages: `store` writes window rows, `compress` and `index` write rows and keys of a source layer,
`select` picks rows, `attend` reads both, `route` gates the experts. Nothing is read but what is in pages, so a token
sees the same rows whether it came in a chunk or alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import latentkv as lk
from latentkv.layout import INDEX_DIM, LATENT_DIM, IndexQueryLayout
from latentkv.model import layers
from latentkv.model.cache import INDEX_PAGE_ROWS, PAGE_TOKENS, WINDOW_PAGE_ROWS, ModelCache, Step
from latentkv.model.config import Mode, ModelConfig, Role, rope_table
from latentkv.model.weights import Weights


@dataclass
class Picks:
    """Row numbers that index sources picked, appended step by step: int32 `[T, k]` by layer, -1 padded."""

    by_layer: dict[int, list[Tensor]] = field(default_factory=dict)

    def add(self, layer: int, positions: Tensor) -> None:
        """Append one step's picks."""
        self.by_layer.setdefault(layer, []).append(positions)


@dataclass
class _Published:
    """What layers hand to later ones within a step."""

    slots: Tensor | None = None  # selected rows
    candidates: Tensor | None = None  # kept blocks


class PagedModel:
    """A model whose caches are pages.

    Args:
        config: dimensions.
        weights: of `load_checkpoint`, on the device to run on.
        index_topk: overrides the config's count of selected rows.
        exact: whether the linear layers are summed in fp64, so that a row does not depend on its batch; on a CPU by
            default. Otherwise bf16 operands leave the sums to the device.
        fused: whether norms, the hyper-connection and gated experts are kernels (`latentkv.kernels.model`) instead of
            PyTorch; on a GPU by default, where sums are not exact.

    Raises:
        ValueError: kernels are asked for where sums are exact.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        *,
        index_topk: int | None = None,
        exact: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        self.config = config
        self.topk = index_topk or config.index_topk
        self.device = weights["embed"].device
        # on a CPU fp64 sums cost little beside the ops
        self.exact = self.device.type == "cpu" if exact is None else exact
        self.fused = (self.device.type != "cpu" and not self.exact) if fused is None else fused
        if self.fused and self.exact:
            raise ValueError("fused: kernels sum in fp32, exact=False is needed")
        self._math = torch.float64 if self.exact else torch.bfloat16
        self._hc_math = torch.float64 if self.exact else torch.float32
        self._weights = dict(weights)
        self._wide = {n: w.to(self._math) for n, w in weights.items() if w.dim() >= 2 and w.dtype == torch.bfloat16}
        self._freqs = {kind: rope_table(config, kind).to(self.device) for kind in (0, 1)}
        self._experts: list[list[Tensor]] = []
        for layer in range(config.layers):
            p = f"layers.{layer}."
            self._wide[p + "attn.wo_a"] = self._wide[p + "attn.wo_a"].transpose(1, 2).contiguous()
            for sublayer in ("attn", "moe"):
                self._wide[f"{p}{sublayer}.hc_fn"] = weights[f"{p}{sublayer}.hc_fn"].to(self._hc_math)
            gate, up, down = (
                layers.with_shared(self._wide[f"{p}moe.{n}"], self._wide[f"{p}moe.shared_{n}"])
                for n in ("gate", "up", "down")
            )
            if self.fused:  # one matrix in, one out
                gate_up = torch.cat((gate.flatten(0, 1), up.flatten(0, 1)))
                self._experts.append([gate_up, down.transpose(0, 1).flatten(1)])
            else:
                self._experts.append([gate, up, down])

    @torch.no_grad()
    def step(
        self,
        cache: ModelCache,
        chunks: Sequence[tuple[int, Sequence[int] | Tensor]],
        *,
        all_logits: bool = False,
        picks: Picks | None = None,
    ) -> Tensor:
        """Append tokens to requests and return logits.

        Args:
            cache: the requests' caches; the layouts that it was made with are used.
            chunks: request ids, each once, with the tokens to append.
            all_logits: whether to return the logits of every token instead of each request's last.
            picks: takes the selections of this step.

        Returns:
            fp32 `[requests, vocab]`, or `[tokens, vocab]` in the order of `chunks`.

        Raises:
            ValueError: as `ModelCache.plan`, or a token outside the vocabulary.
        """
        for request, tokens in chunks:
            given = torch.as_tensor(tokens)
            if given.numel() and not 0 <= int(given.min()) <= int(given.max()) < self.config.vocab:
                raise ValueError(f"chunks: request {request} has a token outside 0..{self.config.vocab - 1}")
        return self.run(cache, cache.plan(chunks), all_logits=all_logits, picks=picks)

    @torch.no_grad()
    def run(self, cache: ModelCache, step: Step, *, all_logits: bool = False, picks: Picks | None = None) -> Tensor:
        """Run a planned step; see `step`.

        Nothing in it looks at a value of a tensor, so that it can be captured where every op has a kernel.
        """
        with one_thread(self.device):
            return self._run(cache, step, all_logits, picks)

    def _run(self, cache: ModelCache, step: Step, all_logits: bool, picks: Picks | None) -> Tensor:
        config, weights = self.config, self._weights
        residual = weights["embed"].index_select(0, step.tokens).unsqueeze(1).repeat(1, config.streams, 1)
        read = torch.zeros(step.tokens.shape[0], config.streams, device=self.device)
        read[:, 0] = 1.0
        published = _Published()
        for layer, role in enumerate(config.roles()):
            for sublayer in ("attn", "moe"):
                x, next_read, write, mix = self._enter(f"layers.{layer}.{sublayer}.", residual, read)
                if sublayer == "attn":
                    y = self._attention(layer, role, x, cache, step, published, picks)
                else:
                    y = self._moe(layer, x)
                residual = self._leave(residual, y, write, mix)
                read = next_read
        if not all_logits:
            residual, read = residual[step.last_rows], read[step.last_rows]
        if self.fused:
            x = _kernels().read_norm(residual, read, weights["norm"], config.norm_eps)
        else:
            x = layers.norm(layers.hc_read(residual, read), weights["norm"], config.norm_eps)
        if self.exact:
            return F.linear(x.to(self._math), self._wide["head"]).float()
        return lk.linear_fp32(x, weights["head"])

    def _enter(self, name: str, residual: Tensor, read: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """A sublayer's input, the read of the next sublayer, and this one's write and mix."""
        config, weights = self.config, self._weights
        scale, base = weights[name + "hc_scale"], weights[name + "hc_base"]
        eps: dict[str, Any] = {"norm_eps": config.norm_eps, "hc_eps": config.hc_eps, "steps": config.sinkhorn_steps}
        if self.fused:
            logits = lk.linear_fp32(residual.flatten(1), weights[name + "hc_fn"])
            return _kernels().mix(residual, read, logits, scale, base, weights[name + "norm"], **eps)
        mixing = layers.hc_mix(residual, self._wide[name + "hc_fn"], scale, base, math=self._hc_math, **eps)
        return (self._norm(layers.hc_read(residual, read), name + "norm"), *mixing)

    def _leave(self, residual: Tensor, y: Tensor, write: Tensor, mix: Tensor) -> Tensor:
        """The streams behind a sublayer."""
        return (_kernels().write if self.fused else layers.hc_write)(residual, y, write, mix)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return (_kernels().norm if self.fused else layers.norm)(x, self._weights[name], self.config.norm_eps)

    def _project(self, x: Tensor, name: str) -> Tensor:
        return layers.project(x, self._wide[name], self._math)

    def _attention(
        self,
        layer: int,
        role: Role,
        x: Tensor,
        cache: ModelCache,
        step: Step,
        published: _Published,
        picks: Picks | None,
    ) -> Tensor:
        config, weights, p = self.config, self._weights, f"layers.{layer}."
        freqs = self._freqs[min(role.ratio, 1)]
        qr = self._norm(self._project(x, p + "attn.wq_a"), p + "attn.q_norm")
        query = self._project(qr, p + "attn.wq_b").view(-1, config.heads, LATENT_DIM)
        lk.norm_rope_store_kv(
            self._project(x, p + "attn.wkv"),
            weights[p + "attn.kv_norm"],
            cache.window[layer],
            step.window_slots,
            step.positions,
            freqs,
            eps=config.norm_eps,
            layout=cache.window_layout,
            page_size=WINDOW_PAGE_ROWS,
            query=query,
        )
        extra = None
        if role.mode is not Mode.WINDOW:
            if role.mode is Mode.FULL:
                self._compress(layer, role, x, cache, step)
            if role.mode in (Mode.FULL, Mode.REINDEX):
                self._select(layer, role, x, qr, cache, step, published, picks)
            assert published.slots is not None
            extra = lk.Rows(cache.rows[role.kv_source], published.slots, cache.row_layout, PAGE_TOKENS // role.ratio)
        window = lk.Rows(cache.window[layer], step.window_reads, cache.window_layout, WINDOW_PAGE_ROWS)
        out, _ = lk.sparse_mla(
            query,
            window,
            extra,
            scale=config.scale,
            sink=weights[p + "attn.sink"],
            inverse_rope=(freqs, step.positions),
        )
        grouped = out.view(out.shape[0], config.o_groups, -1).transpose(0, 1).to(self._math)
        low = torch.bmm(grouped, self._wide[p + "attn.wo_a"]).to(torch.bfloat16).transpose(0, 1).flatten(1)
        return self._project(low, p + "attn.wo_b")

    def _compress(self, layer: int, role: Role, x: Tensor, cache: ModelCache, step: Step) -> None:
        """Write the compressed rows and index keys of a source layer."""
        config, weights, p = self.config, self._weights, f"layers.{layer}."
        freqs, pages, eps, layout = self._freqs[1], cache.rows[layer], config.norm_eps, cache.row_layout
        norm, page_size = weights[p + "compress.norm"], PAGE_TOKENS // role.ratio
        if role.ratio == 1:
            rows, slots = self._project(x, p + "compress.wkv"), step.raw_slots
            latent = lk.compress1(
                rows, norm, pages, slots, step.positions, freqs, eps=eps, layout=layout, page_size=page_size
            )
        else:
            rows, slots = lk.linear_fp32(x, weights[p + "compress.wkv"]), step.pair_slots
            shared = (rows, cache.pairs[layer], norm, pages, step.raw_slots, step.positions, step.requests, freqs)
            form: dict[str, Any] = {"eps": eps, "layout": layout, "page_size": page_size, "ring": cache.pair_ring}
            if step.rows:
                latent = lk.compress2(*shared, draft_len=step.rows, **form)
            else:
                assert step.first_rows is not None
                assert step.row_counts is not None
                latent = lk.compress2_prefill(*shared, step.first_rows, step.row_counts, **form)
        lk.store_index_key(
            self._project(latent, p + "index.wk"),
            weights[p + "index.k_norm"],
            cache.keys[layer],
            slots,
            step.positions,
            freqs,
            eps=config.norm_eps,
            ratio=role.ratio,
        )

    def _select(
        self,
        layer: int,
        role: Role,
        x: Tensor,
        qr: Tensor,
        cache: ModelCache,
        step: Step,
        published: _Published,
        picks: Picks | None,
    ) -> None:
        """Score visible keys and publish the selected rows, and the candidate blocks where the layer does."""
        config, p = self.config, f"layers.{layer}."
        query = self._project(qr, p + "index.wq_b").view(-1, config.index_heads, INDEX_DIM)
        payload, scale, head_weights = lk.pack_index_query_weights(
            query,
            self._freqs[1],
            step.positions,
            lk.router_partials(x, self._weights[p + "index.head_weights"]),
            config.index_scale,
            layout=IndexQueryLayout.PACKED,
        )
        lengths, table = step.lengths[role.ratio], step.tables[role.ratio]
        logits = lk.index_logits(
            (payload, scale),
            head_weights,
            cache.keys[role.kv_source],
            table,
            lengths,
            max_len=step.widths[role.ratio],
            fill=False,  # nothing reads past a row's length
            row_to_batch=step.requests,
        )
        if role.mode is Mode.REINDEX:
            assert published.candidates is not None
            positions, slots = lk.select_topk_in_blocks(
                logits,
                lengths,
                published.candidates,
                self.topk,
                block_size=config.candidate_block_size,
                page_table=table,
                page_size=INDEX_PAGE_ROWS,
                row_to_batch=step.requests,
            )
        else:
            positions, slots = lk.select_topk(
                logits,
                lengths,
                self.topk,
                page_table=table,
                page_size=INDEX_PAGE_ROWS,
                row_to_batch=step.requests,
            )
        if role.publishes_candidates:
            published.candidates = lk.select_blocks(
                logits, lengths, blocks=config.candidate_blocks, block_size=config.candidate_block_size
            )
        published.slots = slots
        if picks is not None:
            picks.add(layer, positions)

    def _moe(self, layer: int, x: Tensor) -> Tensor:
        config, weights, p = self.config, self._weights, f"layers.{layer}.moe."
        gate = lk.route_topk(
            lk.router_logits(x, weights[p + "router"]),
            weights[p + "router_bias"],
            k=config.experts_per_token,
            scale=config.route_scale,
            num_shared=1,  # the shared expert stands behind the routed ones and weighs 1
            softplus="log1p",
        )
        if self.fused:
            gate_up, down = self._experts[layer]
            hidden = _kernels().gated(
                F.linear(x, gate_up), *gate, experts=config.experts + 1, limit=config.swiglu_limit
            )
            return F.linear(hidden, down)
        route = torch.zeros(x.shape[0], config.experts + 1, device=x.device)
        route.scatter_(1, gate[1].long(), gate[0])
        return layers.experts(x, route, *self._experts[layer], limit=config.swiglu_limit, math=self._math)


def _kernels() -> ModuleType:
    """The kernels between the stages, imported at first use so that a CPU needs no Triton."""
    from latentkv.kernels import model

    return model


@contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """On a CPU, run single-threaded: ops are small, and threads that wait for each other stall on a busy machine."""
    threads = torch.get_num_threads()
    if device.type != "cpu" or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def prefill(
    model: PagedModel, cache: ModelCache, request: int, tokens: Sequence[int] | Tensor, *, chunk: int | None = None
) -> Iterator[tuple[int, Tensor]]:
    """Append a long prompt in chunks.

    Args:
        model: the model.
        cache: its caches.
        request: an open request.
        tokens: what to append.
        chunk: tokens a step; the cache's own by default.

    Yields:
        How many tokens have been appended, and the logits `[vocab]` of the last one.
    """
    tokens = torch.as_tensor(tokens, dtype=torch.int64)
    size = chunk or cache.chunk
    for start in range(0, tokens.numel(), size):
        part = tokens[start : start + size]
        yield start + part.numel(), model.step(cache, [(request, part)])[0]
