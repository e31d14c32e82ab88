"""The paged forward: it does not matter how tokens come, and it equals the dense oracle.

On the CPU a row's bits do not depend on its batch, so the ways of feeding tokens are compared bitwise. Against the
oracle the bound is `ORACLE_BOUND`: sums in another order flip a bf16 rounding now and then, later tokens see it, and
a near-tie may fall otherwise.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import pytest
import torch

from latentkv.layout import KVLayout
from latentkv.model import dense
from latentkv.model.cache import ModelCache
from latentkv.model.config import ModelConfig
from latentkv.model.paged import PagedModel, Picks, prefill
from latentkv.model.weights import Weights

ORACLE_BOUND = 0.05  # of the spread of the logits, root mean square over tokens; the median token has half of that


@pytest.fixture(scope="module")
def model(config: ModelConfig, weights: Weights) -> PagedModel:
    return PagedModel(config, weights)


def feed(model: PagedModel, tokens: torch.Tensor, sizes: list[int], *, seed: int = 0, **options) -> torch.Tensor:
    """Logits of every token when a request gets its tokens in steps of the given sizes."""
    cache = ModelCache(model.config, max_tokens=1024, chunk=max(sizes), seed=seed, **options)
    request, at, logits = cache.open(), 0, []
    for size in sizes:
        logits.append(model.step(cache, [(request, tokens[at : at + size])], all_logits=True))
        at += size
    return torch.cat(logits)


@pytest.fixture(scope="module")
def whole(model: PagedModel, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of 270 tokens in one step."""
    return feed(model, tokens, [270])


@pytest.mark.parametrize("start", [1, 2, 63, 64, 126, 127, 128, 129, 255, 256, 257])
def test_prefill_then_decode_equals_one_prefill(
    model: PagedModel, tokens: torch.Tensor, whole: torch.Tensor, start: int
):
    steps = 5
    logits = feed(model, tokens, [start] + [1] * steps, seed=start)
    assert torch.equal(logits, whole[: start + steps])


@pytest.mark.parametrize("sizes", [[7] * 38, [127, 1, 127, 1], [64, 64, 64, 64], [129, 3, 100], [1, 128, 128]])
def test_chunks_of_any_size_give_the_same_bits(
    model: PagedModel, tokens: torch.Tensor, whole: torch.Tensor, sizes: list[int]
):
    logits = feed(model, tokens, sizes, seed=9)
    assert torch.equal(logits, whole[: sum(sizes)])


def test_decode_from_the_first_token_equals_prefill(model: PagedModel, tokens: torch.Tensor, whole: torch.Tensor):
    assert torch.equal(feed(model, tokens, [1] * 40), whole[:40])


def test_interleaved_requests_on_shuffled_pages_do_not_touch_each_other(
    model: PagedModel, tokens: torch.Tensor, whole: torch.Tensor
):
    cache, rng = ModelCache(model.config, max_requests=3, max_tokens=1024, chunk=64, seed=3), random.Random(2)
    texts = [tokens[:270], tokens[100:330], tokens[300:520]]
    expected = [whole, feed(model, texts[1], [230]), feed(model, texts[2], [220])]
    done = {cache.open(): 0 for _ in texts}
    while any(done[r] < len(texts[r]) for r in done):
        live = [r for r in done if done[r] < len(texts[r]) and rng.random() < 0.7]
        rng.shuffle(live)
        if not live:
            continue
        chunks = [(r, texts[r][done[r] : done[r] + rng.choice([1, 17, 50, 64])]) for r in live]
        logits = model.step(cache, chunks, all_logits=True)
        for (request, part), got in zip(chunks, logits.split([len(c) for _, c in chunks]), strict=True):
            at = done[request]
            assert torch.equal(got, expected[request][at : at + len(part)])
            done[request] += len(part)


def test_released_pages_leave_nothing_behind(model: PagedModel, tokens: torch.Tensor, whole: torch.Tensor):
    cache = ModelCache(model.config, max_tokens=384, chunk=270)
    first = cache.open()
    model.step(cache, [(first, tokens[300:541])])  # an odd count: a pending pair stays behind
    cache.release(first)
    assert torch.equal(model.step(cache, [(cache.open(), tokens[:270])], all_logits=True), whole)


def test_garbage_in_unused_pages_changes_nothing(model: PagedModel, tokens: torch.Tensor, whole: torch.Tensor):
    cache = ModelCache(model.config, max_tokens=1024, chunk=270)
    for tensor in (*cache.window, *cache.rows.values(), *(k.payload for k in cache.keys.values())):
        tensor.fill_(0xFF)
    for pair in cache.pairs.values():
        pair.fill_(torch.nan)
    assert torch.equal(model.step(cache, [(cache.open(), tokens[:270])], all_logits=True), whole)


@pytest.mark.parametrize(
    ("window", "rows"), [("v41", "v41_fp4"), ("bf16", "bf16"), ("v41", "v41"), ("v41_mxfp4", "v41_mxfp4")]
)
def test_paged_equals_the_dense_oracle(
    model: PagedModel, weights: Weights, tokens: torch.Tensor, window: str, rows: str
):
    logits = feed(model, tokens, [270], window_layout=window, row_layout=rows)
    options = dense.DenseOptions(window=KVLayout.parse(window), rows=KVLayout.parse(rows))
    with torch.no_grad():
        oracle = dense.forward(model.config, weights, tokens[None, :270], options).logits[0]
    error = (logits - oracle).square().mean(-1).sqrt() / oracle.std()
    assert float(error.square().mean().sqrt()) < ORACLE_BOUND
    assert float(error.median()) < ORACLE_BOUND / 2


@pytest.mark.parametrize(("ratio", "window", "rows"), [(0, "v41", "v41"), (1, "v41", "v41_fp4"), (2, "v41", "v41_fp4")])
def test_one_layer_equals_the_oracle_bitwise_but_for_rare_roundings(
    config: ModelConfig, random_weights: Callable, tokens: torch.Tensor, ratio: int, window: str, rows: str
):
    sources = (0,) if ratio else ()
    one = dataclasses.replace(
        config, ratios=(ratio,), kv_source_layers=sources, index_source_layers=sources, candidate_source_layer=-1
    )
    weights = random_weights(one, 11)
    logits = feed(PagedModel(one, weights), tokens, [270], window_layout=window, row_layout=rows)
    options = dense.DenseOptions(window=KVLayout.parse(window), rows=KVLayout.parse(rows))
    with torch.no_grad():
        oracle = dense.forward(one, weights, tokens[None, :270], options).logits[0]
    assert float((logits != oracle).any(-1).float().mean()) < 0.05


def test_interleaved_pages_give_the_same_bits(model: PagedModel, tokens: torch.Tensor, whole: torch.Tensor):
    pages = {"window_layout": "v41_interleaved", "row_layout": "v41_fp4_interleaved"}
    assert torch.equal(feed(model, tokens, [270], **pages), whole)


def test_selection_of_short_contexts_is_everything(config: ModelConfig, weights: Weights, tokens: torch.Tensor):
    # as long as no more rows are visible than are picked, the indexer's weights do not matter
    scrambled = {n: torch.flip(w, [0]) if ".index." in n else w for n, w in weights.items()}
    k = config.index_topk
    a, b = (feed(PagedModel(config, w), tokens, [48]) for w in (weights, scrambled))
    assert torch.equal(a[:k], b[:k])
    assert not torch.equal(a, b)
    c, d = (feed(PagedModel(config, w, index_topk=48), tokens, [48]) for w in (weights, scrambled))
    assert torch.equal(c, d)


def test_picks_are_visible_ascending_and_inside_the_candidates(model: PagedModel, tokens: torch.Tensor):
    cache, picks = ModelCache(model.config, max_tokens=1024, chunk=100), Picks()
    request = cache.open()
    for at in range(0, 300, 100):
        model.step(cache, [(request, tokens[at : at + 100])], picks=picks)
    k, candidates = model.config.index_topk, model.config.candidate_blocks
    for layer, ratio in ((1, 2), (3, 1), (5, 1)):
        positions = torch.cat(picks.by_layer[layer])
        assert positions.shape == (300, k)
        for t in range(300):
            row = [p for p in positions[t].tolist() if p >= 0]
            assert row == sorted(set(row))
            assert len(row) == min(k, (t + 1) // ratio)
            assert all((p + 1) * ratio - 1 <= t for p in row)
            if layer == 5:
                assert len({p // 8 for p in row}) <= candidates


def test_dense_and_paged_pick_the_same_rows(model: PagedModel, weights: Weights, tokens: torch.Tensor):
    cache, picks = ModelCache(model.config, max_tokens=1024, chunk=270), Picks()
    model.step(cache, [(cache.open(), tokens[:270])], picks=picks)
    with torch.no_grad():
        out = dense.forward(model.config, weights, tokens[None, :270])
    for layer, selection in out.selections.items():
        paged = torch.zeros_like(selection[0])
        positions = torch.cat(picks.by_layer[layer]).long()
        paged[torch.arange(270).unsqueeze(1).expand_as(positions)[positions >= 0], positions[positions >= 0]] = True
        differing = (paged & ~selection[0]).sum() / paged.sum()
        # random keys score alike, so a rounding flipped in an earlier layer moves picks
        assert float(differing) < {1: 0.005, 3: 0.08, 5: 0.15}[layer]


def test_last_logits_are_those_of_each_requests_last_token(model: PagedModel, tokens: torch.Tensor):
    cache = ModelCache(model.config, max_requests=2, max_tokens=512, chunk=64)
    chunks = [(cache.open(), tokens[:33]), (cache.open(), tokens[50:110])]
    last = model.step(cache, chunks)
    assert torch.equal(last, torch.stack([feed(model, t, [len(t)])[-1] for _, t in chunks]))


def test_prefill_reports_its_way(model: PagedModel, tokens: torch.Tensor, whole: torch.Tensor):
    cache = ModelCache(model.config, max_tokens=512, chunk=64)
    steps = list(prefill(model, cache, cache.open(), tokens[:150]))
    assert [done for done, _ in steps] == [64, 128, 150]
    assert torch.equal(steps[-1][1], whole[149])


def test_token_outside_the_vocabulary_is_refused(model: PagedModel):
    cache = ModelCache(model.config, max_tokens=128)
    request = cache.open()
    with pytest.raises(ValueError, match=r"outside 0\.\.259"):
        model.step(cache, [(request, [260])])
    assert cache.length(request) == 0
