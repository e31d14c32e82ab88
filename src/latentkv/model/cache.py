"""The caches of a model: page pools shared by several requests, and where each token of a step goes.

A logical page is 128 tokens. It is 128 rows of a ratio-1 pool, 64 of a ratio-2 pool, and as many index keys; because
pages of all pools lie in the same order, one page table serves rows and keys, and a slot means the same in both. Window
rows live in a ring of pages a request, since only the last 128 are ever read. Page 0 of each pool is the padding page
that compress and index writers skip, so it is never handed out.

Pages are taken and given back on the host; the tables lie on the device at fixed addresses, so that a captured step
finds them. `ModelCache.address` turns tokens, positions and requests into slots with tensor arithmetic alone, inside a
captured step or outside.
"""

from __future__ import annotations

import os
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
DEFAULT_TOKENS = 8192


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


class PageTable:
    """Pages of every request, kept on the host and copied to the device when they have changed.

    Args:
        requests: rows.
        columns: pages a request may have.
        device: where kernels read the table.
    """

    def __init__(self, requests: int, columns: int, device: torch.device) -> None:
        on_gpu = device.type != "cpu"
        self._host = torch.zeros(requests, columns, dtype=torch.int32, pin_memory=on_gpu)
        self.pages = torch.zeros(requests, columns, dtype=torch.int32, device=device) if on_gpu else self._host
        self._copied: torch.cuda.Event | None = None
        self._changed = False

    def put(self, request: int, column: int, pages: Sequence[int]) -> None:
        """Write a request's pages from `column` on."""
        if self._copied is not None:  # the copy reads the host's table
            self._copied.synchronize()
            self._copied = None
        self._host[request, column : column + len(pages)] = torch.tensor(pages, dtype=torch.int32)
        self._changed = True

    def upload(self) -> bool:
        """Bring the device up to date; returns whether anything had changed."""
        if not self._changed:
            return False
        self._changed = False
        if self.pages is not self._host:
            self.pages.copy_(self._host, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(self.pages.device))
        return True


@dataclass(frozen=True)
class Step:
    """The tokens of one forward step, of any number of requests, and where they stand.

    A padded row has request -1, no slots to write or read and no visible rows: it touches nothing.

    Attributes:
        tokens: int64 or int32 `[T]`, each request's tokens in a row.
        positions: int32 `[T]`.
        requests: int32 `[T]`, the request of each token, which is its row of the page tables.
        window_slots: int32 `[T]`, where a token's window row is written.
        window_reads: int32 `[T, 128]`, the window rows that a token attends, -1 where there is none.
        raw_slots: int32 `[T]`, the token's place in logical pages; a ratio-r row stands at `raw_slot // r`. 0 for a
            padded row.
        pair_slots: int32 `[T]`, the ratio-2 row that a token completes, -1 for a token of even position.
        lengths: visible rows of each token, int32 `[T]` by ratio.
        tables: page tables of all requests, int32 `[requests, columns]` by ratio, in pages of 64 index keys.
        widths: bound of the visible lengths by ratio.
        rows: rows a request where all have equally many, padded ones included; 0 for chunks of any length.
        first_rows: int32 `[B]`, each chunk's first token; None unless `rows` is 0.
        row_counts: int32 `[B]`, its tokens; None unless `rows` is 0.
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
    widths: dict[int, int]
    rows: int
    first_rows: Tensor | None = None
    row_counts: Tensor | None = None

    @property
    def last_rows(self) -> Tensor:
        """int64, each request's last token in the step."""
        if self.first_rows is None or self.row_counts is None:
            return torch.arange(self.rows - 1, self.tokens.shape[0], self.rows, device=self.tokens.device)
        return (self.first_rows + self.row_counts - 1).long()


class ModelCache:
    """Page pools of every layer, page tables of every request.

    Args:
        config: the model's dimensions.
        window_layout: layout of window rows.
        row_layout: layout of compressed rows; `window_layout.pairs_with` it.
        max_requests: requests that may be open at once.
        max_tokens: tokens that all requests together may hold, in whole pages; 8192 if neither this nor `pages` nor
            `memory` is given.
        pages: the same, as a number of pages of 128 tokens.
        memory: the same, as a share of the device's free memory that all pools together may take.
        max_context: tokens of the longest request; the model's positions by default.
        chunk: most tokens of a request in one step; the window ring holds the window and one chunk.
        draft_rows: most rows of a request in a verifying step; the ring of pending tokens holds as many.
        device: where the pools live.
        seed: of the page order.

    Raises:
        ValueError: layouts that no reader takes together, a size below one, several sizes at once, or a share of the
            memory that holds no page.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        window_layout: KVLayout | str = KVLayout.V41,
        row_layout: KVLayout | str = KVLayout.V41_FP4,
        max_requests: int = 1,
        max_tokens: int | None = None,
        pages: int | None = None,
        memory: float | None = None,
        max_context: int | None = None,
        chunk: int = 256,
        draft_rows: int = 1,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> None:
        self.config, self.device = config, torch.device(device)
        self.max_requests, self.chunk, self.draft_rows = max_requests, chunk, draft_rows
        self.window_layout, self.row_layout = KVLayout.parse(window_layout), KVLayout.parse(row_layout)
        self.max_context = min(max_context or config.max_positions, config.max_positions)
        if not self.window_layout.pairs_with(self.row_layout):
            raise ValueError(f"row_layout: {self.row_layout} rows cannot be read together with {self.window_layout}")
        sizes = {"max_requests": max_requests, "max_context": self.max_context, "chunk": chunk}
        for name, value in {**sizes, "draft_rows": draft_rows, "max_tokens": max_tokens, "pages": pages}.items():
            if value is not None and value < 1:
                raise ValueError(f"{name}: {value} is below 1")
        self.ring_pages = -(-(config.window - 1 + max(chunk, draft_rows)) // WINDOW_PAGE_ROWS)
        self.ring_rows = self.ring_pages * WINDOW_PAGE_ROWS
        self.pair_ring = 1 << draft_rows.bit_length()  # the least power of two above draft_rows
        columns = -(-self.max_context // PAGE_TOKENS)
        if sum(x is not None for x in (max_tokens, pages, memory)) > 1:
            raise ValueError("pages: one of max_tokens, pages and memory says how many, several are given")
        if memory is not None:
            pages = min(self._pages_in(memory, max_requests), max_requests * columns)
        elif pages is None:
            pages = -(-(max_tokens or DEFAULT_TOKENS) // PAGE_TOKENS)
        columns = min(pages, columns)
        window_pages = max_requests * self.ring_pages
        self._window_pages = PageAllocator(window_pages, seed=seed)
        self._pages = PageAllocator(pages, seed=seed + 1)
        self.window = [
            lk.new_kv_cache(self.window_layout, window_pages + 1, WINDOW_PAGE_ROWS, device=self.device)
            for _ in range(config.layers)
        ]
        self.rows: dict[int, Tensor] = {}
        self.keys: dict[int, lk.IndexKeyCache] = {}
        self.pairs: dict[int, Tensor] = {}
        for layer, ratio in self._sources():
            rows = PAGE_TOKENS // ratio
            self.rows[layer] = lk.new_kv_cache(self.row_layout, pages + 1, rows, device=self.device)
            self.keys[layer] = lk.new_index_key_cache(
                IndexKeyLayout.FUSED, (pages + 1) * rows // INDEX_PAGE_ROWS, INDEX_PAGE_ROWS, device=self.device
            )
            if ratio == 2:
                self.pairs[layer] = torch.zeros(max_requests * self.pair_ring, 2 * LATENT_DIM, device=self.device)
        self._window_table = PageTable(max_requests, self.ring_pages, self.device)
        self._table = PageTable(max_requests, columns, self.device)
        self.tables = {
            ratio: torch.zeros(max_requests, columns * self._index_pages(ratio), dtype=torch.int32, device=self.device)
            for ratio in sorted({r for r in config.ratios if r})
        }
        self._near = torch.arange(1 - config.window, 1, dtype=torch.int32, device=self.device)
        self._closed = list(range(max_requests))
        self._owned: dict[int, tuple[list[int], list[int]]] = {}
        self._lengths: dict[int, int] = {}
        self._planned: dict[int, int] = {}  # tokens that each request got last

    def _sources(self) -> list[tuple[int, int]]:
        """Layer and ratio of the layers that make rows."""
        return [(i, role.ratio) for i, role in enumerate(self.config.roles()) if role.mode is Mode.FULL]

    @staticmethod
    def _index_pages(ratio: int) -> int:
        """Pages of index keys in a logical page."""
        return PAGE_TOKENS // ratio // INDEX_PAGE_ROWS

    def _pages_in(self, memory: float, max_requests: int) -> int:
        """Logical pages that fit a share of the device's free memory beside the requests' windows."""
        if not 0.0 < memory <= 1.0:
            raise ValueError(f"memory: {memory} given, a share above 0 and up to 1 needed")
        free = free_bytes(self.device)
        window = WINDOW_PAGE_ROWS * self.config.layers * self.window_layout.page_bytes(WINDOW_PAGE_ROWS)
        fixed = (max_requests * self.ring_pages + 1) * window // WINDOW_PAGE_ROWS
        page = 0
        for _, ratio in self._sources():
            rows = PAGE_TOKENS // ratio
            page += self.row_layout.page_bytes(rows)
            page += IndexKeyLayout.FUSED.page_bytes(INDEX_PAGE_ROWS) * self._index_pages(ratio)
            fixed += max_requests * self.pair_ring * 2 * LATENT_DIM * 4 if ratio == 2 else 0
        pages = (int(free * memory) - fixed) // page - 1 if page else 1  # page 0 is padding
        if pages < 1:
            raise ValueError(
                f"memory: {memory} of {free} free bytes holds no page; {max_requests} windows take {fixed} and a page "
                f"takes {page}"
            )
        return pages

    # --- requests -----------------------------------------------------------------------------------------------------

    def open(self) -> int:
        """Start a request and return its id.

        Raises:
            ValueError: as many requests as the cache was made for are open.
        """
        if not self._closed:
            raise ValueError(f"requests: {len(self._owned)} are open, which is all that the cache was made for")
        request = min(self._closed)
        self._closed.remove(request)
        pages = self._window_pages.take(self.ring_pages)
        self._owned[request] = (pages, [])
        self._lengths[request] = 0
        self._planned[request] = 0
        self._window_table.put(request, 0, pages)
        return request

    def release(self, request: int) -> None:
        """End a request and free its pages.

        Raises:
            ValueError: the request is not open.
        """
        self.length(request)
        window_pages, pages = self._owned.pop(request)
        del self._lengths[request], self._planned[request]
        self._closed.append(request)
        self._window_pages.give(window_pages)
        self._pages.give(pages)

    def length(self, request: int) -> int:
        """Tokens that a request holds.

        Raises:
            ValueError: the request is not open.
        """
        if request not in self._lengths:
            raise ValueError(f"request: {request} is not open")
        return self._lengths[request]

    def extend(self, counts: Sequence[tuple[int, int]]) -> list[int]:
        """Reserve pages for the next tokens of some requests.

        Args:
            counts: request ids, each once, with the number of tokens to append.

        Returns:
            The position of each request's first new token.

        Raises:
            ValueError: a request that is not open or comes twice, no tokens or more than a step takes, a context past
                the cache's longest, or too few free pages. Nothing has been reserved then.
        """
        if len({request for request, _ in counts}) != len(counts) or not counts:
            raise ValueError(f"chunks: requests {[r for r, _ in counts]} given, at least one and each once needed")
        starts = [self.length(request) for request, _ in counts]
        needed = []
        for (request, count), start in zip(counts, starts, strict=True):
            if not 1 <= count <= max(self.chunk, self.draft_rows):
                raise ValueError(f"chunks: {count} tokens for request {request}, 1 to {self.chunk} fit a step")
            if start + count > self.max_context:
                limit = "the model's" if self.max_context == self.config.max_positions else "the cache's"
                raise ValueError(f"chunks: request {request} would pass {limit} {self.max_context} positions")
            needed.append(max(0, pages_of(start + count) - len(self._owned[request][1])))
        if sum(needed) > self._pages.free:
            raise ValueError(f"pages: {sum(needed)} needed, {self._pages.free} free; enlarge the cache's max_tokens")
        for (request, count), start, more in zip(counts, starts, needed, strict=True):
            owned = self._owned[request][1]
            if more:
                pages = self._pages.take(more)
                self._table.put(request, len(owned), pages)
                owned.extend(pages)
            self._lengths[request] = start + count
            self._planned[request] = count
        return starts

    def keep(self, request: int, count: int) -> None:
        """Keep the first `count` of the tokens that a request got last: the others are rejected drafts.

        Rejected tokens leave bytes behind, in slots that nothing sees before the tokens that come in their place have
        been written.

        Raises:
            ValueError: the request is not open, or got fewer tokens.
        """
        planned = self._planned.get(request, 0)
        if not 1 <= count <= planned:
            raise ValueError(f"keep: {count} of request {request}'s last {planned} tokens")
        if planned - count >= self.draft_rows:
            raise ValueError(f"keep: {planned - count} tokens to reject, at most {self.draft_rows - 1} can be")
        self._lengths[request] -= planned - count
        self._planned[request] = count
        owned = self._owned[request][1]
        used = pages_of(self._lengths[request])
        self._pages.give(owned[used:])
        del owned[used:]

    # --- sizes --------------------------------------------------------------------------------------------------------

    @property
    def free_pages(self) -> int:
        """Logical pages that no request has."""
        return self._pages.free

    @property
    def pools(self) -> list[Tensor]:
        """Every tensor that steps write."""
        keys = [t for k in self.keys.values() for t in (k.payload, k.scale) if t is not None]
        return [*self.window, *self.rows.values(), *keys, *self.pairs.values()]

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
            ValueError: as `extend`. Nothing has been reserved then.
        """
        tokens = [torch.as_tensor(t, dtype=torch.int64) for _, t in chunks]
        counts = [t.numel() for t in tokens]
        starts = self.extend([(request, count) for (request, _), count in zip(chunks, counts, strict=True)])
        self.upload()
        count = sum(counts)
        counts_t = torch.tensor(counts)
        first = torch.cumsum(counts_t, 0) - counts_t
        row = torch.repeat_interleave(torch.arange(len(counts)), counts_t, output_size=count)
        positions = torch.arange(count) - first[row] + torch.tensor(starts)[row]
        requests = torch.tensor([r for r, _ in chunks])[row]
        decode = max(counts) == 1
        return self.address(
            torch.cat(tokens).to(self.device),
            positions.to(self.device, torch.int32),
            requests.to(self.device, torch.int32),
            rows=1 if decode else 0,
            longest=max(s + c for s, c in zip(starts, counts, strict=True)),
            first_rows=None if decode else first.to(self.device, torch.int32),
            row_counts=None if decode else counts_t.to(self.device, torch.int32),
        )

    def upload(self) -> None:
        """Bring the page tables that steps read up to date with the pages that requests have."""
        self._window_table.upload()
        if self._table.upload():
            for ratio, table in self.tables.items():
                pages = self._index_pages(ratio)
                offsets = torch.arange(pages, dtype=torch.int32, device=self.device)
                torch.add(offsets, self._table.pages.unsqueeze(-1), alpha=pages, out=table.unflatten(1, (-1, pages)))

    def address(
        self,
        tokens: Tensor,
        positions: Tensor,
        requests: Tensor,
        *,
        rows: int,
        longest: int | None = None,
        first_rows: Tensor | None = None,
        row_counts: Tensor | None = None,
    ) -> Step:
        """Where tokens go, by tensor arithmetic alone: nothing here looks at a value or waits for the device.

        Args:
            tokens: int64 or int32 `[T]`.
            positions: int32 `[T]`.
            requests: int32 `[T]`; -1 marks a padded row.
            rows: rows a request where all have equally many, 0 for chunks.
            longest: tokens that the longest request holds; the cache's longest context if None.
            first_rows: of chunks, int32 `[B]`.
            row_counts: of chunks, int32 `[B]`.
        """
        live = requests >= 0
        owner = requests.clamp(min=0).long()
        near = positions.unsqueeze(1) + self._near
        ring = near % self.ring_rows
        pages = self._window_table.pages[owner.unsqueeze(1), (ring // WINDOW_PAGE_ROWS).long()]
        reads = torch.where(live.unsqueeze(1) & (near >= 0), pages * WINDOW_PAGE_ROWS + ring % WINDOW_PAGE_ROWS, -1)
        raw = self._table.pages[owner, (positions // PAGE_TOKENS).long()] * PAGE_TOKENS + positions % PAGE_TOKENS
        raw = torch.where(live, raw, 0)
        limit = self._table.pages.shape[1] * PAGE_TOKENS if longest is None else longest
        return Step(
            tokens=tokens,
            positions=positions,
            requests=requests,
            window_slots=reads[:, -1].contiguous(),
            window_reads=reads,
            raw_slots=raw,
            pair_slots=torch.where(live & (positions % 2 == 1), raw // 2, -1),
            lengths={ratio: torch.where(live, (positions + 1) // ratio, 0) for ratio in self.tables},
            tables=self.tables,
            widths={ratio: max(1, limit // ratio) for ratio in self.tables},
            rows=rows,
            first_rows=first_rows,
            row_counts=row_counts,
        )


def pages_of(tokens: int) -> int:
    """Logical pages that hold so many tokens."""
    return -(-tokens // PAGE_TOKENS)


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated: free on the device, and cached by PyTorch without being in use."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
