"""Attention over window rows and extra rows: values, masks, sink, log-sum-exp."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import latentkv as lk
from tests.attend.cases import HEADS, PAIRS, Pool, angle_table, assert_matches, expected, queries

INF = math.inf


def constant_rows(*values: float) -> torch.Tensor:
    """bf16 rows that hold one number each."""
    return torch.tensor(values).unsqueeze(1).expand(-1, 512).bfloat16()


def pool_of(backend, *values: float, layout: str = "v41") -> Pool:
    return Pool.of(constant_rows(*values), layout, 16, backend.device)


def same_bits(a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor]) -> bool:
    return all(torch.equal(x.view(torch.int16), y.view(torch.int16)) for x, y in zip(a, b, strict=True))


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [m.name for m in lk.KVLayout.members()])
def test_a_single_row_is_the_out_and_its_score_the_lse(backend, layout):
    row = torch.arange(512).remainder(13).sub(6).bfloat16().unsqueeze(0)
    pool = Pool.of(row, layout, 16, backend.device)
    query = torch.zeros(1, 2, 512)
    query[0, :, 7] = torch.tensor([0.5, -3.0])
    got = lk.sparse_mla(query.bfloat16().to(backend.device), pool.rows(pool.filled.int().unsqueeze(0)), scale=0.25)
    stored = torch.from_numpy(pool.table()[pool.filled[0]])
    assert torch.equal(got[0].cpu().double(), stored.expand(1, 2, 512))
    assert got[1].cpu().tolist() == [[0.125 * stored[7].item(), -0.75 * stored[7].item()]]


def test_a_zero_query_averages_the_rows_exactly(backend):
    pool = pool_of(backend, 1.0, -2.0, 8.0, 3.0)
    out, lse = lk.sparse_mla(torch.zeros(1, 3, 512).bfloat16().to(backend.device), pool.rows(pool.filled[None].int()))
    assert torch.equal(out.cpu(), torch.full((1, 3, 512), 2.5).bfloat16())
    assert lse.cpu().tolist() == [pytest.approx([math.log(4)] * 3, abs=1e-6)]


def test_a_slot_given_twice_counts_twice_within_and_across_caches(backend):
    pool = pool_of(backend, 1.0, -3.0)
    a, b = pool.filled.int().tolist()
    query = torch.zeros(1, 1, 512).bfloat16().to(backend.device)
    window, extra = pool.rows(torch.tensor([[a, b, b]]).int()), pool.rows(torch.tensor([[-1, b]]).int())
    out, lse = lk.sparse_mla(query, window, extra)
    assert out.unique().tolist() == [-2.0]
    assert lse.item() == pytest.approx(math.log(4), abs=1e-6)


def test_two_scores_weigh_rows_by_the_softmax_of_scaled_products(backend):
    rows = torch.zeros(2, 512)
    rows[0, 0], rows[1, 1], rows[0, 511], rows[1, 511] = 1.0, 1.0, 4.0, -4.0
    pool = Pool.of(rows.bfloat16(), "bf16", 16, backend.device)
    query = torch.zeros(1, 1, 512)
    query[0, 0, 0], query[0, 0, 1] = 2.0, 1.0
    out, lse = lk.sparse_mla(query.bfloat16().to(backend.device), pool.rows(pool.filled[None].int()), scale=1.5)
    p = 1 / (1 + math.exp(-1.5))
    assert out[0, 0, 0].item() == pytest.approx(p, rel=2**-8)
    assert out[0, 0, 511].item() == pytest.approx(4 * p - 4 * (1 - p), rel=2**-6)
    assert lse.item() == pytest.approx(math.log(math.exp(3.0) + math.exp(1.5)), abs=1e-5)


def test_the_default_scale_is_the_root_of_the_width(backend):
    pool = pool_of(backend, 1.0)
    query = torch.ones(1, 1, 512).bfloat16().to(backend.device)
    _, lse = lk.sparse_mla(query, pool.rows(pool.filled[None].int()))
    assert lse.item() == pytest.approx(512**0.5, rel=1e-6)


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_every_accepted_pair_of_layouts_matches_the_oracle(backend, first, second):
    window = Pool.random(24, first, 16, backend.device, seed=1)
    extra = Pool.random(30, second, 8, backend.device, seed=2, pages=5)
    query, sink = queries(3, 4, backend.device), torch.tensor([0.5, -2.0, 3.0, 0.0], device=backend.device)
    slots, more = window.pick(3, 20, 3), extra.pick(3, 33, 4)
    got = lk.sparse_mla(query, window.rows(slots), extra.rows(more), sink=sink)
    assert_matches(backend, got, expected(query, (window, slots, None), (extra, more, None), sink=sink))


@pytest.mark.parametrize("heads", HEADS)
def test_any_head_count_matches_the_oracle(backend, heads):
    window = Pool.random(40, "v41", 32, backend.device, seed=heads)
    extra = Pool.random(40, "v41_fp4", 16, backend.device, seed=heads + 1)
    query, slots, more = queries(2, heads, backend.device), window.pick(2, 17, 5), extra.pick(2, 9, 6)
    got = lk.sparse_mla(query, window.rows(slots), extra.rows(more))
    assert_matches(backend, got, expected(query, (window, slots, None), (extra, more, None)))


@pytest.mark.parametrize("page_size", [1, 2, 64, 256])
def test_any_page_size_matches_the_oracle(backend, page_size):
    pool = Pool.random(5, "v4", page_size, backend.device, seed=page_size, pages=7, gap=576)
    query, slots = queries(2, 2, backend.device), pool.pick(2, 12, 1)
    assert_matches(backend, lk.sparse_mla(query, pool.rows(slots)), expected(query, (pool, slots, None)))


@given(data=st.data())
def test_holes_lengths_and_widths_of_any_kind_match_the_oracle(backend, data):
    tokens, heads = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([1, 2, 5]))
    widths = data.draw(st.tuples(st.integers(0, 40), st.integers(0, 70)))
    ints = st.sampled_from([torch.int32, torch.int64])
    pools = [Pool.random(20, n, 16, backend.device, seed=s) for s, n in enumerate(("v41", "v41_fp4"))]
    segments = []
    for pool, width in zip(pools, widths, strict=True):
        slots = pool.pick(tokens, width, data.draw(st.integers(0, 99)), holes=data.draw(st.sampled_from([0, 0.5, 1])))
        lengths = None
        if data.draw(st.booleans()):
            drawn = data.draw(st.lists(st.integers(-3, width + 3), min_size=tokens, max_size=tokens))
            lengths = torch.tensor(drawn, dtype=data.draw(ints))
        segments.append((pool, slots.to(data.draw(ints)), lengths))
    query = queries(tokens, heads, backend.device, seed=data.draw(st.integers(0, 99)))
    sink = torch.linspace(-4, 9, heads).to(backend.device) if data.draw(st.booleans()) else None
    got = lk.sparse_mla(query, *(pool.rows(slots, lengths) for pool, slots, lengths in segments), sink=sink)
    assert_matches(backend, got, expected(query, *segments, **({} if sink is None else {"sink": sink})))


@pytest.mark.parametrize("size", [1e-30, 0.03, 300.0, 20000.0])
def test_scores_of_any_size_are_stable(backend, size):
    """Up to scores of 10^5, far past where an exponential overflows."""
    pool = Pool.random(20, "v41", 16, backend.device, seed=5)
    query, slots = queries(2, 3, backend.device, size=size), pool.pick(2, 70, 1)
    got = lk.sparse_mla(query, pool.rows(slots))
    assert bool(torch.isfinite(got[1]).all())
    assert_matches(backend, got, expected(query, (pool, slots, None)))


def test_far_negative_scores_keep_their_weights(backend):
    pool = pool_of(backend, 1.0, -3.0)
    query = torch.zeros(1, 1, 512)
    query[..., 0] = -1.0
    # both scores are about -1000 apart from zero, so only their difference may count
    shifted = Pool.of(torch.stack((constant_rows(1000.0)[0], constant_rows(1008.0)[0])), "bf16", 16, backend.device)
    out, lse = lk.sparse_mla(query.bfloat16().to(backend.device), shifted.rows(shifted.filled[None].int()), scale=1.0)
    assert lse.item() == pytest.approx(-1000 + math.log1p(math.exp(-8)), abs=1e-3)
    assert out.unique().tolist() == [1000.0]
    out, lse = lk.sparse_mla(query.bfloat16().to(backend.device), pool.rows(pool.filled[None].int()), scale=1.0)
    assert lse.item() == pytest.approx(math.log(math.exp(-1) + math.exp(3)), abs=1e-5)
    assert out[0, 0, 0].item() == pytest.approx((math.exp(-1) - 3 * math.exp(3)) / (math.exp(-1) + math.exp(3)), 2**-7)


# --- what does not count ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 31, 32, 63, 64, 65, 127, 128, 129, 257])
def test_only_the_last_lane_valid_is_exact(backend, width):
    pool = pool_of(backend, 5.0)
    slots = torch.full((1, width), -1, dtype=torch.int32)
    slots[0, -1] = pool.filled[0]
    query = torch.ones(1, 2, 512).bfloat16().to(backend.device)
    out, lse = lk.sparse_mla(query, pool.rows(slots), scale=2.0**-9)
    assert out.unique().tolist() == [5.0]
    assert lse.unique().tolist() == [5.0]


@pytest.mark.parametrize("which", ["window", "extra"])
def test_one_cache_without_valid_rows_leaves_the_other_alone(backend, which):
    full, empty = pool_of(backend, 2.0, 6.0), Pool.random(3, "v41_fp4", 8, backend.device, seed=1)
    rows, none = full.rows(full.filled[None].int()), empty.rows(torch.full((1, 70), -1, dtype=torch.int32))
    query = torch.zeros(1, 1, 512).bfloat16().to(backend.device)
    out, lse = lk.sparse_mla(query, *((none, rows) if which == "window" else (rows, none)))
    assert out.unique().tolist() == [4.0]
    assert lse.item() == pytest.approx(math.log(2), abs=1e-6)


def test_a_cache_without_pages_has_no_valid_rows(backend):
    full, device = pool_of(backend, 2.0), backend.device
    rows = full.rows(full.filled[None].int())
    none = lk.Rows(lk.new_kv_cache("v41", 0, 16, device=device), torch.zeros(1, 3).int().to(device), "v41", 16)
    query = torch.zeros(1, 1, 512).bfloat16().to(device)
    assert lk.sparse_mla(query, none, rows)[0].unique().tolist() == [2.0]
    assert lk.sparse_mla(query, rows, none)[0].unique().tolist() == [2.0]
    assert lk.sparse_mla(query, none)[1].tolist() == [[-INF]]


@pytest.mark.parametrize(("given", "want"), [(-INF, -INF), (INF, INF)])
def test_without_a_valid_row_out_is_zero_and_lse_infinite(backend, given, want):
    pool, device = Pool.random(3, "v41", 16, backend.device, seed=1), backend.device
    slots = torch.tensor([[-1, -1, -1], [0, 1, 2], [pool.filled[0], -1, -1]], dtype=torch.int32)
    rope = (angle_table(4, device), torch.tensor([1, 2, 3], device=device))
    out, lse = lk.sparse_mla(
        queries(3, 2, device),
        pool.rows(slots, torch.tensor([3, 0, 1])),
        pool.rows(slots[:, :0]),
        sink=torch.tensor([0.5, -INF], device=device),
        inverse_rope=rope,
        empty_lse=given,
    )
    assert out[:2].cpu().count_nonzero() == 0
    assert lse[:2].tolist() == [[want, want], [want, want]]
    assert bool(torch.isfinite(lse[2]).all())


OUTSIDE = [-1, -2, -(2**31), 2**31 - 1, 64, 65, -64]
OUTSIDE_64 = [2**32 + 3, 2**40, -(2**40) + 3, 2**63 - 1, -(2**63)]


@pytest.mark.parametrize(("dtype", "outside"), [(torch.int32, OUTSIDE), (torch.int64, OUTSIDE + OUTSIDE_64)])
def test_slots_outside_the_cache_are_skipped(backend, dtype, outside):
    pool = pool_of(backend, 2.0, 6.0)
    assert pool.capacity == 64
    inside = pool.filled.tolist()
    slots = torch.tensor([[*outside[:4], inside[0], *outside[4:], inside[1]]], dtype=dtype)
    out, lse = lk.sparse_mla(torch.zeros(1, 1, 512).bfloat16().to(backend.device), pool.rows(slots))
    assert out.unique().tolist() == [4.0]
    assert lse.item() == pytest.approx(math.log(2), abs=1e-6)


@pytest.mark.parametrize("first", ["v4", "v41", "v41_fp4", "v41_mxfp4", "bf16", "v41_fp4_interleaved"])
def test_bytes_of_rows_that_do_not_count_change_no_bit(backend, first):
    """All other bytes are 0xFF in one pool and zero in the other."""
    pool = Pool.random(12, first, 16, backend.device, seed=3)
    clean = lk.new_kv_cache(pool.layout, 4, 16, device=backend.device)
    rows = lk.load_kv(pool.cache, pool.filled.to(backend.device), layout=pool.layout, page_size=16)
    lk.store_kv(rows, clean, pool.filled.to(backend.device), layout=pool.layout, page_size=16)
    rows = lk.load_kv(clean, pool.filled.to(backend.device), layout=pool.layout, page_size=16)
    dirty = Pool.of(rows.cpu(), first, 16, backend.device)
    query, slots = queries(2, 3, backend.device), pool.pick(2, 40, 1)
    unread = torch.tensor([s for s in range(64) if s not in pool.filled.tolist()]).int()
    slots[:, 30:] = unread[:10]
    lengths = torch.tensor([30, 11])
    got = [lk.sparse_mla(query, p.rows(slots, lengths)) for p in (dirty, Pool(clean, pool.layout, 16, pool.filled))]
    assert bool(torch.isfinite(got[0][0]).all())
    assert same_bits(got[0], got[1])


@pytest.mark.parametrize("layout", ["v41", "v41_fp4", "v41_mxfp4", "v4", "bf16"])
def test_a_nan_in_a_valid_row_reaches_its_own_query_only(backend, layout):
    rows = torch.randn(8, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    rows[3, 40] = torch.nan
    pool, device = Pool.of(rows, layout, 16, backend.device), backend.device
    filled = pool.filled.int()
    slots = torch.stack((filled[[0, 1, 2]], filled[[1, 3, 5]], filled[[4, 6, 7]]))
    query = queries(3, 2, device)
    query[1] = 0.0  # not even a zero query hides it
    out, lse = lk.sparse_mla(query, pool.rows(slots), sink=torch.tensor([0.0, INF], device=device))
    assert bool(torch.isnan(out[1]).all())
    assert bool(torch.isnan(lse[1]).all())
    want = expected(query[[0, 2]], (pool, slots[[0, 2]], None), sink=torch.tensor([0.0, INF]))
    assert_matches(backend, (out[[0, 2]], lse[[0, 2]]), want)


# --- sink -------------------------------------------------------------------------------------------------------------


def test_the_sink_joins_the_denominator_alone(backend):
    pool = pool_of(backend, 4.0)
    query = torch.zeros(1, 4, 512).bfloat16().to(backend.device)
    sink = torch.tensor([0.0, -INF, INF, 200.0], device=backend.device)
    out, lse = lk.sparse_mla(query, pool.rows(pool.filled[None].int()), sink=sink)
    assert out[0, :, 0].tolist() == [2.0, 4.0, 0.0, 0.0]
    assert lse.tolist() == [[0.0] * 4]


def test_a_sink_of_minus_infinity_changes_no_bit_and_no_sink_changes_the_lse(backend):
    pool = Pool.random(20, "v41", 16, backend.device, seed=4)
    query, rows = queries(2, 3, backend.device), pool.rows(pool.pick(2, 50, 2))
    plain = lk.sparse_mla(query, rows)
    none = lk.sparse_mla(query, rows, sink=torch.full((3,), -INF, device=backend.device))
    some = lk.sparse_mla(query, rows, sink=torch.tensor([1.0, 5.0, -1.0], device=backend.device))
    assert same_bits(plain, none)
    assert torch.equal(plain[1], some[1])
    assert not torch.equal(plain[0], some[0])


def test_the_sink_is_the_heads_own(backend):
    pool = Pool.random(20, "v41", 16, backend.device, seed=4)
    sink = torch.linspace(-30, 30, 17).to(backend.device)
    query, slots = queries(2, 17, backend.device), pool.pick(2, 20, 2)
    got = lk.sparse_mla(query, pool.rows(slots), sink=sink)
    assert_matches(backend, got, expected(query, (pool, slots, None), sink=sink))


# --- inverse rotation -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("as_complex", [False, True])
def test_the_tail_is_rotated_back_at_each_querys_position(backend, dtype, as_complex):
    pool, table = Pool.random(20, "v41", 16, backend.device, seed=4), angle_table(40, backend.device)
    query, slots = queries(4, 2, backend.device), pool.pick(4, 20, 2)
    positions = torch.tensor([39, 0, 40, -1], dtype=dtype, device=backend.device)  # the last two read row 0
    freqs = torch.view_as_complex(table.unflatten(1, (32, 2))) if as_complex else table
    got = lk.sparse_mla(query, pool.rows(slots), inverse_rope=(freqs, positions))
    assert_matches(backend, got, expected(query, (pool, slots, None), angles=table[[39, 0, 0, 0]]))
    plain = lk.sparse_mla(query, pool.rows(slots))
    assert torch.equal(got[0][..., :448], plain[0][..., :448])
    assert torch.equal(got[1], plain[1])


def test_rotation_of_the_tail_is_undone(backend):
    table = angle_table(9, backend.device)
    row = torch.arange(512).remainder(7).sub(3).bfloat16().unsqueeze(0).to(backend.device)
    cache = lk.new_kv_cache("bf16", 1, 16, device=backend.device)
    lk.store_kv(row, cache, torch.tensor([3], device=backend.device), layout="bf16", page_size=16, freqs=table[8:9])
    rows = lk.Rows(cache, torch.tensor([[3]], device=backend.device), "bf16", 16)
    query = torch.zeros(1, 1, 512).bfloat16().to(backend.device)
    rope = (table, torch.tensor([8], device=backend.device))
    out, _ = lk.sparse_mla(query, rows, inverse_rope=rope)
    assert torch.allclose(out[0].float(), row.float(), atol=0.03)
    assert not torch.allclose(lk.sparse_mla(query, rows)[0][0].float(), row.float(), atol=0.5)


def test_the_rotated_out_is_rounded_once(backend):
    """The mean of 1 and 1 + 2^-7 is no bf16; rounding it before the rotation would lose a step."""
    pool = pool_of(backend, 1.0, 1.0 + 2.0**-7, layout="bf16")
    table = torch.tensor([1.0 + 2.0**-7, 0.0]).repeat(32).unsqueeze(0).to(backend.device)
    rope = (table, torch.tensor([0], device=backend.device))
    query = torch.zeros(1, 1, 512).bfloat16().to(backend.device)
    out, _ = lk.sparse_mla(query, pool.rows(pool.filled[None].int()), inverse_rope=rope)
    assert out[0, 0, 448:].unique().tolist() == [1.0 + 2.0**-6]
    assert out[0, 0, :448].unique().tolist() == [1.0]


@pytest.mark.parametrize("layout", ["bf16", "v41"])
@pytest.mark.parametrize("splits", [1, 2, 64])
def test_a_row_counts_however_low_its_score(backend, layout, splits):
    """A score below fp32's range is its lowest number: the row is not taken for one that is skipped."""
    size = 1e38 if layout == "bf16" else 2.0**120
    pool = pool_of(backend, size, 1.0, layout=layout)
    low, one = pool.filled.tolist()
    query = torch.full((1, 16, 512), -(2.0**20)).bfloat16().to(backend.device)
    alone = torch.tensor([[low, -1, low]], device=backend.device).int()
    out, lse = lk.sparse_mla(query, pool.rows(alone), splits=splits)
    assert (lse == torch.finfo(torch.float32).min).all()
    assert out.isfinite().all()
    assert (out.float() / size - 1.0).abs().max() < 0.01
    beside = torch.tensor([[low, one]], device=backend.device).int()
    out, lse = lk.sparse_mla(query, pool.rows(beside), splits=splits)
    assert (out == 1.0).all()
    assert (lse > -1e10).all()
    skipped, empty = lk.sparse_mla(query, pool.rows(torch.full_like(beside, -1)), splits=splits)
    assert (empty == -math.inf).all()
    assert not skipped.any()


@pytest.mark.parametrize("splits", [1, 2])
def test_an_infinite_row_is_not_lost(backend, splits):
    rows = torch.ones(2, 512).bfloat16()
    rows[0] = math.inf
    cache = rows.view(torch.uint8).reshape(1, 2048).to(backend.device)
    slots = torch.tensor([[0, 1]], device=backend.device)
    query = -torch.ones(1, 1, 512).bfloat16().to(backend.device)
    out, lse = lk.sparse_mla(query, lk.Rows(cache, slots, "bf16", 2), splits=splits)
    assert out.isnan().all()
    assert lse.isfinite().all()


# --- independence, strides, sizes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [1, 2, 16])
def test_a_querys_bits_do_not_depend_on_the_batch(backend, heads):
    window = Pool.random(40, "v41", 32, backend.device, seed=1)
    extra = Pool.random(40, "v41_fp4", 16, backend.device, seed=2)
    query, sink = queries(7, heads, backend.device), torch.linspace(-1, 1, heads).to(backend.device)
    slots, more = window.pick(7, 40, 1), extra.pick(7, 66, 2)
    lengths, more_lengths = torch.tensor([40, 1, 3, 0, 17, 33, 40]), torch.tensor([66, 66, 2, 5, 64, 0, 65])
    rope = (angle_table(8, backend.device), torch.arange(7, device=backend.device))

    def run(which: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        rows = window.rows(slots[which], lengths[which])
        others = extra.rows(more[which], more_lengths[which])
        return lk.sparse_mla(query[which], rows, others, sink=sink, inverse_rope=(rope[0], rope[1][which]))

    whole, turned = run(list(range(7))), run([6, 5, 4, 3, 2, 1, 0])
    assert same_bits(whole, (turned[0].flip(0), turned[1].flip(0)))
    for t in range(7):
        alone = run([t])
        assert same_bits((whole[0][t], whole[1][t]), (alone[0][0], alone[1][0]))


@pytest.mark.parametrize("splits", [2, 3, 5, 64])
def test_splits_of_any_number_match_the_oracle(backend, splits):
    """Parts without a block, without a valid row, and in both caches."""
    window = Pool.random(40, "v41", 32, backend.device, seed=1)
    extra = Pool.random(40, "v41_fp4", 16, backend.device, seed=2)
    query, sink = queries(4, 3, backend.device), torch.tensor([0.5, -2.0, 3.0], device=backend.device)
    slots, more = window.pick(4, 70, 1), extra.pick(4, 100, 2)
    slots[2], more[2, :64] = -1, -1
    lengths, more_lengths = torch.tensor([70, 0, 9, 33]), torch.tensor([100, 0, 100, 3])
    table, positions = angle_table(4, backend.device), torch.arange(4, device=backend.device)
    got = lk.sparse_mla(
        query, window.rows(slots, lengths), extra.rows(more, more_lengths),
        sink=sink, inverse_rope=(table, positions), splits=splits,
    )  # fmt: skip
    want = expected(query, (window, slots, lengths), (extra, more, more_lengths), sink=sink, angles=table)
    assert_matches(backend, got, want)
    alone = lk.sparse_mla(
        query[3:], window.rows(slots[3:], lengths[3:]), extra.rows(more[3:], more_lengths[3:]),
        sink=sink, inverse_rope=(table, positions[3:]), splits=splits,
    )  # fmt: skip
    assert same_bits((got[0][3:], got[1][3:]), alone)


def test_strided_queries_slots_and_lengths_are_read_as_strided(backend):
    pool = Pool.random(20, "v41", 16, backend.device, seed=4)
    wide, slots = queries(3, 5, backend.device), pool.pick(3, 20, 2)
    table = torch.full((3, 50), 0, dtype=torch.int32)
    table[:, 7:27] = slots
    lengths = torch.tensor([[20, 9], [5, 9], [11, 9]], device=backend.device)
    rows = lk.Rows(pool.cache, table.to(backend.device)[:, 7:27], pool.layout, 16, lengths[:, 0])
    spread = torch.cat((wide, wide), -1)[:, 1:4, 512:]  # a token stride of 5120, a head stride of 1024
    got = lk.sparse_mla(spread, rows)
    assert same_bits(got, lk.sparse_mla(wide[:, 1:4].contiguous(), pool.rows(slots, lengths[:, 0].contiguous())))


@pytest.mark.parametrize(("tokens", "width"), [(0, 5), (0, 0), (2, 0)])
def test_nothing_to_do_gives_empty_results(backend, tokens, width):
    pool = Pool.random(3, "v41", 16, backend.device, seed=4)
    rows = pool.rows(torch.zeros(tokens, width, dtype=torch.int32))
    out, lse = lk.sparse_mla(queries(tokens, 2, backend.device), rows, rows)
    assert out.shape == (tokens, 2, 512)
    assert out.dtype == torch.bfloat16
    assert out.count_nonzero() == 0
    assert lse.tolist() == [[-INF, -INF]] * tokens


def test_no_argument_is_changed(backend):
    pool = Pool.random(20, "v41", 16, backend.device, seed=4)
    slots, lengths = pool.pick(2, 20, 2).to(backend.device), torch.tensor([-4, 99], device=backend.device)
    query, sink = queries(2, 2, backend.device), torch.ones(2, device=backend.device)
    rope = (angle_table(3, backend.device), torch.tensor([9, 1], device=backend.device))
    given = (pool.cache, slots, lengths, query, sink, *rope)
    before = [x.clone() for x in given]
    lk.sparse_mla(query, pool.rows(slots, lengths), sink=sink, inverse_rope=rope)
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))
