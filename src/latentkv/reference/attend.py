"""Stage `attend` in plain PyTorch: sparse attention over latent rows, and merging of partial results."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from latentkv import numerics
from latentkv.layout import LATENT_DIM, NOPE_DIM, KVLayout
from latentkv.reference.store import BF16, F32, read_rows

LOWEST_SCORE = torch.finfo(F32).min  # of a row that counts; -inf is for rows that do not
CHUNK_ROWS = 16384  # rows that a chunk of tokens may read: 32 MiB of fp32


def sparse_mla(
    query: Tensor,
    window: Tensor,
    window_slots: Tensor,
    window_lengths: Tensor | None,
    window_layout: str,
    window_page_size: int,
    extra: Tensor | None,
    extra_slots: Tensor | None,
    extra_lengths: Tensor | None,
    extra_layout: str,
    extra_page_size: int,
    scale: float,
    sink: Tensor | None,
    freqs: Tensor | None,
    positions: Tensor | None,
    empty_lse: float,
    splits: int = 1,
) -> tuple[Tensor, Tensor]:
    """One softmax over the window rows and the extra rows; the sink joins only the denominator."""
    tokens, heads = query.shape[:2]
    out = torch.empty(tokens, heads, LATENT_DIM, dtype=BF16, device=query.device)
    lse = torch.empty(tokens, heads, dtype=F32, device=query.device)
    segments = [(window, window_slots, window_lengths, window_layout, window_page_size)]
    if extra is not None and extra_slots is not None:
        segments.append((extra, extra_slots, extra_lengths, extra_layout, extra_page_size))
    width = sum(segment[1].shape[1] for segment in segments)
    step = max(1, CHUNK_ROWS // max(1, width))
    for first in range(0, tokens, step):
        chunk = zip(*(rows_of_tokens(*s, slice(first, first + step)) for s in segments), strict=True)
        for t, rows in enumerate(chunk, start=first):
            values, lse[t] = attend(query[t], torch.cat(rows), scale)
            values = apply_sink(values, lse[t], sink)
            if freqs is not None and positions is not None:
                angles = numerics.freqs_at(freqs, positions[t : t + 1])
                tail = numerics.rotate(values[:, NOPE_DIM:], angles, inverse=True)
                values = torch.cat((values[:, :NOPE_DIM], tail), -1)
            out[t] = values.to(BF16)
    return out, torch.where(lse == -torch.inf, empty_lse, lse)


def merge_partials(outs: Tensor, lses: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weigh normalized partial results by their share of the softmax, in order; the sink joins once, at the end."""
    tokens, heads = lses.shape[1:]
    out = torch.empty(tokens, heads, LATENT_DIM, dtype=BF16, device=outs.device)
    lse = torch.empty(tokens, heads, dtype=F32, device=outs.device)
    for t in range(tokens):
        values, lse[t] = merge(outs[:, t].to(F32), lses[:, t])
        out[t] = apply_sink(values, lse[t], sink).to(BF16)
    return out, lse


# --- one token: its bits must not depend on the batch, and a vectorized exp's bits depend on an element's place -------


def attend(query: Tensor, rows: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """fp32 out `[H, 512]` and lse `[H]` of one token's query `[H, 512]` over its valid rows `[n, 512]`."""
    if rows.shape[0] == 0:
        return torch.zeros_like(query, dtype=F32), query.new_full((query.shape[0],), -torch.inf, dtype=F32)
    scores = (query.to(F32) @ rows.T * scale).clamp(min=LOWEST_SCORE)
    top = scores.amax(-1, keepdim=True)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    return weights @ rows / total, (top + total.log()).squeeze(-1)


def merge(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 out `[H, 512]` and lse `[H]` of one token's partials `[S, H, 512]` and `[S, H]`."""
    empty = torch.isinf(lses)
    lses = torch.where(empty, -torch.inf, lses)
    top = lses.amax(0)
    weights = (lses - torch.where(top == -torch.inf, 0.0, top)).exp()
    total = torch.zeros_like(top)
    values = torch.zeros_like(outs[0])
    for weight, out, skip in zip(weights, outs, empty, strict=True):
        total = total + weight
        values = values + weight.unsqueeze(-1) * torch.where(skip.unsqueeze(-1), 0.0, out)
    return values / torch.where(total == 0, 1.0, total).unsqueeze(-1), top + total.log()


def apply_sink(values: Tensor, lse: Tensor, sink: Tensor | None) -> Tensor:
    """`values * e^lse / (e^lse + e^sink)`: the sink's share of one token's softmax goes to nothing."""
    if sink is None:
        return values
    share = torch.where(lse == -torch.inf, 0.0, torch.sigmoid(lse - sink))
    return values * share.unsqueeze(-1)


# --- rows -------------------------------------------------------------------------------------------------------------


def rows_of_tokens(
    cache: Tensor, slots: Tensor, lengths: Tensor | None, layout: str, page_size: int, part: slice
) -> Iterator[Tensor]:
    """The valid rows of each token of `part`, as fp32 `[n, 512]`; no other row is read."""
    slots = slots[part].long()  # a capacity may be past int32
    inside = (slots >= 0) & (slots < cache.shape[0] * page_size)
    if lengths is not None:
        inside &= torch.arange(slots.shape[1], device=slots.device) < lengths[part].unsqueeze(-1)
    distinct, place = slots[inside].unique(return_inverse=True)  # neighbours share most of their window
    table = read_rows(cache, distinct, KVLayout.parse(layout), page_size)  # a stored number is exact in bf16
    for mine in place.split(inside.sum(-1).tolist()):
        yield table[mine]
