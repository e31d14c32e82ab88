"""The kernels between the stages against their twins: on a GPU, or in Triton's interpreter where there is none."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from latentkv.kernels import model as kernels
from latentkv.model import layers
from latentkv.model.cache import ModelCache
from latentkv.model.config import ModelConfig
from latentkv.model.paged import PagedModel

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EPS, HC_EPS, STEPS = 1e-20, 1e-6, 20
STREAMS = 4


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_one_step(ours: Tensor, theirs: Tensor, terms: Tensor | None = None) -> None:
    """Equal but for one bf16 step, or what fp32 sums of `terms` lose where they cancel; and mostly equal."""
    assert (ours.dtype, ours.shape) == (torch.bfloat16, theirs.shape)
    x, y = ours.float(), theirs.float()
    lost = 0.0 if terms is None else terms * 2.0**-20
    assert bool(((x - y).abs() <= y.abs() * 2.0**-7 + lost).all())
    assert float((x != y).float().mean()) < 0.005


def mixing(rows: int, width: int, seed: int) -> dict[str, Tensor]:
    mixes = 2 * STREAMS + STREAMS * STREAMS
    return {
        "residual": random(rows, STREAMS, width, seed=seed, dtype=torch.bfloat16),
        "read": torch.rand(rows, STREAMS, generator=torch.Generator().manual_seed(seed)).to(DEVICE),
        "fn": random(mixes, STREAMS * width, seed=seed + 1, dtype=torch.bfloat16) / width**0.5,
        "scale": torch.tensor([0.5, 1.5, 2.0], device=DEVICE),
        "base": random(mixes, seed=seed + 2),
        "weight": 1 + 0.2 * random(width, seed=seed + 3).bfloat16(),
    }


def mixed(given: dict[str, Tensor]) -> tuple[Tensor, ...]:
    logits = F.linear(given["residual"].flatten(1).double(), given["fn"].double()).float()
    parts = (given["residual"], given["read"], logits, given["scale"], given["base"], given["weight"])
    return kernels.mix(*parts, norm_eps=EPS, hc_eps=HC_EPS, steps=STEPS)


@pytest.mark.parametrize(("rows", "width"), [(1, 256), (7, 64), (5, 96), (2, 5120)])
def test_mixing_equals_its_twin(rows: int, width: int):
    given = mixing(rows, width, seed=rows)
    x, *coefficients = mixed(given)
    twins = layers.hc_mix(
        given["residual"], given["fn"], given["scale"], given["base"],
        norm_eps=EPS, hc_eps=HC_EPS, steps=STEPS, math=torch.float64,
    )  # fmt: skip
    for ours, theirs in zip(coefficients, twins, strict=True):
        assert ours.shape == theirs.shape
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    read = layers.hc_read(given["residual"], given["read"])
    assert_one_step(x, layers.norm(read, given["weight"], EPS))
    alone = kernels.read_norm(given["residual"], given["read"], given["weight"], EPS)
    assert torch.equal(alone, x)


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # the interpreter's maximum
def test_a_row_s_mixing_does_not_depend_on_its_batch():
    given = mixing(9, 96, seed=3)
    given["residual"][4] = float("nan")
    whole = mixed(given)
    for row in (0, 5, 8):
        part = {n: t[row : row + 1] if n in ("residual", "read") else t for n, t in given.items()}
        assert all(torch.equal(ours[0], theirs[row]) for ours, theirs in zip(mixed(part), whole, strict=True))
    assert all(bool(out[4].isnan().all()) for out in whole)
    assert not any(bool(out[[0, 1, 2, 3, 5, 6, 7, 8]].isnan().any()) for out in whole)


def test_streams_of_zeros_mix_without_nan():
    given = mixing(1, 64, seed=0)
    given["residual"].zero_()
    x, read, write, mix = mixed(given)
    assert bool((x == 0).all())
    assert all(bool(t.isfinite().all()) for t in (read, write, mix))


@pytest.mark.parametrize(("rows", "width"), [(3, 256), (4, 96)])
def test_streams_are_written_as_their_twin_writes_them(rows: int, width: int):
    residual, y = (random(rows, *s, width, seed=7, dtype=torch.bfloat16) for s in ((STREAMS,), ()))
    write, mix = random(rows, STREAMS, seed=8), random(rows, STREAMS, STREAMS, seed=9)
    terms = (mix.abs().unsqueeze(-1) * residual.abs().float().unsqueeze(2)).sum(1)
    terms += write.abs().unsqueeze(-1) * y.abs().float().unsqueeze(1)
    assert_one_step(kernels.write(residual, y, write, mix), layers.hc_write(residual, y, write, mix), terms)


@pytest.mark.parametrize("width", [64, 80, 512])
def test_norms_equal_their_twin_for_rows_of_any_stride(width: int):
    wide = random(6, width + 16, seed=width, dtype=torch.bfloat16)
    weight = 1 + 0.2 * random(width, seed=1).bfloat16()
    for x in (wide[:, :width], wide[:, :width].contiguous(), 0 * wide[:, :width]):
        assert_one_step(kernels.norm(x, weight, EPS), layers.norm(x, weight, EPS))


@pytest.mark.parametrize(("count", "width"), [(9, 32), (5, 12)])
def test_gated_experts_equal_their_twin(count: int, width: int):
    rows, limit = 11, 2.0
    gate, up = (3 * random(rows, count * width, seed=s, dtype=torch.bfloat16) for s in (1, 2))
    weights = torch.rand(rows, 3, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    ids = torch.stack([torch.randperm(count, generator=torch.Generator().manual_seed(i))[:3] for i in range(rows)])
    ids = ids.int().to(DEVICE)
    ours = kernels.gated(torch.cat((gate, up), 1), weights, ids, experts=count, limit=limit)
    route = torch.zeros(rows, count, device=DEVICE).scatter_(1, ids.long(), weights)
    theirs = layers.swiglu(gate, up, limit).unflatten(-1, (count, width)) * route.unsqueeze(-1)
    assert_one_step(ours, theirs.bfloat16().flatten(1))
    assert bool((ours.unflatten(-1, (count, width))[route == 0] == 0).all())


def test_no_rows_are_no_launch():
    residual, read = torch.zeros(0, STREAMS, 64, device=DEVICE).bfloat16(), torch.zeros(0, STREAMS, device=DEVICE)
    weight = torch.ones(64, device=DEVICE).bfloat16()
    assert kernels.read_norm(residual, read, weight, EPS).shape == (0, 64)
    assert kernels.write(residual, residual[:, 0], read, read).shape == (0, STREAMS, 64)
    assert kernels.norm(residual[:, 0], weight, EPS).shape == (0, 64)
    assert kernels.gated(residual[:, 0], read, read.int(), experts=2, limit=1.0).shape == (0, 32)


def test_a_fused_model_says_what_the_others_say(config: ModelConfig, random_weights, tokens: Tensor):
    small = replace(
        config, ratios=(0, 2, 1), kv_source_layers=(1, 2), index_source_layers=(1, 2), candidate_source_layer=2
    )
    held = {n: w.to(DEVICE) for n, w in random_weights(small, 7).items()}
    logits = []
    for options in ({"exact": True}, {"exact": False, "fused": False}, {"exact": False, "fused": True}):
        model = PagedModel(small, held, **options)
        cache = ModelCache(small, max_tokens=128, device=DEVICE)
        logits.append(model.step(cache, [(cache.open(), tokens[:5])], all_logits=True))
    exact, rounded, fused = logits
    assert float((rounded - exact).abs().max()) < 0.05  # logits spread by 1
    assert float((fused - exact).abs().max()) < 0.05
    with pytest.raises(ValueError, match="exact=False"):
        PagedModel(small, held, exact=True, fused=True)
