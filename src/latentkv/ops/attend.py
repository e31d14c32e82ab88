"""Stage `attend`: sparse MLA over window rows and selected rows, and merging of partial results."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from latentkv.layout import LATENT_DIM, KVLayout
from latentkv.ops import checks
from latentkv.ops._library import define
from latentkv.reference import attend as reference

MAX_HEADS = 128
MAX_SPLITS = 64
BF16, F32 = torch.bfloat16, torch.float32


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of one cache that each query attends to.

    Args:
        cache: uint8 `[num_pages, page_stride]`.
        slots: int32 or int64 `[T, K]`, last stride 1; page * page_size + offset. -1, and any other slot outside the
            cache, is skipped wherever it stands.
        layout: the cache's `KVLayout` or its name.
        page_size: rows a page, a power of two.
        lengths: int32 or int64 `[T]`: only a query's first `lengths` slots count, clamped to 0..K. None: all K.

    Raises:
        ValueError, TypeError: bad shapes, strides or dtypes.
    """

    cache: Tensor
    slots: Tensor
    layout: KVLayout
    page_size: int
    lengths: Tensor | None = None

    def __post_init__(self) -> None:
        _, layout = checks.kv_cache(self.cache, self.layout, self.page_size)
        object.__setattr__(self, "layout", layout)
        checks.tensor("slots", self.slots, ("T", "K"), checks.INTS, self.cache.device)
        if self.lengths is not None:
            tokens = self.slots.shape[0]
            checks.tensor("lengths", self.lengths, (tokens,), checks.INTS, self.cache.device, inner=False)

    @property
    def capacity(self) -> int:
        """Slots of the cache."""
        return self.cache.shape[0] * self.page_size


def sparse_mla(
    query: Tensor,
    window: Rows,
    extra: Rows | None = None,
    *,
    scale: float = LATENT_DIM**-0.5,
    sink: Tensor | None = None,
    inverse_rope: tuple[Tensor, Tensor] | None = None,
    empty_lse: float = float("-inf"),
    splits: int = 1,
) -> tuple[Tensor, Tensor]:
    """Attend from every query head to the window rows and the extra rows in one softmax; a row is key and value.

    Args:
        query: bf16 `[T, H, 512]`, rotated, last stride 1; 1 to 128 heads.
        window: rows of `T` queries.
        extra: further rows, of a cache of their own; its layout is the window's, or V41 and V41_FP4 of one arrangement.
        scale: factor of the scores.
        sink: fp32 `[H]`, a logit that joins the denominator once; -inf has no effect, +inf makes the output zero.
        inverse_rope: (freqs, positions): a table fp32 `[max_pos, 64]` or complex64 `[max_pos, 32]` and int32 or int64
            `[T]`. The last 64 output values are rotated back by their query's position; one outside the table reads
            row 0.
        empty_lse: lse of a query without a valid row: -inf, so that partials merge, or +inf as FlashMLA has it.
        splits: on a GPU, into how many parts, 1 to 64, each query's rows are cut for programs of their own, whose
            results are merged. A few queries alone do not fill a GPU; more parts do.

    Returns:
        out bf16 `[T, H, 512]`, zero where a query has no valid row, and lse fp32 `[T, H]`, the natural logarithm of the
        sum of exponentials, without the sink.

    Raises:
        ValueError, TypeError: bad shapes, strides or dtypes.
        NotImplementedError: a pair of layouts that cannot be mixed.

    Rows are read as bf16. Scores, softmax and the weighted sum are fp32 in the reference; kernels may round the
    probabilities to bf16. The fp32 output is normalized, rotated back and only then rounded. A skipped slot's bytes
    are never used; a valid row's score is at least fp32's lowest number, so that it counts; a NaN in a valid row
    makes the out and lse of the queries that attend to it NaN, and no others. A query's result does not depend on the
    batch in any bit; on a GPU it depends on `splits`, on the CPU not even on skipped slots. Against exact arithmetic
    an output value is off by at most 2^-8 of itself and, in kernels, 1.1 * 2^-8 of the weighted sum of the rows'
    magnitudes; lse by 1e-5 and a millionth of itself; and both by what fp32 scores of hundreds lose.

    Semantics: FlashMLA's sparse decoding with an extra cache and an attention sink, DeepSeek-V4 and V4.1.
    """
    query = checks.tensor("query", query, ("T", "H", LATENT_DIM), (BF16,))
    device, tokens, heads = query.device, query.shape[0], query.shape[1]
    if not 1 <= heads <= MAX_HEADS:
        raise ValueError(f"query: {heads} heads given, 1 to {MAX_HEADS} accepted")
    _check_rows("window", window, tokens, device)
    if extra is not None:
        _check_rows("extra", extra, tokens, device)
        _check_pair(window.layout, extra.layout)
    if sink is not None:
        sink = checks.tensor("sink", sink, (heads,), (F32,), device)
    freqs, positions = _check_rope(inverse_rope, tokens, device)
    splits, scale = checks.integer("splits", splits, 1, MAX_SPLITS), checks.number("scale", scale)
    checks.fp32("scale", scale)  # as which kernels take it
    if abs(checks.number("empty_lse", empty_lse)) != float("inf"):
        raise ValueError(f"empty_lse: {empty_lse} given, -inf or inf accepted")
    return torch.ops.latentkv.sparse_mla(
        query, *_flat(window), *_flat(extra), scale, sink, freqs, positions, float(empty_lse), splits
    )


def merge_partials(outs: Tensor, lses: Tensor, *, sink: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Merge attention over disjoint sets of rows: splits of a cache, ranks, or a window and its extra rows.

    Args:
        outs: bf16 or fp32 `[S, T, H, 512]`, last stride 1: each partial's own normalized output, without the sink.
        lses: fp32 `[S, T, H]`, last stride 1: natural logarithms, without the sink. A partial with -inf, or with +inf
            as FlashMLA marks an empty one, contributes nothing, whatever its output holds.
        sink: fp32 `[H]`, a logit that joins the denominator once, here.

    Returns:
        out bf16 `[T, H, 512]` and lse fp32 `[T, H]`, without the sink. All partials empty: 0 and -inf.

    Raises:
        ValueError, TypeError: bad shapes, strides or dtypes, no partial at all.

    Partials are added in order, in fp32: as long as that holds their sum, out is within 2^-8 of itself and 2^-18 of the
    weighted sum of the partials' magnitudes. A NaN lse makes its own out and lse NaN.

    Semantics: the split-KV merge of FlashMLA's sparse decoding with an attention sink.
    """
    outs = checks.tensor("outs", outs, ("S", "T", "H", LATENT_DIM), (BF16, F32))
    lses = checks.tensor("lses", lses, tuple(outs.shape[:3]), (F32,), outs.device)
    if outs.shape[0] == 0:
        raise ValueError("outs: no partials given, at least one needed")
    if sink is not None:
        sink = checks.tensor("sink", sink, (outs.shape[2],), (F32,), outs.device)
    return torch.ops.latentkv.merge_partials(outs, lses, sink)


def _check_rows(name: str, rows: object, tokens: int, device: torch.device) -> None:
    if not isinstance(rows, Rows):
        raise TypeError(f"{name}: {type(rows).__name__} given, latentkv.Rows needed")
    checks.same_device(device, **{f"{name}.cache": rows.cache})
    if rows.slots.shape[0] != tokens:
        raise ValueError(f"{name}.slots: {rows.slots.shape[0]} queries' slots given, query has {tokens}")
    if checks.is_checked() and rows.slots.numel():
        slots = rows.slots
        if rows.lengths is not None:  # entries past a length may hold anything
            used = torch.arange(slots.shape[1], device=device) < rows.lengths.unsqueeze(-1)
            slots = torch.where(used, slots, -1)
        checks.slots(slots.flatten(), slots.numel(), device, rows.capacity, rows.page_size, name=f"{name}.slots")


def _check_pair(window: KVLayout, extra: KVLayout) -> None:
    if not window.pairs_with(extra):
        works = ", ".join(m.name for m in KVLayout.members() if window.pairs_with(m))
        raise NotImplementedError(f"extra: {extra} rows cannot join a window of {window} rows; accepted: {works}")


def _check_rope(
    inverse_rope: tuple[Tensor, Tensor] | None, tokens: int, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    if inverse_rope is None:
        return None, None
    if not isinstance(inverse_rope, tuple) or len(inverse_rope) != 2:
        raise TypeError(f"inverse_rope: {type(inverse_rope).__name__} given, a tuple (freqs, positions) needed")
    freqs = checks.freqs(inverse_rope[0], device)
    return freqs, checks.positions(inverse_rope[1], tokens, device, freqs)


def _flat(rows: Rows | None) -> tuple[Tensor | None, Tensor | None, Tensor | None, str, int]:
    if rows is None:
        return None, None, None, "", 1
    return rows.cache, rows.slots, rows.lengths, rows.layout.name, rows.page_size


def _fake_sparse_mla(query: Tensor, *args: object) -> tuple[Tensor, Tensor]:
    return query.new_empty(tuple(query.shape)), query.new_empty(tuple(query.shape[:2]), dtype=F32)


def _fake_merge(outs: Tensor, lses: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    return outs.new_empty(tuple(outs.shape[1:]), dtype=BF16), lses.new_empty(tuple(lses.shape[1:]))


define(
    "attend",
    "sparse_mla(Tensor query, Tensor window, Tensor window_slots, Tensor? window_lengths, str window_layout, "
    "int window_page_size, Tensor? extra, Tensor? extra_slots, Tensor? extra_lengths, str extra_layout, "
    "int extra_page_size, float scale, Tensor? sink, Tensor? freqs, Tensor? positions, float empty_lse, int splits=1) "
    "-> (Tensor, Tensor)",
    reference.sparse_mla,
    _fake_sparse_mla,
    kernel="sparse_mla",
)
define(
    "attend",
    "merge_partials(Tensor outs, Tensor lses, Tensor? sink) -> (Tensor, Tensor)",
    reference.merge_partials,
    _fake_merge,
    kernel="merge_partials",
)
