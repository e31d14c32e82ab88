"""What the compressors mean: latents recomputed from whole streams, drafts that are rejected, rows that are padding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import latentkv as lk
from tests.compress.streams import EPS, PAGE, TABLE, WEIGHT, Requests, exact_tokens, latents, random_tokens

LAYOUTS = ["v4", "v41", "v41_fp4", "v41_mxfp4", "bf16", "v41_interleaved", "v41_fp4_interleaved"]


def pooled(rows: Tensor) -> Tensor:
    """bf16 latents before the norm of a whole stream whose scores are equal or 200 apart, from scratch."""
    a, b = rows[0::2], rows[1::2]
    kv_a, kv_b, s_a, s_b = a[:, :512], b[:, :512], a[:, 512:], b[:, 512:]
    return torch.where(s_a == s_b, (kv_a + kv_b) / 2, torch.where(s_a > s_b, kv_a, kv_b)).bfloat16()


def written(rows: Tensor, slots: Tensor, positions: Tensor, layout: str, cache: Tensor) -> None:
    """Store projections through the other ops: norm, rotate, and for fp8 pages fp4 numerics first."""
    if layout in ("v4", "v41", "v41_interleaved"):
        plain = lk.new_kv_cache("bf16", len(rows) // PAGE + 1, PAGE)
        own = torch.arange(len(rows))
        identity = torch.tensor([[1.0, 0.0] * 32])
        lk.norm_rope_store_kv(rows, WEIGHT, plain, own, own * 0, identity, eps=EPS, layout="bf16", page_size=PAGE)
        latent = lk.load_kv(plain, own, layout="bf16", page_size=PAGE)
        values = lk.rope_fake_quant(latent, TABLE, kind="latent", positions=positions)
        lk.store_kv(values, cache, slots, layout=layout, page_size=PAGE)
    else:
        lk.norm_rope_store_kv(rows, WEIGHT, cache, slots, positions, TABLE, eps=EPS, layout=layout, page_size=PAGE)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_compress1_writes_what_the_single_steps_write(backend, layout):
    rows = (2.0 * torch.randint(-15, 16, (5, 512), generator=torch.Generator().manual_seed(0))).bfloat16()
    slots, positions = torch.tensor([3, 0, 40, -1, 17]), torch.tensor([0, 5, 96, 7, 200])
    got, want = (lk.new_kv_cache(layout, 3, PAGE, device=d) for d in (backend.device, "cpu"))
    latent = lk.compress1(
        rows.to(backend.device), WEIGHT.to(backend.device), got, slots.to(backend.device), positions.to(backend.device),
        TABLE.to(backend.device), eps=EPS, layout=layout, page_size=PAGE,
    )  # fmt: skip
    written(rows, torch.where(slots == 0, -1, slots), positions, layout, want)
    assert torch.equal(got.cpu(), want)
    plain = lk.new_kv_cache("bf16", 1, PAGE)
    own = torch.arange(5)
    identity = torch.tensor([[1.0, 0.0] * 32])
    lk.norm_rope_store_kv(rows, WEIGHT, plain, own, own * 0, identity, eps=EPS, layout="bf16", page_size=PAGE)
    assert torch.equal(latent.cpu(), lk.load_kv(plain, own, layout="bf16", page_size=PAGE))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_prompt_becomes_the_latents_of_its_pairs(backend, layout):
    tokens = [exact_tokens(8, 1), exact_tokens(6, 2)]
    requests = Requests(layout, 2, [0, 0], backend.device)
    positions = torch.cat([torch.arange(8), torch.arange(6)])
    owner = torch.tensor([0] * 8 + [1] * 6)
    raw = owner * requests.room + positions + 2
    out = latents(14, backend.device)
    requests.prefill(torch.cat(tokens), (raw, positions, owner), [8, 6], out)
    want = lk.new_kv_cache(layout, requests.cache.shape[0], PAGE)
    odd = positions % 2 == 1
    pairs = torch.cat([pooled(t) for t in tokens])
    written(pairs, raw[odd] // 2, positions[odd] - 1, layout, want)
    assert torch.equal(requests.cache.cpu(), want)
    assert (out[~odd] == 9).all()


@pytest.mark.parametrize("seed", range(4))
def test_rejected_drafts_leave_no_trace(backend, seed):
    """Random accepted counts: pages equal those of the accepted streams alone, whatever the drafts held."""
    generator = torch.Generator().manual_seed(seed)
    draft_len = int(torch.randint(1, 9, (), generator=generator))
    ring = 1 << draft_len.bit_length()
    layout = "v41_fp4"
    requests = Requests(layout, ring, [0, 0], backend.device)
    accepted: list[list[Tensor]] = [[], []]
    for step in range(6):
        rows = exact_tokens(2 * draft_len, 100 * seed + step)
        at = requests.position.clone()
        where = requests.block(draft_len)
        requests.decode(rows, where, latents(2 * draft_len, backend.device), draft_len)
        take = torch.randint(1, draft_len + 1, (2,), generator=generator)
        for r in range(2):
            accepted[r].append(rows[r * draft_len : r * draft_len + int(take[r])])
        requests.position = at + take
    want = lk.new_kv_cache(layout, requests.cache.shape[0], PAGE)
    got = requests.cache.cpu()
    for r in range(2):
        stream = torch.cat(accepted[r])
        stream = stream[: len(stream) // 2 * 2]
        first = torch.arange(0, len(stream), 2)
        slots = (r * requests.room + first + 2) // 2
        written(pooled(stream), slots, first, layout, want)
        for slot in slots.tolist():
            for cache in (got, want):
                assert cache.shape == want.shape
            rows_of = [lk.load_kv(c, torch.tensor([slot]), layout=layout, page_size=PAGE) for c in (got, want)]
            assert torch.equal(*rows_of)


@pytest.mark.parametrize(
    ("raw", "request_id"), [(0, 0), (0, -(2**31)), (0, 2**31 - 1), (-5, 0), (10**6, 0), (40, -1), (40, 99)]
)
def test_a_padded_row_touches_nothing(backend, raw, request_id):
    requests = Requests("v41", 2, [0], backend.device)
    requests.cache.fill_(0xAA)
    state, cache = requests.state.clone(), requests.cache.clone()
    for position in (6, 7):
        where = (torch.tensor([raw]), torch.tensor([position]), torch.tensor([request_id]))
        out = latents(1, backend.device)
        requests.decode(random_tokens(1, 0), where, out)
        requests.prefill(random_tokens(1, 0), where, [1], out)
        assert (out == 9).all()
    assert torch.equal(requests.state, state)
    assert torch.equal(requests.cache, cache)


def test_without_out_rows_that_have_no_latent_are_zero(backend):
    requests = Requests("bf16", 2, [0], backend.device)
    given = [x.to(backend.device) for x in (*requests.block(1),)]
    rows, weight, table = (x.to(backend.device) for x in (random_tokens(1, 0), WEIGHT, TABLE))
    out = lk.compress2(
        rows, requests.state, weight, requests.cache, *given, table, eps=EPS, layout="bf16", page_size=PAGE
    )
    assert (out == 0).all()
    assert torch.equal(requests.state[0], rows[0])


def test_a_nan_stays_in_its_own_row(backend):
    rows = exact_tokens(4, 3)
    rows[0, 5] = float("nan")
    requests = Requests("bf16", 2, [0], backend.device)
    out = latents(4, backend.device)
    requests.prefill(rows, requests.block(4), [4], out)
    assert out[1].isnan().any()
    assert not out[3].isnan().any()


def test_pooling_is_a_softmax_over_the_pair(backend):
    rows, held = random_tokens(3, 5), random_tokens(6, 6)
    kv, score, state_kv, state_score = (
        x.contiguous().to(backend.device) for x in (rows[:, :512], rows[:, 512:], held[:, :512], held[:, 512:])
    )
    numbers = [torch.tensor(x, device=backend.device) for x in ([1, 2, 3], [2, 4, 0], [1, 2, -1], [0, 1, 7])]
    pooled_rows, positions, slots = lk.pool_pairs(kv, score, *numbers, state_kv, state_score, 5, ring=2)
    pair_score = torch.stack((held[0, 512:], rows[0, 512:])).double().softmax(0)
    want = (torch.stack((held[0, :512], rows[0, :512])).double() * pair_score).sum(0)
    torch.testing.assert_close(pooled_rows[0].cpu().double(), want, rtol=1e-6, atol=1e-6)
    assert (pooled_rows[1:] == 0).all()
    assert positions.tolist() == [0, 2, 2]
    assert slots.tolist() == [1, 2, 0]
    assert torch.equal(state_kv[2].cpu(), rows[1, :512])  # the even position was parked
    assert torch.equal(state_kv[[0, 1, 3, 4, 5]].cpu(), held[[0, 1, 3, 4, 5], :512])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"rows": torch.zeros(2, 1024).bfloat16()}, TypeError, "rows"),
        ({"rows": torch.zeros(2, 512)}, ValueError, "rows"),
        ({"ring": 3}, ValueError, "ring"),
        ({"ring": 2, "draft_len": 2}, ValueError, "ring"),
        ({"draft_len": 3, "ring": 4}, ValueError, "draft_len"),
        ({"state": torch.zeros(4, 512)}, ValueError, "state"),
        ({"requests": torch.zeros(2)}, TypeError, "requests"),
        ({"raw_slots": torch.zeros(3, dtype=torch.int64)}, ValueError, "raw_slots"),
        ({"layout": "v42"}, ValueError, "layout"),
        ({"page_size": 12}, ValueError, "page_size"),
        ({"eps": -1.0}, ValueError, "eps"),
        ({"weight": torch.zeros(511)}, ValueError, "weight"),
        ({"out": torch.zeros(2, 512)}, TypeError, "out"),
    ],
    ids=str,
)
def test_bad_arguments_raise_before_anything_changes(change, error, message):
    state, cache = torch.ones(4, 1024), lk.new_kv_cache("v41", 2, PAGE)
    ints = torch.tensor([5, 7])
    given = {
        "rows": random_tokens(2, 0), "state": state, "weight": WEIGHT, "cache": cache, "raw_slots": ints,
        "positions": ints, "requests": ints * 0, "freqs": TABLE, "eps": EPS, "layout": "v41", "page_size": PAGE,
        **change,
    }  # fmt: skip
    with pytest.raises(error, match=message):
        lk.compress2(**given)
    assert (state == 1).all()
    assert (cache == 0).all()


def test_ops_trace_and_declare_what_they_change():
    ints = torch.tensor([5, 7])
    cache, state, out = lk.new_kv_cache("v41", 2, PAGE), torch.zeros(4, 1024), latents(2)
    rows = random_tokens(2, 0)
    head = (rows[:, :512].bfloat16(), WEIGHT, cache, ints, ints, TABLE, EPS, "v41", PAGE, out)
    torch.library.opcheck(torch.ops.latentkv.compress1.default, head)
    common = (rows, state, WEIGHT, cache, ints, ints, ints * 0, TABLE)
    torch.library.opcheck(torch.ops.latentkv.compress2.default, (*common, EPS, "v41", PAGE, 2, 1, out))
    chunk = (torch.tensor([0], dtype=torch.int32), torch.tensor([2], dtype=torch.int32))
    torch.library.opcheck(torch.ops.latentkv.compress2_prefill.default, (*common, *chunk, EPS, "v41", PAGE, 2, out))
