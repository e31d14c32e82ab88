"""The gate against a loop oracle in fp64, both tie orders, and everything a logit can be."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import latentkv as lk

INF, NAN = float("inf"), float("nan")
# compare-exchange pairs of the published network for six values, exchanging on a strict less-than
NETWORK = [(0, 1), (2, 3), (4, 5), (0, 2), (1, 4), (3, 5), (0, 1), (2, 3), (4, 5), (1, 2), (3, 4), (2, 3)]


def scores(logits: list[float]) -> list[float]:
    """sqrt(softplus) in fp64; NaN stays, +Inf is the largest fp32."""
    out = []
    for x in logits:
        x = float(np.finfo(np.float32).max) if x == INF else x
        out.append(math.sqrt(x) if x > 20 else NAN if math.isnan(x) else math.sqrt(math.log1p(math.exp(x))))
    return out


def picks_by_index(choice: list[float], k: int) -> list[int]:
    key = [-INF if math.isnan(c) else c for c in choice]
    return sorted(range(len(key)), key=lambda e: (-key[e], e))[:k]


def picks_by_lane(choice: list[float], k: int) -> list[int]:
    lanes = []
    for lane in range(64):
        experts = [lane + 64 * depth for depth in range(6)]
        values = [(-INF if math.isnan(choice[e]) else choice[e], e) for e in experts]
        for a, b in NETWORK:
            if values[a][0] < values[b][0]:
                values[a], values[b] = values[b], values[a]
        lanes.append(values)
    picks = []
    for _ in range(k):
        lane = max((n for n in range(64) if lanes[n]), key=lambda n: (lanes[n][0][0], -n))
        picks.append(lanes[lane].pop(0)[1])
    return picks


def planted(seed: int, rows: int, experts: int) -> torch.Tensor:
    """Few distinct values, so that ties decide, with rows of NaN, infinities and denormals."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-6, 7, (rows, experts), generator=generator).float() * 0.5
    odd = torch.tensor([NAN, INF, -INF, 1e-42, -1e-42, 0.0, -0.0, 88.0, -104.0])
    where = torch.rand(rows, experts, generator=generator) < 0.02
    return torch.where(where, odd[torch.randint(0, 9, (rows, experts), generator=generator)], logits)


@pytest.mark.parametrize("tie_order", ["index", "lane64"])
@pytest.mark.parametrize("k", [1, 6, 16])
def test_picks_are_the_oracles_on_rows_full_of_ties(backend, tie_order, k):
    logits = planted(k, 40, 384)
    logits[0], logits[1], logits[2] = 0.0, NAN, INF
    _, ids = lk.route_topk(logits.to(backend.device), k=k, tie_order=tie_order)
    choices = lk.route_topk(logits.to(backend.device), k=k, tie_order=tie_order)  # the same call gives the same picks
    assert torch.equal(ids, choices[1])
    oracle = picks_by_index if tie_order == "index" else picks_by_lane
    for row, got in zip(logits, ids.cpu().tolist(), strict=True):
        choice = torch.tensor(scores(row.tolist())).tolist()  # equal fp32 scores tie
        assert got == oracle(choice, k)


@pytest.mark.parametrize("tie_order", ["index", "lane64"])
def test_no_row_gives_a_duplicate_or_an_id_out_of_range(backend, tie_order):
    generator = torch.Generator().manual_seed(3)
    bits = torch.randint(-(2**31), 2**31, (4096, 384), generator=generator)
    logits = bits.to(torch.int32).view(torch.float32)
    weights, ids = lk.route_topk(logits.to(backend.device), k=6, tie_order=tie_order)
    assert ids.min() >= 0
    assert ids.max() < 384
    assert (ids.sort(1).values.diff(dim=1) > 0).all()
    assert weights.isfinite().all()


def test_a_row_of_nan_picks_the_lowest_ids_with_weight_zero(backend):
    weights, ids = lk.route_topk(torch.full((2, 8), NAN, device=backend.device), k=3)
    assert ids.tolist() == [[0, 1, 2]] * 2
    assert weights.tolist() == [[0.0] * 3] * 2


def test_a_nan_bias_hides_an_expert_and_a_nan_score_weighs_nothing(backend):
    logits = torch.tensor([[1.0, 5.0, NAN, 2.0]], device=backend.device)
    bias = torch.tensor([0.0, NAN, 0.0, 0.0], device=backend.device)
    weights, ids = lk.route_topk(logits, bias, k=4, renormalize=False)
    assert ids.tolist() == [[3, 0, 1, 2]]
    want = scores([2.0, 1.0, 5.0])
    np.testing.assert_allclose(weights[0, :3].cpu().numpy(), want, rtol=3e-7)
    assert weights[0, 3] == 0


@given(
    logits=st.lists(st.floats(-8, 30, width=32), min_size=16, max_size=16),
    k=st.integers(1, 16),
    renormalize=st.booleans(),
    softplus=st.sampled_from(["log2", "log1p"]),
)
def test_weights_are_within_bounds_of_fp64(backend, logits, k, renormalize, softplus):
    """Both forms: what 1 + 2^x loses decides picks, not weights."""
    weights, ids = lk.route_topk(
        torch.tensor([logits], device=backend.device), k=k, renormalize=renormalize, scale=1.5, softplus=softplus
    )
    score = scores(torch.tensor(logits).tolist())
    picked = [score[i] for i in ids[0].tolist()]
    total = sum(picked) if renormalize else 1.0
    np.testing.assert_allclose(weights[0].cpu().numpy(), [1.5 * s / total for s in picked], rtol=2**-23.9)


def test_very_negative_logits_keep_their_order_in_the_log1p_form(backend):
    logits = torch.linspace(-80, -20, 64, device=backend.device).unsqueeze(0)
    _, ids = lk.route_topk(logits, k=16, softplus="log1p")
    assert ids[0].tolist() == list(range(63, 47, -1))
    weights, ids = lk.route_topk(logits, k=16, softplus="log2")  # 1 + t is 1 there: all tie at zero
    assert ids[0].tolist() == list(range(16))
    assert weights.abs().max() == 0


def test_the_sum_of_weights_is_floored(backend):
    weights, _ = lk.route_topk(torch.full((1, 8), -INF, device=backend.device), k=2)
    assert weights.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bias_moves_the_choice_and_not_the_weight(backend, dtype):
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]], device=backend.device)
    bias = torch.tensor([8.0, 0.0, 4.0, 0.0], dtype=dtype, device=backend.device)
    weights, ids = lk.route_topk(logits.to(dtype), bias, k=2, renormalize=False, scale=2.0)
    assert ids.tolist() == [[0, 2]]
    np.testing.assert_allclose(weights[0].cpu().numpy(), 2 * np.array(scores([0.0, 2.0])), rtol=3e-7)


def test_shared_experts_stand_behind_with_weight_one(backend):
    weights, ids = lk.route_topk(torch.zeros(2, 8, device=backend.device), k=2, num_shared=2)
    assert ids.tolist() == [[0, 1, 8, 9]] * 2
    assert weights[:, 2:].tolist() == [[1.0, 1.0]] * 2
    assert ids.dtype == torch.int32


def test_partials_are_summed_in_order_and_written_out(backend):
    generator = torch.Generator().manual_seed(0)
    partials = (torch.randn(5, 7, 64, generator=generator) * 1e3).to(backend.device)
    want = partials[0].clone()
    for partial in partials[1:]:
        want += partial
    logits = torch.full((7, 64), 7.0, device=backend.device)
    fused = lk.route_topk(logits, k=6, partials=partials)
    assert torch.equal(logits, want)
    separate = lk.route_topk(want, k=6)
    assert torch.equal(fused[0], separate[0])
    assert torch.equal(fused[1], separate[1])
    assert torch.equal(lk.route_topk(None, k=6, partials=partials)[1], separate[1])


def test_no_rows_give_no_picks(backend):
    weights, ids = lk.route_topk(torch.zeros(0, 8, device=backend.device), k=2)
    assert weights.shape == ids.shape == (0, 2)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"k": 0}, ValueError, "k: 0"),
        ({"k": 17}, ValueError, "k: 17"),
        ({"logits": torch.zeros(2, 32, dtype=torch.float16)}, TypeError, "logits"),
        ({"logits": torch.zeros(32)}, ValueError, "logits"),
        ({"bias": torch.zeros(31)}, ValueError, "bias"),
        ({"tie_order": "lowest"}, ValueError, "tie_order"),
        ({"tie_order": "lane64"}, NotImplementedError, "384"),
        ({"softplus": "exact"}, ValueError, "softplus"),
        ({"num_shared": -1}, ValueError, "num_shared"),
        ({"logits": None}, ValueError, "logits"),
        ({"partials": torch.zeros(0, 2, 32)}, ValueError, "partials"),
        ({"partials": torch.zeros(2, 3, 32)}, ValueError, "logits"),
    ],
    ids=str,
)
def test_bad_arguments_raise(change, error, message):
    arguments = {"logits": torch.zeros(2, 32), "k": 2, **change}
    with pytest.raises(error, match=message):
        lk.route_topk(arguments.pop("logits"), arguments.pop("bias", None), **arguments)
