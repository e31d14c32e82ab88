"""One decoding step over fixed buffers: the same function runs at once, on a CPU or a GPU, or is captured in a graph.

Before a step the host writes three numbers a row (token, position, request) into a fixed buffer; everything else, slots
and window rows and lengths, follows from them and from the page tables by tensor arithmetic inside the step. A step
serves a batch from a ladder of sizes. Rows beyond the requests at hand are padded: their request is -1, and no op
writes or reads a row for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from latentkv.model.cache import ModelCache
from latentkv.model.config import PAD_TOKEN
from latentkv.model.paged import PagedModel
from latentkv.ops._library import OPS

LADDER = (1, 2, 4, 8, 16, 32, 64, 128, 256)
FIELDS = 3  # of a row: token, position, request

# what a step calls; each must have a kernel before a step can be captured
STEP_OPS = (
    "norm_rope_store_kv",
    "compress1",
    "compress2",
    "store_index_key",
    "pack_index_query_weights",
    "index_logits",
    "select_topk",
    "select_blocks",
    "select_topk_in_blocks",
    "sparse_mla",
    "linear_fp32",
    "router_partials",
    "router_logits",
    "route_topk",
)


@dataclass(frozen=True)
class Outcome:
    """What a step returned.

    Attributes:
        logits: fp32 `[requests, rows, vocab]` on the device, padded rows included; the next step overwrites them.
        likeliest: each request's likeliest next byte or start token after each of its tokens.
    """

    logits: Tensor
    likeliest: list[list[int]]


def can_capture(device: torch.device) -> bool:
    """Whether a step can be captured there: on a GPU, every op with a kernel."""
    return device.type == "cuda" and not missing_kernels()


def missing_kernels() -> list[str]:
    """Ops of a step that run the reference on a GPU, which may wait for the device."""
    return [name for name in STEP_OPS if OPS[name].kernel is None]


class DecodeStep:
    """Steps of a few tokens a request, for any of a cache's requests.

    Args:
        model: the model.
        cache: its caches, made with `draft_rows` of at least `rows`.
        rows: most tokens of a request in a step: 1, and the drafts to verify.
        ladder: batch sizes, in requests; a step takes the least that holds its requests. Sizes past the cache's
            requests are left out, and that number itself is the last.
        capture: whether to capture a graph a size and replay it; None does where it is possible.

    Raises:
        ValueError: more rows than the cache is made for, or a bad ladder.
        NotImplementedError: capturing is asked for where it is not possible.
    """

    def __init__(
        self,
        model: PagedModel,
        cache: ModelCache,
        *,
        rows: int = 1,
        ladder: Sequence[int] = LADDER,
        capture: bool | None = None,
    ) -> None:
        if not 1 <= rows <= cache.draft_rows:
            raise ValueError(f"rows: {rows} given, the cache is made for 1 to {cache.draft_rows} rows a request")
        if not ladder or min(ladder) < 1:
            raise ValueError(f"ladder: {tuple(ladder)} given, sizes of at least 1 needed")
        if capture and not can_capture(model.device):
            reason = f"ops without a kernel: {', '.join(missing_kernels())}" if missing_kernels() else "no GPU"
            raise NotImplementedError(f"capture: not possible on {model.device} ({reason}); capture=False works")
        self.model, self.cache, self.rows = model, cache, rows
        most = min(max(ladder), cache.max_requests)
        self.ladder = (*sorted({size for size in ladder if size < most}), most)
        self.capture = can_capture(model.device) if capture is None else capture
        count, device = most * rows, model.device
        on_gpu = device.type == "cuda"
        self._given = torch.zeros(FIELDS * count, dtype=torch.int32, pin_memory=on_gpu)
        self._inputs = torch.zeros(FIELDS * count, dtype=torch.int32, device=device) if on_gpu else self._given
        self._copied = torch.cuda.Event() if on_gpu else None
        self._logits = torch.zeros(count, model.config.vocab, device=device)
        self._likeliest = torch.zeros(count, dtype=torch.int64, device=device)
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._pool: Any = None  # memory that the graphs share: one runs at a time

    def __call__(self, entries: Sequence[tuple[int, Sequence[int]]]) -> Outcome:
        """Append tokens to requests.

        Args:
            entries: open requests, each once, with 1 to `rows` tokens.

        Raises:
            ValueError: too many requests or tokens, a token outside the vocabulary, or as `ModelCache.extend`. Nothing
                has been reserved or written then.
        """
        counts = [len(tokens) for _, tokens in entries]
        self._check(entries, counts)
        starts = self.cache.extend([(request, count) for (request, _), count in zip(entries, counts, strict=True)])
        rows = self.width(max(counts))
        batch = self.size(len(entries))
        self.load(batch, rows, entries, starts)
        self.run(batch, rows)
        picks = self._likeliest[: batch * rows].view(batch, rows)[: len(entries)].tolist()
        logits = self._logits[: batch * rows].view(batch, rows, -1)[: len(entries)]
        return Outcome(logits, [row[:count] for row, count in zip(picks, counts, strict=True)])

    def size(self, requests: int) -> int:
        """The batch size that serves so many requests."""
        return next(size for size in self.ladder if size >= requests)

    def width(self, tokens: int) -> int:
        """The rows a request that serve so many tokens: 1 or all of `rows`."""
        return 1 if tokens == 1 else self.rows

    def load(self, batch: int, rows: int, entries: Sequence[tuple[int, Sequence[int]]], starts: Sequence[int]) -> None:
        """Write a step's inputs and the page tables to their fixed places, without waiting for the device."""
        tokens, positions, requests = [], [], []
        for (request, given), start in zip(entries, starts, strict=True):
            empty = rows - len(given)
            tokens += [*given, *[0] * empty]
            positions += [*range(start, start + len(given)), *[0] * empty]
            requests += [request] * len(given) + [-1] * empty
        empty = batch * rows - len(tokens)
        values = torch.tensor(
            [*tokens, *[0] * empty, *positions, *[0] * empty, *requests, *[-1] * empty], dtype=torch.int32
        )
        if self._copied is not None:
            self._copied.synchronize()  # the copy before read the host's buffer
        self._given[: values.numel()].copy_(values)
        self.cache.upload()
        if self._copied is not None:
            self._inputs[: values.numel()].copy_(self._given[: values.numel()], non_blocking=True)
            self._copied.record(torch.cuda.current_stream(self.model.device))

    def run(self, batch: int, rows: int) -> None:
        """Run the loaded step of a batch size: replay its graph, which is captured at first use, or call `body`."""
        if not self.capture:
            self.body(batch, rows)
            return
        if (batch, rows) not in self._graphs:
            self._graphs[batch, rows] = self._captured(batch, rows)
        self._graphs[batch, rows].replay()

    @torch.no_grad()
    def body(self, batch: int, rows: int) -> None:
        """The step itself: inputs, logits and likeliest tokens are fixed buffers, nothing depends on a value."""
        count = batch * rows
        tokens, positions, requests = self._inputs[: FIELDS * count].view(FIELDS, count)
        step = self.cache.address(tokens, positions, requests, rows=rows)
        logits = self.model.run(self.cache, step, all_logits=True)
        self._logits[:count].copy_(logits)
        torch.argmax(logits[:, :PAD_TOKEN], dim=-1, out=self._likeliest[:count])

    def prepare(self) -> None:
        """Capture every size now, the largest first, instead of at first use."""
        if not self.capture:
            return
        for rows in sorted({1, self.rows}, reverse=True):
            for batch in reversed(self.ladder):
                if (batch, rows) not in self._graphs:
                    self._graphs[batch, rows] = self._captured(batch, rows)

    def _captured(self, batch: int, rows: int) -> torch.cuda.CUDAGraph:
        """Capture a batch size; the inputs at hand survive, and no request's rows are touched."""
        device = self.model.device
        with torch.cuda.device(device):
            inputs = self._inputs.clone()
            self._inputs[: 2 * batch * rows] = 0
            self._inputs[2 * batch * rows :] = -1  # every row is padded
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):  # compiles, and lets libraries allocate their workspaces
                    self.body(batch, rows)
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=stream):
                self.body(batch, rows)
            self._pool = graph.pool()
            self._inputs.copy_(inputs)
        return graph

    def _check(self, entries: Sequence[tuple[int, Sequence[int]]], counts: Sequence[int]) -> None:
        if not 1 <= len(entries) <= self.ladder[-1]:
            raise ValueError(f"entries: {len(entries)} requests given, 1 to {self.ladder[-1]} fit a step")
        for (request, tokens), count in zip(entries, counts, strict=True):
            if not 1 <= count <= self.rows:
                raise ValueError(f"entries: {count} tokens for request {request}, 1 to {self.rows} fit a step")
            if not 0 <= min(tokens) <= max(tokens) < self.model.config.vocab:
                raise ValueError(f"entries: request {request} has a token outside 0..{self.model.config.vocab - 1}")
