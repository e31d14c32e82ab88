"""Bits per byte of held-out text under pairs of page layouts: what a smaller cache costs."""

from __future__ import annotations

import hashlib
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from latentkv.layout import KVLayout
from latentkv.model.cache import ModelCache
from latentkv.model.corpus import encode, read_corpus, read_text
from latentkv.model.paged import PagedModel, Picks

DEFAULT_PAIRS = (("bf16", "bf16"), ("v4", "v4"), ("v41", "v41"), ("v41", "v41_fp4"))
POSITION_BUCKETS = 8
LEAST_SPAN = 0.02  # bits per byte on the plot's axis


@dataclass(frozen=True)
class Row:
    """One pair of layouts.

    Attributes:
        window_layout: layout of window rows.
        row_layout: layout of compressed rows.
        bits_per_byte: mean over all predicted bytes.
        difference: to the first pair's, which is BF16 by default.
        bytes_per_token: compressed rows and index keys, measured from the pools.
        window_bytes: window rows of a request, whatever its length.
        agreement: share of selected rows that the first pair selected too, where more rows are visible than are picked;
            None when no context is that long.
        seconds: wall time.
        by_position: mean bits per byte in equal parts of the context.
    """

    window_layout: str
    row_layout: str
    bits_per_byte: float
    difference: float
    bytes_per_token: float
    window_bytes: int
    agreement: float | None
    seconds: float
    by_position: tuple[float, ...]

    @property
    def name(self) -> str:
        """Both layouts."""
        return f"{self.window_layout} + {self.row_layout}"


@dataclass(frozen=True)
class Report:
    """Every pair's row, and what was read.

    Attributes:
        source: the corpus or the file.
        windows: contexts evaluated.
        context: bytes of the longest.
        bytes: predicted bytes.
        topk: rows that each query selects.
        rows: one a pair.
    """

    source: str
    windows: int
    context: int
    bytes: int
    topk: int
    rows: tuple[Row, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Progress:
    """How far an evaluation is: the pair at work, tokens done and tokens in all pairs."""

    pair: str
    done: int
    total: int


def held_out_windows(context: int, windows: int, *, folder: Path | None = None) -> list[Tensor]:
    """The first bytes of held-out files, each opened by the start token.

    Files come in the order of their paths' SHA-256, those shorter than `context` bytes left out while enough are long.

    Args:
        context: bytes a window.
        windows: how many.
        folder: the corpus; the running Python's standard library by default.

    Raises:
        ValueError: a size below 1, or no files.
    """
    _check_sizes(context, windows)
    documents = [d for d in read_corpus(folder, held_out=True) if d.text]
    documents.sort(key=lambda d: (len(d.text) < context, hashlib.sha256(d.path.encode()).digest()))
    return [encode(d.text[:context]) for d in documents[:windows]]


def text_windows(path: Path, context: int, windows: int) -> list[Tensor]:
    """Consecutive windows of a text file, each opened by the start token.

    Args:
        path: UTF-8 text.
        context: bytes a window.
        windows: most windows.

    Raises:
        ValueError: a size below 1, or a file that is missing, empty or not text.
    """
    _check_sizes(context, windows)
    text = read_text(path)
    return [encode(text[i : i + context]) for i in range(0, len(text), context)][:windows]


def evaluate(
    model: PagedModel,
    windows: Sequence[Tensor],
    *,
    source: str,
    pairs: Sequence[tuple[KVLayout | str, KVLayout | str]] = DEFAULT_PAIRS,
    chunk: int = 256,
    requests: int = 2,
    progress: Callable[[Progress], None] | None = None,
) -> Report:
    """Predict every byte of some windows under each pair of layouts.

    Args:
        model: the model.
        windows: tokens of each context, the start token first.
        source: what the windows are of, for the report.
        pairs: (window layout, row layout); differences and agreement are to the first.
        chunk: tokens of a request a step.
        requests: windows that run side by side.
        progress: called after each step.

    Raises:
        ValueError: no pairs, no windows, or layouts that cannot be read together.
    """
    parsed = [(KVLayout.parse(w), KVLayout.parse(r)) for w, r in pairs]
    if not parsed or not windows:
        raise ValueError(f"evaluate: {len(parsed)} pairs and {len(windows)} windows given, one of each needed")
    predicted = sum(w.numel() - 1 for w in windows)
    longest = max(w.numel() - 1 for w in windows)
    report, first, reference = [], None, None
    for index, (window_layout, row_layout) in enumerate(parsed):
        name, before = f"{window_layout} + {row_layout}", index * predicted

        def advance(done: int, name: str = name, before: int = before) -> None:
            if progress is not None:
                progress(Progress(name, before + done, predicted * len(parsed)))

        started = time.perf_counter()
        bits, picks, cache = _run_pair(model, windows, window_layout, row_layout, chunk, requests, advance)
        seconds = time.perf_counter() - started
        mean = float(torch.cat(bits).mean())
        first = mean if first is None else first
        reference = picks if reference is None else reference
        report.append(
            Row(
                window_layout=str(window_layout),
                row_layout=str(row_layout),
                bits_per_byte=mean,
                difference=mean - first,
                bytes_per_token=cache.bytes_per_token(),
                window_bytes=cache.window_bytes_per_request(),
                agreement=agreement(picks, reference),
                seconds=seconds,
                by_position=_by_position(bits, longest),
            )
        )
    return Report(source, len(windows), longest, predicted, model.topk, tuple(report))


def _run_pair(
    model: PagedModel,
    windows: Sequence[Tensor],
    window_layout: KVLayout,
    row_layout: KVLayout,
    chunk: int,
    requests: int,
    advance: Callable[[int], None],
) -> tuple[list[Tensor], Picks, ModelCache]:
    """Bits of every predicted byte of each window, the selections, and the cache for its sizes."""
    longest = max(w.numel() for w in windows)
    cache = ModelCache(
        model.config,
        window_layout=window_layout,
        row_layout=row_layout,
        max_requests=min(requests, len(windows)),
        max_tokens=min(requests, len(windows)) * (longest + 128),
        chunk=chunk,
        device=model.device,
    )
    bits: list[list[Tensor]] = [[] for _ in windows]
    picks, done = Picks(), 0
    for start in range(0, len(windows), requests):
        group = {cache.open(): i for i in range(start, min(start + requests, len(windows)))}
        for at in range(0, longest - 1, chunk):
            parts = {r: windows[i][:-1][at : at + chunk] for r, i in group.items()}
            parts = {r: p for r, p in parts.items() if p.numel()}
            if not parts:
                break
            logits = model.step(cache, list(parts.items()), all_logits=True, picks=picks)
            targets = torch.cat([windows[group[r]][at + 1 : at + 1 + p.numel()] for r, p in parts.items()])
            loss = F.cross_entropy(logits, targets.to(logits.device), reduction="none").cpu() / math.log(2)
            for request, part in zip(parts, loss.split([p.numel() for p in parts.values()]), strict=True):
                bits[group[request]].append(part)
            done += targets.numel()
            advance(done)
        for request in group:
            cache.release(request)
    return [torch.cat(b) for b in bits], picks, cache


def agreement(picks: Picks, reference: Picks) -> float | None:
    """Share of picks that are among the reference's, over queries that see more rows than they pick."""
    same = total = 0
    for layer, steps in picks.by_layer.items():
        for ours, theirs in zip(steps, reference.by_layer[layer], strict=True):
            # a selection that takes all visible rows is 0, 1, 2, ...: its last pick is its rank
            full = (theirs[:, -1] >= theirs.shape[1]).nonzero().squeeze(1)
            ours, theirs = ours[full], theirs[full]
            same += int((ours.unsqueeze(2) == theirs.unsqueeze(1)).any(2).logical_and(ours >= 0).sum())
            total += int((ours >= 0).sum())
    return same / total if total else None


def _by_position(bits: list[Tensor], longest: int) -> tuple[float, ...]:
    edges = [longest * i // POSITION_BUCKETS for i in range(POSITION_BUCKETS + 1)]
    means = []
    for low, high in itertools.pairwise(edges):
        part = torch.cat([b[low:high] for b in bits])
        means.append(float(part.mean()) if part.numel() else math.nan)
    return tuple(means)


def _check_sizes(context: int, windows: int) -> None:
    for name, value in (("context", context), ("windows", windows)):
        if value < 1:
            raise ValueError(f"{name}: {value} is below 1")


def plot(report: Report, path: Path) -> None:
    """Draw quality against bytes per token, and the difference along the context, into an image file.

    Raises:
        ModuleNotFoundError: matplotlib is missing; the `plot` extra brings it.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    positions = [report.context * (2 * i + 1) / (2 * POSITION_BUCKETS) for i in range(POSITION_BUCKETS)]
    for i, row in enumerate(report.rows):
        left.plot(row.bytes_per_token, row.bits_per_byte, "o", label=row.name)
        place = {"xy": (row.bytes_per_token, row.bits_per_byte), "textcoords": "offset points", "ha": "center"}
        left.annotate(row.name, xytext=(0, 7 if i % 2 else -16), **place)
        change = [a - b for a, b in zip(row.by_position, report.rows[0].by_position, strict=True)]
        right.plot(positions, change, marker=".", label=row.name)
    left.set_xlabel("cache bytes per token (rows and index keys)")
    left.set_ylabel("bits per byte")
    left.margins(x=0.2, y=0.25)
    low, high = left.get_ylim()
    spare = max(0.0, LEAST_SPAN - (high - low)) / 2
    left.set_ylim(low - spare, high + spare)  # differences that are noise shall look like it
    right.set_xlabel("position in the context, bytes")
    right.set_ylabel(f"bits per byte, difference to {report.rows[0].name}")
    right.legend(frameon=False, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    figure.suptitle(f"{report.source}: {report.windows} contexts of up to {report.context} bytes, top-{report.topk}")
    figure.savefig(path, dpi=140)
    plt.close(figure)
