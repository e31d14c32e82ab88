"""What only a GPU shows: every value with every scale, graphs, far addresses, many programs at once, batches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import latentkv as lk
from latentkv.ops._library import OPS
from latentkv.reference import compress as reference
from tests.compress.streams import (
    EPS,
    PAGE,
    TABLE,
    WEIGHT,
    Requests,
    assert_equal,
    exact_tokens,
    latents,
    random_tokens,
)
from tests.gpu import captured
from tests.store.cases import angle_table, largest_sweep, summable_rows, value_sweep

pytestmark = pytest.mark.gpu
LAYOUTS = ["v4", "v41", "v41_fp4", "v41_mxfp4", "bf16"]
GIB = 2**30


def needs_kernels() -> None:
    if OPS["compress2"].kernel is None:
        pytest.skip("the reference on a GPU synchronizes")


# --- one token a latent -----------------------------------------------------------------------------------------------


SWEEPS = {
    "values": lambda: value_sweep("v41_fp4", torch.bfloat16, binades=6),
    "largest": lambda: largest_sweep("v41_fp4", torch.bfloat16),
}


@pytest.mark.parametrize("layout", ["v4", "v41", "v41_interleaved"])
@pytest.mark.parametrize("sweep", SWEEPS)
def test_every_value_under_every_scale_is_written_like_the_reference(layout, sweep):
    """Rows of ones make latents of the weights; groups of 16 stand beside equal, smaller and empty ones."""
    weights = SWEEPS[sweep]().float().view(-1, 16, 2, 16)
    weights[:, :, 1] *= 2.0 ** -(torch.arange(len(weights)) % 12)[:, None, None]
    weights[::13, :, 1] = 0
    weights = weights.flatten(1)
    pages = -(-len(weights) // 64)
    near, far = (lk.new_kv_cache(layout, pages + 1, 64, device=d) for d in ("cpu", "cuda"))
    rows, table, position = torch.ones(1, 512).bfloat16(), angle_table(1), torch.tensor([0])
    given = [x.cuda() for x in (rows, table, position, weights, torch.arange(len(weights)) + 1)]
    for n in range(len(weights)):
        lk.compress1(
            given[0], given[3][n], far, given[4][n : n + 1], given[2], given[1], eps=0, layout=layout, page_size=64
        )
    values = weights.bfloat16().float()
    reference.write_latents(
        values, near, torch.arange(len(weights)) + 1, torch.zeros(len(weights), dtype=torch.int64), table,
        lk.KVLayout.parse(layout), 64, first_slot=1,
    )  # fmt: skip
    assert torch.equal(far.cpu(), near)


@pytest.mark.parametrize("count", [1, 2, 1024, 1025, 4097, 20001])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_number_of_rows_is_compressed(layout, count):
    rows, positions = summable_rows(count, torch.bfloat16), torch.arange(count) % 101
    slots = torch.arange(count)
    slots[3::7] = 0
    results = []
    for device in ("cuda", "cpu"):
        cache = lk.new_kv_cache(layout, -(-count // PAGE), PAGE, device=device)
        given = [x.to(device) for x in (rows, WEIGHT)], [x.to(device) for x in (slots, positions, TABLE)]
        out = torch.full((count, 640), 9.0, dtype=torch.bfloat16, device=device)
        lk.compress1(*given[0], cache, *given[1], eps=EPS, layout=layout, page_size=PAGE, out=out[:, 64:576])
        results.append((cache.cpu(), out.cpu()))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rows_bits_do_not_depend_on_the_batch(layout):
    count = 4099
    rows = torch.randn(count, 512, generator=torch.Generator().manual_seed(1)).bfloat16().cuda()
    weight, table, slots = WEIGHT.cuda(), TABLE.cuda(), torch.arange(1, count + 1).cuda()
    positions = torch.arange(count).cuda() % 97

    def run(some: Tensor) -> tuple[Tensor, Tensor]:
        cache = lk.new_kv_cache(layout, count // 64 + 1, 64, device="cuda")
        latent = lk.compress1(
            rows[some], weight, cache, slots[some], positions[some], table, eps=EPS, layout=layout, page_size=64
        )
        return latent, lk.load_kv(cache, slots[some], layout=layout, page_size=64)

    whole = run(torch.arange(count).cuda())
    for size in (1, 37, 1030):
        some = torch.randperm(count, generator=torch.Generator().manual_seed(size))[:size].cuda()
        for part, all_of_it in zip(run(some), whole, strict=True):
            assert torch.equal(part, all_of_it[some])


@pytest.mark.parametrize("layout", ["v41", "v41_fp4"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_slots_and_latents_past_four_gibibytes_are_written(layout, dtype):
    pages = 4 * GIB // lk.KVLayout.parse(layout).page_bytes(256) + 3
    far, near = (lk.new_kv_cache(layout, n, 256, device="cuda") for n in (pages, 2))
    wide = torch.zeros(2 * GIB + 1536, dtype=torch.bfloat16, device="cuda")
    out = wide.as_strided((3, 512), (GIB + 512, 1))
    rows, last = summable_rows(3, torch.bfloat16).cuda(), pages * 256 - 1
    slots, positions = torch.tensor([last, last - 255, last - 256], device="cuda"), torch.arange(3, device="cuda")
    given = (WEIGHT.cuda(), positions, TABLE.cuda())

    def run(cache: Tensor, slots: Tensor, out: Tensor | None = None) -> Tensor:
        form = {"eps": EPS, "layout": layout, "page_size": 256, "out": out}
        return lk.compress1(rows, given[0], cache, slots.to(dtype), *given[1:], **form)

    want = run(near, slots - (pages - 2) * 256)
    run(far, slots, out)
    assert torch.equal(out, want)
    assert torch.equal(far[-2:], near)
    assert all(int(part.count_nonzero()) == 0 for part in far[:-2].split(2048))
    run(far, torch.tensor([last + 1, 2**31 - 1, -(2**31)], device="cuda"), out)
    assert torch.equal(far[-2:], near)


# --- two tokens a latent ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["v41", "v41_fp4", "bf16"])
def test_a_captured_decode_step_follows_its_inputs_for_fifty_steps(layout):
    needs_kernels()
    first = [n % 5 for n in range(37)]
    got, want = Requests(layout, 2, first, "cuda"), Requests(layout, 2, first)
    rows = torch.zeros(37, 1024, device="cuda")
    where = [torch.zeros(37, dtype=torch.int64, device="cuda") for _ in range(3)]  # all padded
    out, weight, table = latents(37, "cuda"), WEIGHT.cuda(), TABLE.cuda()

    def step() -> None:
        lk.compress2(rows, got.state, weight, got.cache, *where, table, eps=EPS, layout=layout, page_size=PAGE, out=out)

    graph, _ = captured(step)
    for n in range(50):
        new, numbers = exact_tokens(37, n), [x.clone() for x in want.block(1)]
        numbers[0][n % 37], numbers[2][n % 37] = 0, 2**40  # a padded row, its request is nobody's
        if n % 2:
            want.position[n % 37] -= 1  # it comes again
        rows.copy_(new)
        for x, y in zip(where, numbers, strict=True):
            x.copy_(y)
        out.fill_(9)
        graph.replay()
        expected = latents(37)
        want.reference_decode(new, tuple(numbers), expected)
        assert torch.equal(out.cpu(), expected)
        assert_equal(got, want)


@pytest.mark.parametrize("draft_len", [1, 2, 3, 4, 5, 6, 7, 8])
def test_verifications_of_many_requests_do_not_race(draft_len):
    """The smallest ring, so that a state row read too late or written too early shows."""
    count, ring = 400, 1 << draft_len.bit_length()
    first = [n % (2 * ring) for n in range(count)]
    got, want = Requests("v41", ring, first, "cuda"), Requests("v41", ring, first)
    for step in range(5):
        where, rows = want.block(draft_len), exact_tokens(count * draft_len, step)
        where[0][1 :: draft_len + 2] = 0
        outs = latents(len(rows), "cuda"), latents(len(rows))
        got.decode(rows, where, outs[0], draft_len)
        want.reference_decode(rows, where, outs[1], draft_len)
        assert torch.equal(outs[0].cpu(), outs[1])
        assert_equal(got, want)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ring", [2, 8])
def test_ragged_chunks_are_pooled_and_parked(layout, ring):
    lengths = [1, 0, 2, 3, 90, 17, 64, 5, 8, 1] * 5
    first = [n % 7 for n in range(len(lengths))]
    got, want = Requests(layout, ring, first, "cuda"), Requests(layout, ring, first)
    for step, again in enumerate((lengths, [n % 4 for n in range(len(lengths))])):
        blocks = [
            (request * want.room + int(at) + n + 2, int(at) + n, request)
            for request, (at, length) in enumerate(zip(want.position, again, strict=True))
            for n in range(length)
        ]
        where = tuple(torch.tensor(x) for x in zip(*blocks, strict=True))
        where[0][11::13] = 0
        want.position += torch.tensor(again)
        rows = exact_tokens(len(blocks), step)
        outs = latents(len(rows), "cuda"), latents(len(rows))
        got.prefill(rows, where, again, outs[0])
        want.reference_prefill(rows, where, again, outs[1])
        assert torch.equal(outs[0].cpu(), outs[1])
        assert_equal(got, want)


@pytest.mark.parametrize("spread", [1e-3, 3.0, 60.0])
def test_pooled_pairs_have_the_references_bits_in_any_number(spread):
    for count in (1, 2048, 5000):
        rows, held = random_tokens(count, 0, spread), random_tokens(2 * count + 1, 1, spread)
        numbers = torch.arange(1, 2 * count, 2), torch.arange(count) - 1, torch.arange(count) - 1, torch.arange(count)
        pooled = []
        for device in ("cuda", "cpu"):
            parts = [x.to(device) for x in (rows[:, :512], rows[:, 512:], held[:, :512], held[:, 512:])]
            given = [x.to(device) for x in numbers]
            pooled.append(lk.pool_pairs(*parts[:2], *given, *parts[2:], 2 * count, ring=2))
        for x, y in zip(*pooled, strict=True):
            assert torch.equal(x.cpu(), y)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_latents_bits_do_not_depend_on_the_batch_or_the_form(layout):
    """Random tokens: the norm's sum is the same however many programs, warps and rows a call has."""
    count = 2 * 2100
    rows = random_tokens(count, 5).cuda()
    positions = (torch.arange(count) % 64).cuda()
    requests, raw_slots = (torch.arange(count) // 64).cuda(), (torch.arange(count) + 2).cuda()
    weight, table = WEIGHT.cuda(), TABLE.cuda()
    state = torch.zeros(2 * (count // 64 + 1), 1024, device="cuda")
    form = {"eps": EPS, "layout": layout, "page_size": 64}

    def run(some: slice, draft_len: int) -> tuple[Tensor, Tensor]:
        cache = lk.new_kv_cache(layout, count // 128 + 1, 64, device="cuda")
        where = raw_slots[some], positions[some], requests[some]
        if draft_len:
            latent = lk.compress2(
                rows[some], state.repeat(2, 1), weight, cache, *where, table, ring=4, draft_len=draft_len, **form
            )
        else:
            start = torch.zeros(1, dtype=torch.int32, device="cuda")
            latent = lk.compress2_prefill(
                rows[some], state.clone(), weight, cache, *where, table, start, start + len(where[0]), **form
            )
        return latent, lk.load_kv(cache, raw_slots[some] // 2, layout=layout, page_size=64)

    whole = run(slice(0, count), 2)
    for some, draft_len in ((slice(0, count), 0), (slice(640, 644), 2), (slice(640, 644), 0), (slice(0, 200), 2)):
        for part, all_of_it in zip(run(some, draft_len), whole, strict=True):
            assert torch.equal(part, all_of_it[some])


def test_states_past_four_gibibytes_are_read_and_written():
    held = 2**20 + 4  # rows of 4 KiB
    state = torch.zeros(held, 1024, device="cuda")
    cache = lk.new_kv_cache("v41", 1, PAGE, device="cuda")
    request, rows = torch.tensor([held // 2 - 1], device="cuda"), exact_tokens(2, 0).cuda()
    for n in range(2):
        numbers = torch.tensor([2 + n], device="cuda"), torch.tensor([n], device="cuda"), request
        out = lk.compress2(
            rows[n : n + 1], state, WEIGHT.cuda(), cache, *numbers, TABLE.cuda(), eps=EPS, layout="v41", page_size=PAGE
        )
    assert torch.equal(state[-2], rows[0])
    assert int(state[:-2].count_nonzero()) == 0
    assert int(state[-1].count_nonzero()) == 0
    want = latents(1)
    small = torch.stack((rows[0], rows[0])).cpu()
    reference.compress2(
        rows[1:].cpu(), small, WEIGHT, cache.cpu(), torch.tensor([3]), torch.tensor([1]), torch.tensor([0]), TABLE, EPS,
        "v41", PAGE, 2, 1, want,
    )  # fmt: skip
    assert torch.equal(out.cpu(), want)
