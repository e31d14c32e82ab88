"""Serving: whatever happens beside a request, it gets the tokens and the bytes that it would have had alone.

On the CPU a row's bits do not depend on its batch, so runs are compared bitwise. A captured step runs the function that
is tested here.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from latentkv.model.cache import ModelCache
from latentkv.model.captured import STEP_OPS, DecodeStep, can_capture
from latentkv.model.config import PAD_TOKEN, ModelConfig
from latentkv.model.paged import PagedModel
from latentkv.model.serving import Drafter, Server, decode_all, repeated
from latentkv.model.weights import Weights
from latentkv.ops._library import OPS
from tests.model.pages import assert_same, contents

ROWS = 6


@pytest.fixture(scope="module")
def model(config: ModelConfig, weights: Weights) -> PagedModel:
    return PagedModel(config, weights)


@pytest.fixture(scope="module")
def prompts(tokens: torch.Tensor) -> list[list[int]]:
    return [tokens[a:b].tolist() for a, b in ((0, 1), (3, 40), (50, 177), (200, 328), (340, 469), (500, 526))]


def make_cache(model: PagedModel, **options) -> ModelCache:
    return ModelCache(
        model.config, **{"max_requests": 4, "max_tokens": 1536, "chunk": 64, "max_context": 384, **options}
    )


def alone(model: PagedModel, prompt: Sequence[int], count: int) -> tuple[list[int], dict[str, torch.Tensor]]:
    """What single steps of the planned path decode, and the bytes they leave."""
    cache = make_cache(model, max_requests=1, max_tokens=512, seed=17)
    request, new = cache.open(), []
    for at in range(0, len(prompt), 64):
        logits = model.step(cache, [(request, prompt[at : at + 64])])[0]
    while True:
        new.append(int(logits[:PAD_TOKEN].argmax()))
        if len(new) == count:
            return new, contents(cache, request)
        logits = model.step(cache, [(request, new[-1:])])[0]


@pytest.fixture(scope="module")
def plain(model: PagedModel, prompts: list[list[int]]) -> list[list[int]]:
    """14 tokens after each prompt, decoded alone."""
    return [alone(model, prompt, 14)[0] for prompt in prompts]


def guesser(prompts: list[list[int]], plain: list[list[int]], seed: int, right: float = 0.7) -> Drafter:
    """Drafts what will come, each token right with a given chance, and sometimes fewer than asked for."""
    rng = random.Random(seed)
    texts = [p + n for p, n in zip(prompts, plain, strict=True)]

    def draft(tokens: Sequence[int], count: int) -> list[int]:
        text = next(t for t in texts if list(tokens[: len(t)]) == t[: len(tokens)])
        coming = text[len(tokens) :][: rng.randint(0, count)]
        return [t if rng.random() < right else (t + 1) % 256 for t in coming]

    return draft


def test_requests_that_join_and_leave_at_random_get_what_they_would_get_alone(
    model: PagedModel, prompts: list[list[int]]
):
    server, rng, served = Server(model, make_cache(model, seed=1)), random.Random(3), 0
    waiting, decoded = [0, 1, 2, 3, 4, 5, 2], {}
    while waiting or server.streams:
        while waiting and len(server.streams) < 4 and rng.random() < 0.5:
            which = waiting.pop(0)
            decoded[server.join(prompts[which])[0].request] = which
        for stream in list(server.streams.values()):
            if len(stream.new) > 3 and rng.random() < 0.15:
                held = len(stream.new) - 1  # the last one is decoded, but not in the cache yet
                expected, pages = alone(model, prompts[decoded[stream.request]], held + 1)
                assert_same(contents(server.cache, stream.request), pages)
                assert server.leave(stream) == expected
                served += 1
        server.step()
    assert served == 7
    assert server.cache.free_pages == 12


def test_verifying_drafts_gives_the_text_and_the_bytes_of_plain_decoding(
    model: PagedModel, prompts: list[list[int]], plain: list[list[int]]
):
    cache = make_cache(model, draft_rows=ROWS)
    server = Server(model, cache, drafter=guesser(prompts, plain, seed=0))
    streams = server.join(*prompts[1:5])
    while any(len(s.new) < 12 for s in streams):
        server.step()
        for stream in streams:
            which = prompts.index(stream.tokens[: stream.prompt])
            assert stream.new[:14] == plain[which][: len(stream.new)]
    for stream in streams:
        assert 0 < stream.accepted < stream.drafted
        expected, pages = alone(model, stream.tokens[: stream.prompt], len(stream.new))
        assert expected == stream.new
        assert_same(contents(cache, stream.request), pages)


def test_rejected_drafts_give_back_the_pages_that_only_they_needed(model: PagedModel, prompts: list[list[int]]):
    cache = make_cache(model, draft_rows=ROWS)
    wrong = Server(model, cache, drafter=lambda tokens, count: [(tokens[-1] + 7) % 256] * count)
    (stream,) = wrong.join(prompts[2])  # 127 tokens: the first draft is the 129th
    free = cache.free_pages
    wrong.step()
    assert stream.drafted - stream.accepted > 0
    assert (cache.length(stream.request), cache.free_pages) == (128 + stream.accepted, free - (stream.accepted > 0))


def test_padded_rows_touch_nothing(model: PagedModel, prompts: list[list[int]]):
    cache = make_cache(model, draft_rows=ROWS)
    step = DecodeStep(model, cache, rows=ROWS, ladder=(1, 4))
    request = cache.open()
    model.step(cache, [(request, prompts[1])])
    before = [pool.clone() for pool in cache.pools]
    step.load(4, ROWS, [], [])
    step.run(4, ROWS)
    assert all(torch.equal(pool, was) for pool, was in zip(cache.pools, before, strict=True))
    assert torch.isfinite(step._logits).all()


@pytest.mark.parametrize("ladder", [(1,), (4,), (1, 2, 4)])
def test_the_size_of_the_batch_changes_no_bit(model: PagedModel, prompts: list[list[int]], ladder: tuple[int, ...]):
    cache = make_cache(model, draft_rows=ROWS)
    step = DecodeStep(model, cache, rows=ROWS, ladder=ladder)
    request = cache.open()
    model.step(cache, [(request, prompts[1])])
    one = step([(request, [7])]).logits[0].clone()  # the next step overwrites it
    wide = step([(request, [8, 9, 10])])
    cache = make_cache(model, seed=5)
    request = cache.open()
    expected = model.step(cache, [(request, [*prompts[1], 7, 8, 9, 10])], all_logits=True)[-4:]
    assert torch.equal(torch.cat((one, wide.logits[0, :3])), expected)
    assert wide.likeliest == [expected[1:, :PAD_TOKEN].argmax(-1).tolist()]


def test_inputs_lie_at_fixed_addresses(model: PagedModel, prompts: list[list[int]]):
    cache = make_cache(model)
    server = Server(model, cache)
    fixed = [server.decode._inputs, server.decode._logits, server.decode._likeliest, *cache.tables.values()]
    fixed += [*cache.pools, cache._table.pages, cache._window_table.pages]
    addresses = [t.data_ptr() for t in fixed]
    server.join(prompts[0], prompts[2])
    for _ in range(3):
        server.step()
    server.leave(next(iter(server.streams.values())))
    server.join(prompts[3])
    server.step()
    again = [server.decode._inputs, server.decode._logits, server.decode._likeliest, *cache.tables.values()]
    again += [*cache.pools, cache._table.pages, cache._window_table.pages]
    assert [t.data_ptr() for t in again] == addresses


def test_released_pages_are_used_again(model: PagedModel, prompts: list[list[int]], plain: list[list[int]]):
    cache = make_cache(model, max_requests=1, max_tokens=256)  # two pages: each prompt but the first needs both
    for which in (2, 3, 2):
        assert decode_all(Server(model, cache), [prompts[which]], 4) == [plain[which][:4]]
        assert cache.free_pages == 2


def test_out_of_pages_is_one_error_and_changes_nothing(
    model: PagedModel, prompts: list[list[int]], plain: list[list[int]]
):
    cache = make_cache(model, max_tokens=384)
    server = Server(model, cache)
    first, second, third = server.join(prompts[3], prompts[3], prompts[1])  # 128, 128 and 37 tokens: all three pages
    before = [pool.clone() for pool in cache.pools]
    for refused, message in (
        (lambda: server.join(prompts[0]), "1 needed, 0 free"),
        (server.step, "2 needed, 0 free"),  # each 129th token
        (lambda: model.step(cache, [(third.request, [1]), (first.request, [1])]), "1 needed, 0 free"),
    ):
        with pytest.raises(ValueError, match=message):
            refused()
        assert [cache.length(s.request) for s in (first, second, third)] == [128, 128, 37]
        assert all(torch.equal(pool, was) for pool, was in zip(cache.pools, before, strict=True))
    server.leave(third)
    with pytest.raises(ValueError, match="2 needed, 1 free"):
        server.step()
    server.leave(second)
    server.step()
    assert first.new == plain[3][:2]


def test_steps_past_the_longest_context_are_refused(model: PagedModel, prompts: list[list[int]]):
    cache = make_cache(model, max_context=40, draft_rows=ROWS)
    server = Server(model, cache, drafter=lambda tokens, count: [0] * count)
    (stream,) = server.join(prompts[1])  # 37 tokens
    while cache.length(stream.request) < 40:
        server.step()  # drafts shrink to the room that is left
    with pytest.raises(ValueError, match="pass the cache's 40 positions"):
        server.step()
    assert server.leave(stream)
    with pytest.raises(ValueError, match="a prompt of 41 tokens"):
        server.join([1] * 41)


def test_bad_steps_are_refused(model: PagedModel):
    cache = make_cache(model)
    with pytest.raises(ValueError, match="made for 1 to 1 rows"):
        DecodeStep(model, cache, rows=2)
    with pytest.raises(ValueError, match="ladder"):
        DecodeStep(model, cache, ladder=())
    with pytest.raises(NotImplementedError, match="capture=False works"):
        DecodeStep(model, cache, capture=True)
    step = DecodeStep(model, cache, ladder=(1, 2))
    request = cache.open()
    for entries, message in (
        ([], "0 requests"),
        ([(0, [1]), (1, [1]), (2, [1])], "3 requests given, 1 to 2"),
        ([(request, [1, 2])], "2 tokens for request 0, 1 to 1"),
        ([(request, [])], "0 tokens"),
        ([(request, [260])], r"outside 0\.\.259"),
    ):
        with pytest.raises(ValueError, match=message):
            step(entries)
    assert cache.length(request) == 0


def test_a_stream_leaves_once(model: PagedModel, prompts: list[list[int]]):
    server = Server(model, make_cache(model))
    (stream,) = server.join(prompts[0])
    server.leave(stream)
    with pytest.raises(ValueError, match="not one of the 0"):
        server.leave(stream)
    assert server.step() == {}


def test_ladder_ends_at_the_cache_s_requests(model: PagedModel):
    step = DecodeStep(model, make_cache(model, max_requests=3), ladder=(8, 1, 2))
    assert step.ladder == (1, 2, 3)
    assert [step.size(n) for n in (1, 2, 3)] == [1, 2, 3]


def test_step_ops_are_all_that_a_step_calls(model: PagedModel, prompts: list[list[int]]):
    called = set()

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "latentkv":
                called.add(func.__name__.split(".")[0])
            return func(*args, **(kwargs or {}))

    server = Server(model, make_cache(model))
    server.join(prompts[1])
    with Watch():
        server.step()
    assert called <= set(STEP_OPS) <= set(OPS)
    assert set(STEP_OPS) - called <= {"linear_fp32"}  # the head's, where sums are not exact
    assert not can_capture(torch.device("cpu"))


def test_repeated_text_is_drafted():
    assert repeated([1, 2, 3, 4, 1, 2], 3) == [3, 4, 1]
    assert repeated([1, 2, 3, 4, 1, 2], 1) == [3]
    assert repeated([1, 2, 3], 3) == []
    assert repeated([5], 3) == []
    assert repeated([7, 7, 7], 2) == [7]
