"""The caches of a model: page pools shared by several requests, and where each token of a step goes.

A logical page is 128 tokens. It is 128 rows of a ratio-1 pool, 64 of a ratio-2 pool, and as many index keys; because
pages of all pools lie in the same order, one page table serves rows and keys, and a slot means the same in both. Window
rows live in a ring of pages a request, since only the last 128 are ever read. Page 0 of each pool is the padding page
that compress and index writers skip, so it is never handed out.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import latentkv as lk
from latentkv.layout import LATENT_DIM, IndexKeyLayout, KVLayout
from latentkv.model.config import Mode, ModelConfig

PAGE_TOKENS = 128
WINDOW_PAGE_ROWS = 64
INDEX_PAGE_ROWS = 64
PAIR_RING = 2  # pending rows of a request in a ratio-2 source


class PageAllocator:
    """Hands out page ids 1..`pages` in a shuffled order, so that nothing can rely on neighbours."""

    def __init__(self, pages: int, *, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._free = list(range(1, pages + 1))
        self._random.shuffle(self._free)

    @property
    def free(self) -> int:
        """Pages left."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Remove `count` pages from the free ones.

        Raises:
            ValueError: fewer are left.
        """
        if count > len(self._free):
            raise ValueError(
                f"pages: {count} asked for, {len(self._free)} free; release a request or enlarge the cache"
            )
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def give(self, pages: Sequence[int]) -> None:
        """Return pages, to random places of the queue."""
        for page in pages:
            self._free.insert(self._random.randint(0, len(self._free)), page)


@dataclass(frozen=True)
class Step:
    """The tokens of one forward step, of any number of requests, and where they stand.

    Attributes:
        tokens: int64 `[T]`, each request's tokens in a row.
        positions: int32 `[T]`.
        requests: int32 `[T]`, the request of each token.
        window_slots: int32 `[T]`, where a token's window row is written.
        window_reads: int32 `[T, 128]`, the window rows that a token attends, -1 where there is none.
        raw_slots: int32 `[T]`, the token's place in logical pages; a ratio-r row stands at `raw_slot // r`.
        pair_slots: int32 `[T]`, the ratio-2 row that a token completes, -1 for a token of even position.
        lengths: visible rows of each token, int32 `[T]` by ratio.
        tables: page table of the step's requests, int32 `[B, columns]` by ratio, in pages of 64 index keys.
        table_rows: int32 `[T]`, the row of `tables` of each token.
        first_rows: int32 `[B]`, each request's first token in the step.
        row_counts: int32 `[B]`.
        longest: the largest visible length by ratio.
        decode: whether each request has one token.
    """

    tokens: Tensor
    positions: Tensor
    requests: Tensor
    window_slots: Tensor
    window_reads: Tensor
    raw_slots: Tensor
    pair_slots: Tensor
    lengths: dict[int, Tensor]
    tables: dict[int, Tensor]
    table_rows: Tensor
    first_rows: Tensor
    row_counts: Tensor
    longest: dict[int, int]
    decode: bool

    @property
    def last_rows(self) -> Tensor:
        """int64 `[B]`, each request's last token in the step."""
        return (self.first_rows + self.row_counts - 1).long()


class ModelCache:
    """Page pools of every layer, page tables of every request.

    Args:
        config: the model's dimensions.
        window_layout: layout of window rows.
        row_layout: layout of compressed rows; `window_layout.pairs_with` it.
        max_requests: requests that may be open at once.
        max_tokens: tokens that all requests together may hold.
        chunk: most tokens of a request in one step; the window ring holds the window and one chunk.
        device: where the pools live.
        seed: of the page order.

    Raises:
        ValueError: layouts that no reader takes together, or a size below one.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        window_layout: KVLayout | str = KVLayout.V41,
        row_layout: KVLayout | str = KVLayout.V41_FP4,
        max_requests: int = 1,
        max_tokens: int = 8192,
        chunk: int = 256,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> None:
        self.config, self.device, self.chunk = config, torch.device(device), chunk
        self.window_layout, self.row_layout = KVLayout.parse(window_layout), KVLayout.parse(row_layout)
        if not self.window_layout.pairs_with(self.row_layout):
            raise ValueError(f"row_layout: {self.row_layout} rows cannot be read together with {self.window_layout}")
        for name, value in (("max_requests", max_requests), ("max_tokens", max_tokens), ("chunk", chunk)):
            if value < 1:
                raise ValueError(f"{name}: {value} is below 1")
        self.ring_pages = -(-(config.window - 1 + chunk) // WINDOW_PAGE_ROWS)
        self.ring_rows = self.ring_pages * WINDOW_PAGE_ROWS
        window_pages, pages = max_requests * self.ring_pages, -(-max_tokens // PAGE_TOKENS)
        self._window_pages = PageAllocator(window_pages, seed=seed)
        self._pages = PageAllocator(pages, seed=seed + 1)
        self.window = [
            lk.new_kv_cache(self.window_layout, window_pages + 1, WINDOW_PAGE_ROWS, device=self.device)
            for _ in range(config.layers)
        ]
        self.rows: dict[int, Tensor] = {}
        self.keys: dict[int, lk.IndexKeyCache] = {}
        self.pairs: dict[int, Tensor] = {}
        for layer, role in enumerate(config.roles()):
            if role.mode is not Mode.FULL:
                continue
            rows = PAGE_TOKENS // role.ratio
            self.rows[layer] = lk.new_kv_cache(self.row_layout, pages + 1, rows, device=self.device)
            self.keys[layer] = lk.new_index_key_cache(
                IndexKeyLayout.FUSED, (pages + 1) * rows // INDEX_PAGE_ROWS, INDEX_PAGE_ROWS, device=self.device
            )
            if role.ratio == 2:
                self.pairs[layer] = torch.zeros(max_requests * PAIR_RING, 2 * LATENT_DIM, device=self.device)
        columns = min(pages, -(-config.max_positions // PAGE_TOKENS))
        self._window_table = torch.zeros(max_requests, self.ring_pages, dtype=torch.int32, device=self.device)
        self._table = torch.zeros(max_requests, columns, dtype=torch.int32, device=self.device)
        self._owned: dict[int, tuple[list[int], list[int]]] = {}
        self._lengths: dict[int, int] = {}

    # --- requests -----------------------------------------------------------------------------------------------------

    def open(self) -> int:
        """Start a request and return its id.

        Raises:
            ValueError: as many requests as the cache was made for are open.
        """
        free = [r for r in range(self._table.shape[0]) if r not in self._owned]
        if not free:
            raise ValueError(f"requests: {len(self._owned)} are open, which is all that the cache was made for")
        pages = self._window_pages.take(self.ring_pages)
        self._owned[free[0]] = (pages, [])
        self._lengths[free[0]] = 0
        self._window_table[free[0]] = torch.tensor(pages, dtype=torch.int32)
        return free[0]

    def release(self, request: int) -> None:
        """End a request and free its pages.

        Raises:
            ValueError: the request is not open.
        """
        self.length(request)
        window_pages, pages = self._owned.pop(request)
        del self._lengths[request]
        self._window_pages.give(window_pages)
        self._pages.give(pages)
        self._table[request] = 0
        self._window_table[request] = 0

    def length(self, request: int) -> int:
        """Tokens that a request holds.

        Raises:
            ValueError: the request is not open.
        """
        if request not in self._lengths:
            raise ValueError(f"request: {request} is not open")
        return self._lengths[request]

    # --- sizes --------------------------------------------------------------------------------------------------------

    def bytes_per_token(self) -> float:
        """Bytes of compressed rows and index keys a token, measured from the pools; it grows with the context."""
        total = 0.0
        for layer, rows in self.rows.items():
            keys = self.keys[layer]
            tensors = [rows, *(t for t in (keys.payload, keys.scale) if t is not None)]
            total += sum(t.numel() * t.element_size() for t in tensors) / (rows.shape[0] * PAGE_TOKENS)
        return total

    def window_bytes_per_request(self) -> int:
        """Bytes of the window that a request needs at any length, over all layers: 128 rows each."""
        page = self.window[0].shape[1] * self.window[0].element_size()
        return page * self.config.window // WINDOW_PAGE_ROWS * self.config.layers

    # --- steps --------------------------------------------------------------------------------------------------------

    def plan(self, chunks: Sequence[tuple[int, Sequence[int] | Tensor]]) -> Step:
        """Reserve pages for the next tokens of some requests and say where everything goes.

        Args:
            chunks: request ids, each once, with the tokens to append.

        Raises:
            ValueError: a request that is not open or comes twice, an empty or too long chunk, a context past the
                model's positions, or too few free pages. Nothing has been reserved then.
        """
        if len({request for request, _ in chunks}) != len(chunks) or not chunks:
            raise ValueError(f"chunks: requests {[r for r, _ in chunks]} given, at least one and each once needed")
        tokens = [torch.as_tensor(t, dtype=torch.int64) for _, t in chunks]
        starts, counts = [self.length(r) for r, _ in chunks], [t.numel() for t in tokens]
        needed = []
        for (request, _), start, count in zip(chunks, starts, counts, strict=True):
            if not 1 <= count <= self.chunk:
                raise ValueError(f"chunks: {count} tokens for request {request}, 1 to {self.chunk} fit a step")
            if start + count > self.config.max_positions:
                raise ValueError(
                    f"chunks: request {request} would pass the model's {self.config.max_positions} positions"
                )
            needed.append(-(-(start + count) // PAGE_TOKENS) - len(self._owned[request][1]))
        if sum(needed) > self._pages.free:
            raise ValueError(f"pages: {sum(needed)} needed, {self._pages.free} free; enlarge the cache's max_tokens")
        for (request, _), start, count, more in zip(chunks, starts, counts, needed, strict=True):
            owned = self._owned[request][1]
            if more:
                pages = self._pages.take(more)
                self._table[request, len(owned) : len(owned) + more] = torch.tensor(pages, dtype=torch.int32)
                owned.extend(pages)
            self._lengths[request] = start + count
        return self._step([r for r, _ in chunks], starts, counts, torch.cat(tokens))

    def _step(self, requests: list[int], starts: list[int], counts: list[int], tokens: Tensor) -> Step:
        device, window = self.device, self.config.window
        batch, count = len(requests), tokens.numel()
        counts_t = torch.tensor(counts)
        first = torch.cumsum(counts_t, 0) - counts_t
        table_rows = torch.repeat_interleave(torch.arange(batch), counts_t, output_size=count)
        positions = torch.arange(count) - first[table_rows] + torch.tensor(starts)[table_rows]
        owner = torch.tensor(requests)[table_rows].to(device)
        positions, table_rows = positions.to(device), table_rows.to(device)
        near = positions.unsqueeze(1) + torch.arange(1 - window, 1, device=device)
        ring = near % self.ring_rows
        reads = self._window_table[owner.unsqueeze(1), ring // WINDOW_PAGE_ROWS] * WINDOW_PAGE_ROWS
        reads = torch.where(near >= 0, reads + ring % WINDOW_PAGE_ROWS, -1).to(torch.int32)
        raw = self._table[owner, positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS
        end = max(s + c for s, c in zip(starts, counts, strict=True))
        table = self._table[torch.tensor(requests, device=device), : -(-end // PAGE_TOKENS)]
        tables, lengths, longest = {}, {}, {}
        for ratio in sorted({r for r in self.config.ratios if r}):
            per_page = PAGE_TOKENS // ratio // INDEX_PAGE_ROWS  # index pages in a logical page
            spread = table.unsqueeze(-1) * per_page + torch.arange(per_page, dtype=torch.int32, device=device)
            tables[ratio] = spread.flatten(1).contiguous()
            lengths[ratio] = ((positions + 1) // ratio).to(torch.int32)
            longest[ratio] = end // ratio
        return Step(
            tokens=tokens.to(device),
            positions=positions.to(torch.int32),
            requests=owner.to(torch.int32),
            window_slots=reads[:, -1].contiguous(),
            window_reads=reads,
            raw_slots=raw.to(torch.int32),
            pair_slots=torch.where(positions % 2 == 1, raw // 2, -1).to(torch.int32),
            lengths=lengths,
            tables=tables,
            table_rows=table_rows.to(torch.int32),
            first_rows=first.to(device, torch.int32),
            row_counts=counts_t.to(device, torch.int32),
            longest=longest,
            decode=max(counts) == 1,
        )
