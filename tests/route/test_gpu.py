"""What only a GPU shows: every batch size, a million rows, far addresses, captured graphs, compiled code."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import latentkv as lk
from latentkv.reference import route as reference
from tests.gpu import captured
from tests.route.test_kernels import bias_of, equal, logits_of

pytestmark = pytest.mark.gpu
SHAPES = [(5120, 384), (4096, 256), (7168, 384)]
SIZES = [1, 2, 15, 16, 17, 63, 64, 65, 100, 127, 128, 129, 512, 513, 1024, 1025, 1536, 2048, 2049, 4096, 8191, 8192]
GIB = 2**30


def operands(rows: int, width: int, experts: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(width + experts)
    x = torch.randn(rows, width, device="cuda", generator=generator).bfloat16()
    return x, (torch.randn(experts, width, device="cuda", generator=generator) * width**-0.5).to(dtype)


# --- logits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("width", "experts"), SHAPES)
def test_a_rows_bits_are_the_same_for_every_batch_size_and_place(width, experts, dtype):
    x, w = operands(8192, width, experts, dtype)
    whole = lk.router_logits(x, w)
    exact = x.double() @ w.double().T
    size = x.double().abs() @ w.double().abs().T
    assert ((whole - exact).abs() <= size * 2.0**-19).all()
    for rows in SIZES:
        assert torch.equal(lk.router_logits(x[:rows], w), whole[:rows])
        assert torch.equal(lk.router_logits(x[-rows:], w), whole[-rows:])
    some = torch.randperm(8192, device="cuda")[:777]
    assert torch.equal(lk.router_logits(x[some], w), whole[some])
    for row in (0, 1, 63, 64, 4095, 8191):  # each alone, and among rows of NaN
        alone = torch.full_like(x[:300], float("nan"))
        alone[171] = x[row]
        assert torch.equal(lk.router_logits(alone, w)[171], whole[row])
        assert torch.equal(lk.router_logits(x[row : row + 1], w)[0], whole[row])
    assert torch.equal(reference.sum_partials(lk.router_partials(x[:1536], w)), whole[:1536])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [5120, 700])
def test_every_tile_gives_the_same_bits(width, dtype):
    from latentkv.kernels import route

    x, w = operands(300, width, 384, dtype)
    x[5] *= 1e4
    want = route._logits(x, w, None)
    small = [route.Tile(64, 32, 32, 4, 2), route.Tile(64, 64, 32, 4, 2)]  # an fp32 weight's step is always 32
    large = [route.Tile(64, 32, 64, 4, 2), route.Tile(64, 64, 64, 4, 3), route.Tile(128, 128, 64, 8, 3)]
    large += [route.Tile(64, 128, 64, 4, 3), route.Tile(64, 64, 128, 4, 3), route.Tile(64, 64, 64, 4, 3, more=16)]
    large += [route.Tile(128, 128, 64, 8, 3, more=64), route.Tile(64, 64, 64, 4, 3, more=32)]
    for tile in small + (large if dtype == torch.bfloat16 else []):
        for walk in (False, True):
            assert torch.equal(route._logits(x, w, None, replace(tile, walk=walk)), want), (tile, walk)


@pytest.mark.parametrize("width", [512, 520, 700, 1023, 64, 1])
@pytest.mark.parametrize("experts", [1, 48, 64, 100, 512])
def test_any_shape_and_alignment_is_multiplied(width, experts):
    for dtype in (torch.bfloat16, torch.float32):
        for rows in (3, 1100):
            wide, weight = operands(rows, width + 3, experts, dtype)
            x, w = wide[:, 1 : 1 + width], weight[:, 2 : 2 + width]
            got = lk.linear_fp32(x, w)
            assert ((got - x.double() @ w.double().T).abs() <= (x.double().abs() @ w.double().abs().T) * 2.0**-20).all()
            assert torch.equal(lk.linear_fp32(x.contiguous(), w.contiguous()), got)


def test_a_captured_step_gives_the_eager_bits():
    x, w = operands(64, 5120, 384)
    bias = bias_of(384).cuda()
    held = torch.zeros_like(x)

    def step() -> tuple[Tensor, ...]:
        logits = torch.empty(64, 384, device="cuda")
        gated = lk.route_topk(logits, bias, k=6, partials=lk.router_partials(held, w))
        return lk.router_logits(held, w), lk.head_weights(held, w, 0.1), logits, *gated

    graph, out = captured(step)
    for n in range(20):
        held.copy_(x.roll(n, 0))
        graph.replay()
        want = step()
        assert all(torch.equal(a, b) for a, b in zip(out, want, strict=True))
        assert torch.equal(out[0], out[2])


def test_far_rows_are_read():
    wide = torch.zeros(2 * GIB + 8192, dtype=torch.bfloat16, device="cuda")
    x = wide.as_strided((3, 4096), (GIB, 1))
    near, w = operands(3, 4096, 256)
    x.copy_(near)
    assert torch.equal(lk.router_logits(x, w), lk.router_logits(near, w))
    del x, wide
    logits = torch.zeros(2 * GIB + 8192, device="cuda").as_strided((3, 384), (GIB, 1))
    logits.copy_(logits_of(3, 384))
    assert equal(lk.route_topk(logits, k=6), reference.route_topk(
        logits.cpu(), None, None, 6, True, 1.0, 0, "index", "log2"))  # fmt: skip


def test_the_ops_compile_whole():
    x, w = operands(16, 1024, 384)

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        return lk.route_topk(lk.router_logits(x, w) + 1.0, k=6, num_shared=1)

    got, want = torch.compile(step, fullgraph=True)(x), step(x)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


# --- gate -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tie_order", "softplus", "biased", "rows"),
    [
        ("index", "log2", True, 1_000_000),
        ("index", "log2", False, 250_000),
        ("index", "log1p", True, 250_000),
        ("lane64", "log2", True, 250_000),
    ],
)
def test_a_million_rows_are_routed_as_by_the_reference(tie_order, softplus, biased, rows):
    """Rows of random numbers, of ties, and with NaN, infinities and subnormals. Of weights, which are fp64 numbers
    rounded once, a few may round the other way."""
    bias = bias_of(384).cuda() if biased else None
    for seed in range(rows // 50_000):
        logits = logits_of(50_000, 384, seed, "cuda")
        weights, ids = lk.route_topk(logits, bias, k=6, tie_order=tie_order, softplus=softplus)
        want = reference.route_topk(logits, bias, None, 6, True, 1.0, 0, tie_order, softplus)
        assert torch.equal(ids, want[1])
        units = (weights.view(torch.int32) - want[0].view(torch.int32)).abs()
        assert units.max() <= 1
        assert units.float().mean() < 1e-4
        assert (ids >= 0).all()
        assert (ids < 384).all()
        assert (ids.sort(1).values.diff(dim=1) > 0).all()


@pytest.mark.parametrize("softplus", ["log2", "log1p"])
def test_weights_are_within_a_unit_of_fp64(softplus):
    logits = torch.randn(100_000, 384, device="cuda") * 4
    weights, ids = lk.route_topk(logits, k=6, scale=1.5, softplus=softplus)
    x = logits.double().gather(1, ids.long())
    score = torch.where(x > 20, x, torch.log1p(torch.exp(x))).sqrt()
    want = 1.5 * score / score.sum(1, keepdim=True)
    unit = torch.exp2(torch.floor(torch.log2(want)) - 23)
    assert ((weights - want).abs() <= unit).all()


def test_a_rows_picks_do_not_depend_on_the_batch():
    logits, bias = logits_of(8192, 384).cuda(), bias_of(384).cuda()
    whole = lk.route_topk(logits, bias, k=6)
    for rows in (1, 3, 64, 1000, 2048, 2049, 8191):
        for part, all_of_it in zip(lk.route_topk(logits[-rows:], bias, k=6), whole, strict=True):
            assert torch.equal(part, all_of_it[-rows:])


def test_random_bits_give_valid_picks():
    for seed in range(8):
        generator = torch.Generator("cuda").manual_seed(seed)
        bits = torch.randint(-(2**31), 2**31, (40_000, 385), device="cuda", generator=generator).to(torch.int32)
        bits[::7] |= 0x7F800000  # rows of NaN and Inf
        logits = bits.view(torch.float32)
        weights, ids = lk.route_topk(logits[:, :384], logits[0, :384].contiguous(), k=16)
        assert (ids >= 0).all()
        assert (ids < 384).all()
        assert (ids.sort(1).values.diff(dim=1) > 0).all()
        assert weights.isfinite().all()
