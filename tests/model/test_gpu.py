"""The model on a GPU: captured decoding says what the CPU reference says, whatever happens between steps."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from latentkv.cli import main
from latentkv.model import ModelCache, PagedModel, held_out_windows, load_checkpoint
from latentkv.model.cache import PAGE_TOKENS, free_bytes
from latentkv.model.captured import DecodeStep, can_capture, missing_kernels
from latentkv.model.serving import Server, decode_all
from tests.model import proofs

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
# Logits between two tokens below which either may be said. Kernels round probabilities to bf16 and sum in fp32, and a
# quantizer turns one bf16 step into one code. The reference with these two changes, on a CPU, over 3072 tokens of held
# out text: another likeliest token in 1.1 %; 32 of those 33 where at most 0.23 lies between the two, one at 0.55.
TIE = 1.0
OTHERS, MOSTLY = 0.025, 0.4  # share of all tokens, and logits that nine in ten of them stay below
BITS = 0.002
PROCESSES = max(1, min(8, (os.cpu_count() or 1) // 2))


@pytest.fixture(scope="module")
def model() -> PagedModel:
    return PagedModel(*load_checkpoint(device=CUDA))


@pytest.fixture(scope="module")
def source() -> list[int]:
    return torch.cat([w[1:] for w in held_out_windows(2048, 4)]).tolist()


@contextmanager
def no_waiting() -> Iterator[None]:
    """An operation that waits for the device is an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_every_op_of_a_step_has_a_kernel():
    assert missing_kernels() == []
    assert can_capture(CUDA)


def test_captured_decoding_says_what_the_cpu_says(model: PagedModel, capsys: pytest.CaptureFixture[str]):
    given = proofs.prompts(16)
    texts = proofs.greedy(model, given, 512, capture=True)
    assert all(len(text) == 512 for text in texts)
    found = proofs.judge_all([([*p, *t], len(p)) for p, t in zip(given, texts, strict=True)], processes=PROCESSES)
    firsts = [v.first_other for v in found]
    falls = [v.shortfalls[first] for v, first in zip(found, firsts, strict=True) if first is not None]
    others = sum(s > 0 for v in found for s in v.shortfalls)
    with capsys.disabled():
        print(
            f"\ngreedy: {firsts.count(None)} of 16 texts equal for 512 tokens; first other tokens at "
            f"{[f for f in firsts if f is not None]}, below the likeliest by {[round(f, 4) for f in falls]}; "
            f"along all texts {others} of {16 * 512} others, at most {max(max(v.shortfalls) for v in found):.4f} below"
        )
    assert all(fall <= TIE for fall in falls)
    assert others <= OTHERS * 16 * 512
    assert sum(s > MOSTLY for v in found for s in v.shortfalls) <= max(2, 0.1 * others)


def test_bits_per_byte_are_those_of_the_cpu(model: PagedModel, capsys: pytest.CaptureFixture[str]):
    windows = held_out_windows(1024, 16)
    ours = proofs.bits_per_byte(model, windows)
    parts = proofs.in_parallel(proofs.reference_bits, windows, processes=PROCESSES)
    counts = [w.numel() - 1 for w in windows]
    theirs = sum(b * n for b, n in zip(parts, counts, strict=True)) / sum(counts)
    with capsys.disabled():
        print(f"\nbits per byte: {ours:.5f} on the GPU, {theirs:.5f} on the CPU, {sum(counts)} bytes")
    assert abs(ours - theirs) <= BITS


def test_a_thousand_captured_steps_leave_the_bytes_of_uncaptured_ones(
    model: PagedModel, source: list[int], capsys: pytest.CaptureFixture[str]
):
    captured, plain = (
        proofs.serve(model, source, requests=256, rows=6, steps=1000, capture=capture) for capture in (True, False)
    )
    with capsys.disabled():
        print(
            f"\n1000 steps of up to 256 x 6 rows: {captured.joined} requests joined, {captured.accepted} of "
            f"{captured.drafted} drafts accepted"
        )
    assert captured.joined > 1000
    assert 0 < captured.accepted < captured.drafted
    assert captured.joined == plain.joined
    others = [i for i, (a, b) in enumerate(zip(captured.texts, plain.texts, strict=True)) if a != b]
    assert not others, f"{len(others)} of {plain.joined} texts differ, first {others[0]}"
    for ours, theirs in zip(captured.cache.pools, plain.cache.pools, strict=True):
        assert torch.equal(ours, theirs)


def test_nothing_in_a_step_waits_for_the_device(model: PagedModel):
    cache = ModelCache(
        model.config, max_requests=16, max_tokens=16 * 256, max_context=256, chunk=64, draft_rows=6, device=CUDA
    )
    server = Server(model, cache, drafter=lambda tokens, count: [tokens[-1]] * count, ladder=(4, 16))
    server.join(*proofs.prompts(3))
    step = server.decode
    for batch, rows in ((4, 1), (4, 6), (16, 6)):
        step.load(batch, rows, [], [])
        step.body(batch, rows)  # compiles
        step.run(batch, rows)  # captures
        with no_waiting():
            step.load(batch, rows, [], [])
            step.body(batch, rows)
            step.run(batch, rows)


def test_padded_rows_touch_nothing_and_stay_finite(model: PagedModel):
    cache = ModelCache(model.config, max_requests=8, max_tokens=2048, max_context=256, chunk=64, device=CUDA)
    server = Server(model, cache, ladder=(8,))
    server.join(*proofs.prompts(2))
    server.step()
    before = [pool.clone() for pool in cache.pools]
    server.decode.load(8, 1, [], [])
    server.decode.run(8, 1)
    assert all(torch.equal(pool, was) for pool, was in zip(cache.pools, before, strict=True))
    assert bool(server.decode._logits.isfinite().all())


def test_the_ladder_changes_no_text_but_at_ties(model: PagedModel):
    """A step of one request and a step of 64 have other matrix products; both are the same function."""
    given = proofs.prompts(3)
    texts = []
    for ladder in ((3,), (64,)):
        cache = ModelCache(model.config, max_requests=64, max_tokens=64 * 128, max_context=512, chunk=64, device=CUDA)
        texts.append(decode_all(Server(model, cache, ladder=ladder), given, 24))
    for i, (ours, theirs) in enumerate(zip(*texts, strict=True)):
        at = next((j for j in range(24) if ours[j] != theirs[j]), None)
        if at is not None:
            verdict = proofs.judge(([*given[i], *ours], len(given[i])))
            assert verdict.gaps[at] <= TIE


def test_pools_take_a_share_of_the_free_memory_and_far_pages_serve(model: PagedModel):
    given = proofs.prompts(4)
    small = proofs.greedy(model, given, 40)
    free = free_bytes(CUDA)
    cache = ModelCache(model.config, memory=0.2, max_requests=4096, chunk=proofs.CHUNK, device=CUDA)
    taken, limit = proofs.pool_bytes(cache), 4096 * model.config.max_positions // PAGE_TOKENS
    assert taken <= 0.2 * free
    assert taken >= 0.19 * free or cache.free_pages == limit
    assert decode_all(Server(model, cache, ladder=(4,)), given, 40) == small
    assert cache.free_pages * PAGE_TOKENS * cache.row_layout.row_bytes > 2**32 or free < 100 * 2**30


def test_commands_run_on_the_gpu(capsys: pytest.CaptureFixture[str]):
    assert main(["generate", "import os, sys\n", "--tokens", "48", "--device", "cuda", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert 0 < told["new_tokens"] <= 48
    assert main(["eval", "--windows", "1", "--context", "512", "--device", "cuda", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["row_layout"] for row in rows] == ["bf16", "v4", "v41", "v41_fp4"]
    assert all(abs(row["difference"]) < 0.02 for row in rows)


def test_doctor_runs_every_kernel(capsys: pytest.CaptureFixture[str]):
    code = main(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert [check for check in found["checks"] if not check["passed"]] == []
    assert code == 0


def test_a_graph_takes_what_a_step_takes_again_and_again(model: PagedModel):
    """Memory does not grow with replays, or with captures of sizes that share it."""
    cache = ModelCache(model.config, max_requests=32, max_tokens=32 * 128, max_context=128, chunk=64, device=CUDA)
    step = DecodeStep(model, cache, ladder=(8, 32), capture=True)
    step.prepare()
    request = cache.open()
    step([(request, [1])])
    before = torch.cuda.memory_allocated()
    for token in range(50):
        step([(request, [token])])
    assert torch.cuda.memory_allocated() == before
