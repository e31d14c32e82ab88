"""Merging of attention over disjoint sets of rows."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import latentkv as lk
from tests.attend import oracle
from tests.attend.cases import Pool, assert_matches, expected, queries

INF, NAN = math.inf, math.nan


def partials(splits: int, tokens: int, heads: int, seed: int, dtype=torch.float32, spread: float = 3.0):
    """Random outs and lses, a fifth of them empty with NaN where their out would be."""
    generator = torch.Generator().manual_seed(seed)
    outs = torch.randn(splits, tokens, heads, 512, generator=generator).to(dtype)
    lses = torch.randn(splits, tokens, heads, generator=generator) * spread
    empty = torch.rand(lses.shape, generator=generator) < 0.2
    return torch.where(empty.unsqueeze(-1), NAN, outs), torch.where(empty, -INF, lses)


def assert_merges(got, outs, lses, sink=None) -> None:
    """Equal to the fp64 oracle up to one rounding to bf16 and fp32 sums."""
    arrays = [None if x is None else x.double().numpy() for x in (outs, lses, sink)]
    arrays[0] = np.nan_to_num(arrays[0])
    out, lse = oracle.merge(*arrays)
    mass, _ = oracle.merge(np.abs(arrays[0]), *arrays[1:])
    assert np.all(np.abs(got[0].cpu().double().numpy() - out) <= 2.0**-8 * np.abs(out) + 2.0**-18 * mass + 1e-38)
    np.testing.assert_allclose(got[1].cpu().double().numpy(), lse, rtol=1e-6, atol=1e-6)


@given(
    shape=st.tuples(st.integers(1, 6), st.integers(0, 3), st.sampled_from([1, 3, 16])),
    seed=st.integers(0, 999),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    spread=st.sampled_from([0.0, 3.0, 60.0, 1e4]),
    with_sink=st.booleans(),
)
def test_random_partials_match_the_oracle(backend, shape, seed, dtype, spread, with_sink):
    outs, lses = partials(*shape, seed, dtype, spread)
    sink = torch.linspace(-5, 5, shape[2]) if with_sink else None
    got = lk.merge_partials(
        outs.to(backend.device), lses.to(backend.device), sink=None if sink is None else sink.to(backend.device)
    )
    assert got[0].dtype == torch.bfloat16
    assert got[0].shape == (*shape[1:], 512)
    assert_merges(got, outs, lses, sink)


@given(
    cuts=st.lists(st.integers(0, 50), min_size=1, max_size=3),
    seed=st.integers(0, 99),
    with_sink=st.booleans(),
)
def test_splits_of_a_row_list_merge_to_the_whole(backend, cuts, seed, with_sink):
    """Also with empty splits; the partials are bf16, so each adds one rounding."""
    pool = Pool.random(30, "v41_fp4", 16, backend.device, seed=1)
    query, slots = queries(2, 3, backend.device, seed=seed), pool.pick(2, 50, seed)
    sink = torch.tensor([2.0, -1.0, 6.0], device=backend.device) if with_sink else None
    edges = [0, *sorted(cuts), 50]
    parts = [lk.sparse_mla(query, pool.rows(slots[:, a:b].contiguous())) for a, b in pairwise(edges)]
    outs, lses = (torch.stack(x) for x in zip(*parts, strict=True))
    got = lk.merge_partials(outs, lses, sink=sink)
    want = expected(query, (pool, slots, None), **({} if sink is None else {"sink": sink}))
    error = np.abs(got[0].cpu().double().numpy() - want.out)
    assert np.all(error <= 2.0**-8 * np.abs(want.out) + 3 * 2.0**-8 * want.mass)
    assert_matches(backend, (lk.sparse_mla(query, pool.rows(slots), sink=sink)[0], got[1]), want)


def test_the_window_and_the_extra_rows_merge_to_the_joint_softmax(backend):
    window = Pool.random(30, "v41", 16, backend.device, seed=1)
    extra = Pool.random(30, "v41_fp4", 16, backend.device, seed=2)
    query, slots, more = queries(2, 3, backend.device), window.pick(2, 20, 1), extra.pick(2, 30, 2)
    joint = lk.sparse_mla(query, window.rows(slots), extra.rows(more))
    parts = [lk.sparse_mla(query, window.rows(slots)), lk.sparse_mla(query, extra.rows(more))]
    out, lse = lk.merge_partials(*(torch.stack(x) for x in zip(*parts, strict=True)))
    assert torch.allclose(lse, joint[1], atol=1e-5)
    assert torch.allclose(out.float(), joint[0].float(), atol=0.03)


@pytest.mark.parametrize("empty", [-INF, INF])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_partial_among_empty_ones_passes_unchanged(backend, empty, dtype):
    outs = torch.full((3, 1, 2, 512), NAN)
    outs[1] = torch.randn(1, 2, 512, generator=torch.Generator().manual_seed(0))
    lses = torch.tensor([empty, -87.25, empty]).view(3, 1, 1).expand(3, 1, 2).contiguous()
    out, lse = lk.merge_partials(outs.to(dtype).to(backend.device), lses.to(backend.device))
    assert torch.equal(out.cpu(), outs[1].to(dtype).bfloat16())
    assert lse.tolist() == [[-87.25, -87.25]]


@pytest.mark.parametrize("empty", [-INF, INF])
def test_empty_partials_merge_to_an_empty_one(backend, empty):
    outs = torch.full((2, 1, 2, 512), NAN).bfloat16().to(backend.device)
    lses = torch.full((2, 1, 2), empty, device=backend.device)
    out, lse = lk.merge_partials(outs, lses, sink=torch.tensor([-INF, 1.0], device=backend.device))
    assert out.count_nonzero() == 0
    assert lse.tolist() == [[-INF, -INF]]


def test_equal_partials_average_and_add_the_logarithm_of_their_number(backend):
    outs = torch.tensor([1.0, 3.0, -2.0, 6.0]).view(4, 1, 1, 1).expand(4, 1, 1, 512).contiguous().to(backend.device)
    out, lse = lk.merge_partials(outs, torch.full((4, 1, 1), 5.0, device=backend.device))
    assert out.unique().tolist() == [2.0]
    assert lse.item() == pytest.approx(5 + math.log(4), abs=1e-6)


def test_the_sink_joins_once_and_never_the_lse(backend):
    outs = torch.full((2, 1, 4, 512), 4.0, device=backend.device)
    lses = torch.full((2, 1, 4), -math.log(2), device=backend.device)  # together e^0
    sink = torch.tensor([0.0, -INF, INF, 300.0], device=backend.device)
    out, lse = lk.merge_partials(outs, lses, sink=sink)
    assert out[0, :, 0].tolist() == [2.0, 4.0, 0.0, 0.0]
    assert lse[0].tolist() == [pytest.approx(0.0, abs=1e-6)] * 4


@pytest.mark.parametrize("size", [1e30, -1e30, 88.0, -3e38])
def test_lses_of_any_size_neither_overflow_nor_vanish(backend, size):
    outs = torch.tensor([2.0, 6.0]).view(2, 1, 1, 1).expand(2, 1, 1, 512).contiguous().to(backend.device)
    out, lse = lk.merge_partials(outs, torch.full((2, 1, 1), size, device=backend.device))
    assert out.unique().tolist() == [4.0]
    assert lse.item() == pytest.approx(size + math.log(2), rel=1e-6)


def test_a_partial_far_below_the_others_changes_nothing(backend):
    outs = torch.tensor([2.0, 1e30]).view(2, 1, 1, 1).expand(2, 1, 1, 512).contiguous().to(backend.device)
    out, lse = lk.merge_partials(outs, torch.tensor([0.0, -200.0], device=backend.device).view(2, 1, 1))
    assert out.unique().tolist() == [2.0]
    assert lse.item() == 0.0


def test_a_nan_lse_stays_in_its_token_and_head(backend):
    outs = torch.ones(2, 2, 2, 512, device=backend.device)
    lses = torch.zeros(2, 2, 2, device=backend.device)
    lses[1, 0, 1] = NAN
    out, lse = lk.merge_partials(outs, lses)
    assert torch.isnan(lse).tolist() == [[False, True], [False, False]]
    assert bool(torch.isnan(out[0, 1]).all())
    assert out[[0, 1, 1], [0, 0, 1]].unique().tolist() == [1.0]


def test_a_tokens_bits_do_not_depend_on_the_batch(backend):
    outs, lses = (x.to(backend.device) for x in partials(5, 7, 3, seed=1))
    sink = torch.tensor([0.5, 1.5, -1.0], device=backend.device)
    whole = lk.merge_partials(outs, lses, sink=sink)
    for t in range(7):
        alone = lk.merge_partials(outs[:, t : t + 1], lses[:, t : t + 1], sink=sink)
        assert torch.equal(whole[0][t].view(torch.int16), alone[0][0].view(torch.int16))
        assert torch.equal(whole[1][t].view(torch.int32), alone[1][0].view(torch.int32))


def test_strided_partials_are_read_as_strided(backend):
    outs, lses = partials(3, 4, 2, seed=2)
    spread = torch.full((4, 3, 5, 512), 7.0)
    spread[:, :, 1:3] = outs.transpose(0, 1)
    view = spread.to(backend.device).transpose(0, 1)[:, :, 1:3]
    assert_merges(lk.merge_partials(view, lses.to(backend.device)), outs, lses)


def test_one_partial_alone_is_rounded_only(backend):
    outs, lses = partials(1, 2, 3, seed=4)
    outs, lses = torch.nan_to_num(outs), torch.nan_to_num(lses, neginf=1.0)
    out, lse = lk.merge_partials(outs.to(backend.device), lses.to(backend.device))
    assert torch.equal(out.cpu(), outs[0].bfloat16())
    assert torch.equal(lse.cpu(), lses[0])


@pytest.mark.skipif(torch.cuda.is_available(), reason="maps no memory that it does not touch")
def test_partials_may_lie_far_apart(backend):
    """Partials 4 GiB apart, of which nothing is touched but the rows."""
    far = 2**31
    memory = torch.empty(2 * far + 512, dtype=torch.bfloat16)
    outs = memory.as_strided((3, 1, 1, 512), (far, 512, 512, 1))
    for split in range(3):
        outs[split].fill_(split + 1)
    out, _ = lk.merge_partials(outs, torch.zeros(3, 1, 1))
    assert (out == 2.0).all()
