"""Kernels against the reference bit by bit, and the paths of a product against each other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

import latentkv as lk
from latentkv.kernels import gate
from latentkv.kernels.launch import common_options
from latentkv.kernels.scores import exact_score, score_bound
from latentkv.kernels.sorting import largest_few
from latentkv.reference import route as reference

INF, NAN = float("inf"), float("nan")
ODD = [NAN, INF, -INF, 1e-42, -1e-42, 0.0, -0.0, 88.0, -104.0, 20.0, 20.000002, 3.4e38, -3.4e38, 1e-30]


def logits_of(rows: int, experts: int, seed: int = 0, device: str = "cpu") -> Tensor:
    """Random logits of several magnitudes, every third row coarse so that ties decide, odd values in every fifth."""
    generator = torch.Generator(device).manual_seed(seed)
    place = {"generator": generator, "device": device}
    logits = torch.randn(rows, experts, **place) * 10.0 ** torch.randint(-2, 3, (rows, 1), **place)
    logits[::3] = (logits[::3] * 4).round() / 4
    where = torch.rand(rows, experts, **place) < 0.05
    where[torch.arange(rows, device=device) % 5 != 0] = False
    return torch.where(
        where, torch.tensor(ODD, device=device)[torch.randint(0, len(ODD), where.shape, **place)], logits
    )


def bias_of(experts: int) -> Tensor:
    bias = torch.randn(experts, generator=torch.Generator().manual_seed(1)) * 0.3
    bias[::4] = (bias[::4] * 4).round() / 4
    return bias


def equal(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> bool:
    """Whether picks are equal, and weights up to one unit in the last place: fp64 numbers are rounded on both sides."""
    units = got[0].cpu().view(torch.int32) - want[0].view(torch.int32)
    return torch.equal(got[1].cpu(), want[1]) and bool((units.abs() <= 1).all())


@pytest.mark.parametrize("softplus", ["log2", "log1p"])
@pytest.mark.parametrize("tie_order", ["index", "lane64"])
@pytest.mark.parametrize("biased", [False, True])
def test_picks_and_weights_are_the_references(backend, softplus, tie_order, biased):
    logits, bias = logits_of(192, 384), bias_of(384) if biased else None
    options = {"k": 6, "scale": 2.5, "softplus": softplus, "tie_order": tie_order}
    given = logits.to(backend.device), None if bias is None else bias.to(backend.device)
    want = reference.route_topk(logits, bias, None, 6, True, 2.5, 0, tie_order, softplus)
    assert equal(lk.route_topk(*given, **options), want)


@pytest.mark.parametrize("experts", [1, 2, 8, 31, 48, 100, 160, 256, 257, 512, 1000])
def test_any_number_of_experts_is_routed(backend, experts):
    logits, bias = logits_of(70, experts, experts), bias_of(experts)
    k = min(8, experts)
    want = reference.route_topk(logits, bias, None, k, False, 1.0, 1, "index", "log2")
    got = lk.route_topk(logits.to(backend.device), bias.to(backend.device), k=k, renormalize=False, num_shared=1)
    assert equal(got, want)


def test_a_bias_that_cancels_or_dwarfs_scores_does_not_mislead_the_bound(backend):
    """Choices far below the scores' rounding errors, and scores far above the choices."""
    logits = logits_of(64, 384, 5).clamp(-1e4, 1e4)
    logits[logits != logits] = 0.0
    bias = -reference.gate_scores(logits, "log2")[0]  # the first row's choices are all zero
    bias[7], bias[9] = 1e30, -1e30
    logits[1, 11] = 1e37
    want = reference.route_topk(logits, bias, None, 6, True, 1.0, 0, "index", "log2")
    assert equal(lk.route_topk(logits.to(backend.device), bias.to(backend.device), k=6), want)


@pytest.mark.parametrize("parts", [1, 3, 10, 19])
def test_gates_over_partials_equal_the_gate_over_their_sum(backend, parts):
    partials = torch.stack([logits_of(9, 256, n).clamp(-1e3, 1e3).nan_to_num() for n in range(parts)])
    wide = torch.zeros(parts + 1, 9, 300)
    wide[:parts, :, 20:276] = partials
    logits = torch.zeros(9, 400)
    given = wide.to(backend.device)[:parts, :, 20:276], logits.to(backend.device)
    got = lk.route_topk(given[1][:, 100:356], k=6, partials=given[0])
    want = reference.route_topk(logits[:, 100:356], None, partials, 6, True, 1.0, 0, "index", "log2")
    assert equal(got, want)
    assert torch.equal(given[1].cpu(), logits)


def test_partials_one_value_apart_are_summed(backend):
    """A stride of 1, which Triton makes a constant."""
    partials = torch.tensor([[[1.0]], [[2.0]], [[-0.5]]], device=backend.device)
    assert partials.stride(0) == 1
    want = reference.route_topk(None, None, partials.cpu(), 1, False, 1.0, 0, "index", "log2")
    assert equal(lk.route_topk(None, k=1, partials=partials, renormalize=False), want)


def test_the_exponential_is_rounded_as_the_references_where_its_argument_is_long(backend):
    """2^(x log2 e) of a product rounded to fp64 would be off by one unit in the last place here."""
    logits = torch.tensor([[float.fromhex("-0x1.65cf3p+6")]])
    want = reference.route_topk(logits, None, None, 1, False, 1.0, 0, "index", "log1p")
    assert equal(lk.route_topk(logits.to(backend.device), k=1, renormalize=False, softplus="log1p"), want)


@triton.jit
def scores_kernel(logits, bounds, scores, LOG1P: tl.constexpr, CAST: tl.constexpr, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    x = tl.load(logits + at)
    tl.store(bounds + at, score_bound(x, CAST))
    score, _ = exact_score(x, LOG1P)
    tl.store(scores + at, score)


@pytest.mark.parametrize("softplus", ["log2", "log1p"])
def test_scores_are_the_references_and_not_above_their_bounds(backend, softplus):
    """Numbers of every sign, exponent and upper half, and many between -104 and 32, where functions matter."""
    if not backend.is_kernel:
        pytest.skip("the reference has no bounds")
    generator = torch.Generator().manual_seed(4)
    bits = (torch.arange(-(2**15), 2**15) << 16) | torch.randint(0, 2**16, (2**16,), generator=generator)
    near = torch.rand(2**16, generator=generator) * 136 - 104
    logits = torch.cat((bits.to(torch.int32).view(torch.float32), near)).to(backend.device)
    bounds, scores = torch.empty_like(logits), torch.empty_like(logits)
    options = {k: v for k, v in common_options(backend.device).items() if k in ("CAST", "enable_fp_fusion")}
    size = 2**17 if backend.name == "interpreter" else 256
    scores_kernel[(2**17 // size,)](logits, bounds, scores, LOG1P=softplus == "log1p", SIZE=size, **options)
    want = reference.gate_scores(logits.cpu(), softplus)
    number = ~want.isnan()
    assert torch.equal(scores.cpu()[number], want[number])
    assert (scores.cpu().isnan() & bounds.cpu().isnan())[~number].all()
    assert (bounds >= scores).cpu()[number].all()


@pytest.mark.parametrize("tie_order", ["index", "lane64"])
@pytest.mark.parametrize("softplus", ["log2", "log1p"])
def test_bounds_alone_settle_rows_without_close_choices(backend, monkeypatch, tie_order, softplus):
    """Where every expert is scored exactly, a candidate that the bounds missed would not be noticed."""
    logits = torch.rand(40, 384, generator=torch.Generator().manual_seed(0)) - 30.0
    for row in logits:  # ten far apart, from the largest scores to those near the bound's slack
        row[torch.randperm(384, generator=torch.Generator().manual_seed(int(row[0] * 1e4) & 0xFFFF))[:10]] = (
            torch.tensor([1e30, 3e4, 100.0, 21.0, 19.0, 3.0, 0.0, -1.0, -3.0, -5.0])
        )
    bias = torch.linspace(-1e-4, 1e-4, 384)
    if backend.name == "interpreter":  # elsewhere a kernel's functions are compiled in
        monkeypatch.setattr(gate, "exact_orders", None)
    want = reference.route_topk(logits, bias, None, 8, True, 1.0, 0, tie_order, softplus)
    given = logits.to(backend.device), bias.to(backend.device)
    assert equal(lk.route_topk(*given, k=8, tie_order=tie_order, softplus=softplus), want)


@triton.jit
def largest_kernel(source, out, COUNT: tl.constexpr, DEPTH: tl.constexpr, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    loaded = ()
    for n in tl.static_range(COUNT):
        loaded = loaded + (tl.load(source + at * COUNT + n),)  # noqa: RUF005 (Triton does not unpack tuples)
    found = largest_few(loaded, DEPTH)
    for n in tl.static_range(len(found)):
        tl.store(out + at * len(found) + n, found[n])


@pytest.mark.parametrize("depth", [1, 5, 8])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 6, 8, 11, 12])
def test_the_largest_of_a_lanes_keys_are_sorted(backend, count, depth):
    """All rows of zeros and ones up to twelve keys: a network that sorts those sorts everything."""
    if not backend.is_kernel:
        pytest.skip("the reference sorts")
    bits = torch.arange(4096)[:, None] >> torch.arange(count) & 1
    keys = torch.cat(
        (bits.int(), torch.randint(-5, 5, (4096, count), generator=torch.Generator().manual_seed(0)).int())
    )
    out = torch.empty(8192, min(count, depth), dtype=torch.int32, device=backend.device)
    size = 8192 if backend.name == "interpreter" else 64
    largest_kernel[(8192 // size,)](keys.to(backend.device), out, count, depth, size)
    assert torch.equal(out.cpu(), keys.sort(1, descending=True).values[:, :depth])


@pytest.mark.parametrize("tie_order", ["index", "lane64"])
@pytest.mark.parametrize(("k", "tile"), [(6, (1, 32, 1)), (6, (4, 8, 1)), (8, (2, 16, 1)), (16, (1, 32, 1))])
def test_rows_that_share_a_warp_are_routed_as_by_a_gpu(backend, monkeypatch, k, tile, tie_order):
    """The interpreter else takes 64 rows at once; the last program here lacks rows."""
    if backend.name != "interpreter":
        pytest.skip("a GPU's own tiles are the others' subject")
    logits, bias = logits_of(11, 384, 7), bias_of(384)
    logits[3], logits[4] = 0.0, NAN
    monkeypatch.setattr(gate, "gate_tile", lambda *_: tile)
    want = reference.route_topk(logits, bias, None, k, True, 2.5, 1, tie_order, "log2")
    assert equal(lk.route_topk(logits, bias, k=k, scale=2.5, num_shared=1, tie_order=tie_order), want)
    partials = torch.stack((logits, torch.full_like(logits, 0.25)))
    want = reference.route_topk(None, bias, partials, k, False, 1.0, 0, tie_order, "log2")
    assert equal(lk.route_topk(None, bias, k=k, partials=partials, renormalize=False, tie_order=tie_order), want)


@pytest.mark.parametrize("k", [6, 10])
def test_candidates_that_one_lane_holds_are_all_found(backend, k):
    """Experts 64 apart lie in one lane of either width, which sorts a few of them only."""
    logits = logits_of(48, 384, 9).clamp(-10, 10).nan_to_num()
    for row in range(48):
        together = (torch.arange(row % 13) * 32 + row) % 384
        logits[row, together] = 20.0 + torch.arange(row % 13) / 8
    want = reference.route_topk(logits, None, None, k, True, 1.0, 0, "index", "log2")
    assert equal(lk.route_topk(logits.to(backend.device), k=k), want)


def test_many_shared_experts_fill_their_columns(backend):
    weights, ids = lk.route_topk(torch.zeros(3, 8, device=backend.device), k=2, num_shared=70)
    assert ids[:, 2:].tolist() == [list(range(8, 78))] * 3
    assert (weights[:, 2:] == 1).all()


# --- logits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [1024, 700])
def test_one_launch_and_two_give_the_same_bits(backend, dtype, width):
    if not backend.is_kernel:
        pytest.skip("the reference has one path")
    from latentkv.kernels import route

    generator = torch.Generator().manual_seed(2)
    x = torch.randn(70, width, generator=generator).bfloat16().to(backend.device)
    w = torch.randn(48, width, generator=generator).to(dtype).to(backend.device)
    tile = route.split_tile(70, dtype, route.is_even(x), "")
    for scale in (None, 0.1):
        split, walked = (route._logits(x, w, scale, replace(tile, walk=walk)) for walk in (False, True))
        assert torch.equal(split, walked)


@pytest.mark.parametrize("walk", [False, True])
@pytest.mark.parametrize("width", [1024, 700])
def test_a_second_group_of_columns_is_multiplied_too(backend, width, walk):
    """Tiles that 48 experts fill, and that 49 leave a single one for; order is NumPy's in the interpreter,
    and on a GPU `test_every_tile_gives_the_same_bits` compares."""
    if not backend.is_kernel:
        pytest.skip("the reference has no tiles")
    from latentkv.kernels import route

    generator = torch.Generator().manual_seed(2)
    x = torch.randn(70, width, generator=generator).bfloat16()
    for experts, columns in ((48, 32), (48, 16), (49, 32)):
        w = torch.randn(experts, width, generator=generator).bfloat16()
        tile = route.Tile(64, columns, 64, 4, 1, walk, 16)
        got = route._logits(x.to(backend.device), w.to(backend.device), None, tile).cpu()
        size = x.double().abs() @ w.double().abs().T
        assert ((got - x.double() @ w.double().T).abs() <= size * 2.0**-20).all()


def test_odd_weights_keep_their_values(backend):
    """Inf and NaN stay in their row and column, small and large fp32 weights keep every bit."""
    x = torch.zeros(4, 512).bfloat16()
    x[0, 0], x[1, 1], x[2, 2] = 1.0, 2.0, INF
    w = torch.zeros(8, 512)
    w[0, 0], w[1, 0], w[2, 0], w[3, 0], w[4, 0] = 3.4028234663852886e38, 1.17549435e-38 * 3, NAN, -INF, 1 + 2.0**-23
    w[:, 2] = torch.tensor([1.0, -2.0, 3.0, 1 + 2.0**-23, -1.0, 2.0**-100, 7.0, -0.1])
    got = lk.router_logits(x.to(backend.device), w.to(backend.device)).cpu()
    assert torch.equal(got[0, :2], w[:2, 0])
    assert got[0, 2].isnan()
    assert got[0, 3:5].tolist() == [-INF, 1 + 2.0**-23]
    assert got[2, [0, 1, 4, 5, 6, 7]].tolist() == [INF, -INF, -INF, INF, INF, -INF]
    assert (got[3] == 0)[torch.tensor([0, 1, 4, 5, 6, 7])].all()


def test_no_columns_and_no_experts_give_zeros_and_nothing(backend):
    x, w = torch.zeros(3, 0, device=backend.device).bfloat16(), torch.zeros(5, 0, device=backend.device).bfloat16()
    assert torch.equal(lk.router_logits(x, w).cpu(), torch.zeros(3, 5))
    assert lk.router_partials(x, w).shape == (1, 3, 5)
    assert lk.router_logits(torch.zeros(3, 64, device=backend.device).bfloat16(), w.new_zeros(0, 64)).shape == (3, 0)


def test_only_full_chunks_are_fetched_ahead(monkeypatch):
    """An empty weight has no address."""
    from latentkv.kernels import route

    monkeypatch.setattr(route, "common_options", lambda device: {"OVERLAP": True})
    for width, fetched in ((0, False), (512, True), (520, False), (1024, True)):
        x, w = torch.zeros(1, width).bfloat16(), torch.zeros(4, width).bfloat16()
        assert route.bulk_prefetch(x, w) == fetched
