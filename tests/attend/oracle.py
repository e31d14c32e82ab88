"""Sparse attention and merging once more, in fp64 and in loops, with what fp32 or bf16 arithmetic may lose."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

LOWEST_SCORE = float(np.finfo(np.float32).min)  # a row that counts has no lower one
Array = np.ndarray
Segment = tuple[Array, Array, "Array | None"]  # rows of every slot fp64 [capacity, 512], slots [T, K], lengths [T]


@dataclass
class Result:
    """Out `[T, H, 512]` and lse `[T, H]`; `mass` is the out of absolute values, `blur` a score's rounding error."""

    out: Array
    lse: Array
    mass: Array
    blur: Array


def sparse_mla(
    query: Array,
    segments: list[Segment],
    *,
    scale: float = 512**-0.5,
    sink: Array | None = None,
    angles: Array | None = None,
) -> Result:
    """`angles` fp64 `[T, 64]`: the (cos, sin) pairs by which each token's out is rotated back."""
    tokens, heads = query.shape[:2]
    shape = (tokens, heads)
    result = Result(np.zeros((*shape, 512)), np.full(shape, -np.inf), np.zeros((*shape, 512)), np.zeros(shape))
    for t in range(tokens):
        rows = [table[s] for table, slots, lengths in segments for s in valid(slots[t], lengths, t, len(table))]
        for h in range(heads):
            if rows:
                _attend(result, t, h, query[t, h], np.stack(rows), scale, None if sink is None else sink[h])
    if angles is not None:
        _rotate_back(result, angles)
    return result


def valid(slots: Array, lengths: Array | None, t: int, capacity: int) -> list[int]:
    """The slots of one token that count, in order."""
    count = len(slots) if lengths is None else min(max(int(lengths[t]), 0), len(slots))
    return [int(s) for s in slots[:count] if 0 <= int(s) < capacity]


def _attend(result: Result, t: int, h: int, query: Array, rows: Array, scale: float, sink: float | None) -> None:
    scores = np.array([float(np.dot(query, row)) * scale for row in rows])
    scores = np.where(scores < LOWEST_SCORE, LOWEST_SCORE, scores)
    top = scores.max()
    weights = np.exp(scores - top)
    result.lse[t, h] = top + np.log(weights.sum())
    result.blur[t, h] = 2.0**-19 * max(float(np.dot(np.abs(query), np.abs(row))) for row in rows) * scale
    with np.errstate(over="ignore"):
        share = weights / (weights.sum() + (0.0 if sink is None else np.exp(sink - top)))
    result.out[t, h] = share @ rows
    result.mass[t, h] = share @ np.abs(rows)


def _rotate_back(result: Result, angles: Array) -> None:
    cos, sin = angles[:, None, 0::2], angles[:, None, 1::2]
    re, im = result.out[..., 448::2].copy(), result.out[..., 449::2].copy()
    result.out[..., 448::2] = re * cos + im * sin
    result.out[..., 449::2] = im * cos - re * sin
    re, im = result.mass[..., 448::2].copy(), result.mass[..., 449::2].copy()
    result.mass[..., 448::2] = re * np.abs(cos) + im * np.abs(sin)
    result.mass[..., 449::2] = im * np.abs(cos) + re * np.abs(sin)


def merge(outs: Array, lses: Array, sink: Array | None = None) -> tuple[Array, Array]:
    """Out `[T, H, 512]` and lse `[T, H]` of partials `[S, T, H, 512]` and `[S, T, H]`; an infinite lse is empty."""
    splits, tokens, heads = lses.shape
    out, lse = np.zeros((tokens, heads, 512)), np.full((tokens, heads), -np.inf)
    for t in range(tokens):
        for h in range(heads):
            parts = [s for s in range(splits) if np.isfinite(lses[s, t, h])]
            if not parts:
                continue
            top = max(lses[s, t, h] for s in parts)
            weights = {s: np.exp(lses[s, t, h] - top) for s in parts}
            total = sum(weights.values())
            lse[t, h] = top + np.log(total)
            with np.errstate(over="ignore"):
                denominator = total + (0.0 if sink is None else np.exp(sink[h] - top))
            out[t, h] = sum(weights[s] * outs[s, t, h] for s in parts) / denominator
    return out, lse
