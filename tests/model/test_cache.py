"""Page allocation and the places of a step's tokens."""

from __future__ import annotations

import random

import pytest
import torch

from latentkv.model import cache as cache_module
from latentkv.model.cache import PAGE_TOKENS, WINDOW_PAGE_ROWS, ModelCache, PageAllocator
from latentkv.model.config import ModelConfig


def make(config: ModelConfig, **options) -> ModelCache:
    return ModelCache(config, **{"max_requests": 3, "max_tokens": 1024, "chunk": 64, **options})


def test_allocator_hands_out_shuffled_pages_and_never_page_zero():
    allocator = PageAllocator(50, seed=1)
    pages = allocator.take(50)
    assert sorted(pages) == list(range(1, 51))
    assert pages != sorted(pages)
    with pytest.raises(ValueError, match="1 asked for, 0 free"):
        allocator.take(1)
    allocator.give(pages[:3])
    assert sorted(allocator.take(3)) == sorted(pages[:3])


def test_no_two_live_tokens_share_a_slot_whatever_the_history(config: ModelConfig):
    cache, rng = make(config), random.Random(4)
    where: dict[tuple[int, int], tuple[int, int]] = {}  # (request, position) -> raw slot, window slot
    live: dict[int, int] = {}
    for _ in range(60):
        if len(live) < 3 and rng.random() < 0.3:
            live[cache.open()] = 0
        elif live and rng.random() < 0.15:
            request = rng.choice(list(live))
            cache.release(request)
            del live[request]
            where = {k: v for k, v in where.items() if k[0] != request}
        chunks = [(r, [1] * rng.randint(1, 20)) for r in live if rng.random() < 0.8 and live[r] < 250]
        if not chunks:
            continue
        step = cache.plan(chunks)
        at = 0
        for request, part in chunks:
            for i in range(len(part)):
                assert int(step.positions[at]) == live[request] + i
                assert int(step.requests[at]) == request
                where[request, live[request] + i] = (int(step.raw_slots[at]), int(step.window_slots[at]))
                at += 1
            live[request] += len(part)
        assert len({raw for raw, _ in where.values()}) == len(where)
        recent = [window for (r, p), (_, window) in where.items() if p >= live[r] - 128]
        assert len(set(recent)) == len(recent)
    assert min(raw for raw, _ in where.values()) >= PAGE_TOKENS  # page 0 is for padding


def test_window_reads_are_the_slots_of_the_last_128_tokens(config: ModelConfig):
    cache = make(config)
    request = cache.open()
    written: dict[int, int] = {}
    for count in (64, 1, 63, 64, 64, 64, 7):  # wraps the ring of 192 rows
        start = cache.length(request)
        step = cache.plan([(request, [0] * count)])
        written.update({start + i: int(step.window_slots[i]) for i in range(count)})
        for i in range(count):
            position = start + i
            expected = [written[p] if p >= 0 else -1 for p in range(position - 127, position + 1)]
            assert step.window_reads[i].tolist() == expected
    assert cache.ring_rows == 3 * WINDOW_PAGE_ROWS < 327


def test_tables_of_both_ratios_lead_to_the_same_tokens(config: ModelConfig):
    cache = make(config)
    cache.open()
    request = cache.open()
    slots = []
    while cache.length(request) < 300:
        step = cache.plan([(request, [0] * 60)])
        slots += step.raw_slots.tolist()
    # key j of ratio r stands at table[j // 64] * 64 + j % 64, and so does the row, in pages of 128 / r
    for ratio in (1, 2):
        table = step.tables[ratio][request].tolist()
        for j in range(300 // ratio):
            assert table[j // 64] * 64 + j % 64 == slots[j * ratio] // ratio
        assert step.lengths[ratio].tolist() == [(t + 1) // ratio for t in range(240, 300)]
        assert step.widths[ratio] == 300 // ratio
    assert step.pair_slots.tolist() == [slots[t] // 2 if t % 2 else -1 for t in range(240, 300)]


def test_steps_of_several_requests_are_laid_out_in_order(config: ModelConfig):
    cache = make(config)
    first, second = cache.open(), cache.open()
    cache.plan([(second, [9] * 5)])
    step = cache.plan([(second, [1, 2]), (first, torch.tensor([3, 4, 5]))])
    assert step.tokens.tolist() == [1, 2, 3, 4, 5]
    assert step.positions.tolist() == [5, 6, 0, 1, 2]
    assert step.requests.tolist() == [second, second, first, first, first]
    assert step.first_rows.tolist() == [0, 2]
    assert step.row_counts.tolist() == [2, 3]
    assert step.last_rows.tolist() == [1, 4]
    assert step.rows == 0
    step = cache.plan([(first, [1]), (second, [1])])
    assert (step.rows, step.last_rows.tolist()) == (1, [0, 1])


def test_bytes_per_token_are_those_of_the_layouts(config: ModelConfig):
    # one ratio-1 and one ratio-2 source: 1.5 rows a token, 68 bytes of index key each
    for window, rows, row_bytes in (("v41", "v41_fp4", 288), ("v41", "v41", 528), ("bf16", "bf16", 1024)):
        cache = make(config, window_layout=window, row_layout=rows)
        assert cache.bytes_per_token() == 1.5 * (row_bytes + 68)
    assert make(config).window_bytes_per_request() == 7 * 128 * 528


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([], "at least one"),
        ([(0, [1]), (0, [2])], "each once"),
        ([(1, [1])], "1 is not open"),
        ([(0, [])], "0 tokens for request 0"),
        ([(0, [1] * 65)], "1 to 64 fit a step"),
    ],
)
def test_bad_step_is_refused_and_reserves_nothing(config: ModelConfig, chunks: list, message: str):
    cache = make(config)
    cache.open()
    with pytest.raises(ValueError, match=message):
        cache.plan(chunks)
    assert cache.length(0) == 0
    assert cache._pages.free == 8


def test_full_cache_says_what_is_missing(config: ModelConfig):
    cache = make(config, max_tokens=128)
    request, other = cache.open(), cache.open()
    cache.plan([(request, [0] * 64)])
    with pytest.raises(ValueError, match="1 needed, 0 free"):
        cache.plan([(other, [0])])
    assert cache.length(other) == 0
    cache.release(request)
    assert cache.plan([(other, [0])]).positions.tolist() == [0]


def test_context_past_the_positions_is_refused(config: ModelConfig):
    cache = make(config, max_tokens=2048)
    request = cache.open()
    for _ in range(config.max_positions // 64):
        cache.plan([(request, [0] * 64)])
    with pytest.raises(ValueError, match="pass the model's 1024 positions"):
        cache.plan([(request, [0])])


def test_more_requests_than_the_cache_was_made_for_are_refused(config: ModelConfig):
    cache = make(config, max_requests=1)
    request = cache.open()
    with pytest.raises(ValueError, match="1 are open"):
        cache.open()
    cache.release(request)
    assert cache.open() == request
    with pytest.raises(ValueError, match="2 is not open"):
        cache.release(2)


def test_layouts_that_no_reader_joins_are_refused(config: ModelConfig):
    with pytest.raises(ValueError, match="cannot be read together"):
        make(config, window_layout="v41_fp4", row_layout="v4")


# --- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("window", "rows"), [("v41", "v41_fp4"), ("v4", "v4"), ("bf16", "bf16")])
@pytest.mark.parametrize("share", [0.25, 1.0])
def test_pools_fill_the_share_of_free_memory_that_is_given(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch, window: str, rows: str, share: float
):
    free = 40 << 20
    monkeypatch.setattr(cache_module, "free_bytes", lambda device: free)
    form = {"window_layout": window, "row_layout": rows, "max_tokens": None, "draft_rows": 6, "max_requests": 2}
    cache = make(config, memory=share, **form)
    taken = sum(t.numel() * t.element_size() for t in cache.pools)
    page = cache.bytes_per_token() * PAGE_TOKENS
    assert taken <= share * free
    assert taken + page > share * free or cache.free_pages == 2 * config.max_positions // PAGE_TOKENS


def test_memory_never_buys_more_pages_than_requests_can_hold(config: ModelConfig):
    cache = make(config, memory=0.5, max_tokens=None, max_context=200)
    assert cache.free_pages == 3 * 2


def test_free_memory_is_counted_on_the_cpu():
    assert 1 << 20 < cache_module.free_bytes(torch.device("cpu")) < 1 << 50


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": 0.0}, "memory: 0.0 given"),
        ({"memory": 1.5}, "memory: 1.5 given"),
        ({"memory": 1e-9}, "holds no page"),
        ({"memory": 0.5, "pages": 3}, "several are given"),
        ({"pages": 0}, "pages: 0"),
        ({"draft_rows": 0}, "draft_rows: 0"),
    ],
)
def test_bad_sizes_are_refused(config: ModelConfig, options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        ModelCache(config, **options)


def test_pages_are_counted_as_given(config: ModelConfig):
    assert ModelCache(config, pages=5).free_pages == 5
    assert ModelCache(config, max_tokens=PAGE_TOKENS + 1).free_pages == 2


@pytest.mark.parametrize(("rows", "ring"), [(1, 2), (2, 4), (3, 4), (4, 8), (6, 8), (7, 8)])
def test_pending_rings_hold_a_step_and_the_token_before_it(config: ModelConfig, rows: int, ring: int):
    assert make(config, draft_rows=rows).pair_ring == ring


# --- rejected tokens --------------------------------------------------------------------------------------------------


def test_rejected_tokens_are_taken_back(config: ModelConfig):
    cache = make(config, draft_rows=6)
    request = cache.open()
    cache.extend([(request, 64)])
    cache.extend([(request, 60)])
    free = cache.free_pages
    assert cache.extend([(request, 6)]) == [124]
    assert cache.free_pages == free - 1
    cache.keep(request, 6)
    assert (cache.length(request), cache.free_pages) == (130, free - 1)
    cache.keep(request, 3)
    assert (cache.length(request), cache.free_pages) == (127, free)
    assert cache.extend([(request, 2)]) == [127]


def test_no_more_is_taken_back_than_can_be(config: ModelConfig):
    cache = make(config, draft_rows=3)
    request = cache.open()
    with pytest.raises(ValueError, match="1 of request 0's last 0 tokens"):
        cache.keep(request, 1)
    cache.extend([(request, 8)])
    for count, message in ((0, "0 of request"), (9, "9 of request"), (5, "3 tokens to reject, at most 2")):
        with pytest.raises(ValueError, match=message):
            cache.keep(request, count)
    assert cache.length(request) == 8
