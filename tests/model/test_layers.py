"""The hyper-connection and the experts, against loops."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from latentkv.model import layers


def test_sinkhorn_makes_rows_and_columns_sum_to_one():
    mix = layers.sinkhorn(torch.randn(50, 4, 4, generator=torch.Generator().manual_seed(0)), eps=1e-6, steps=20)
    assert bool((mix > 0).all())
    assert torch.allclose(mix.sum(-2), torch.ones(50, 4), atol=1e-4)
    assert torch.allclose(mix.sum(-1), torch.ones(50, 4), atol=1e-2)


def test_sinkhorn_takes_the_stated_steps():
    logits = torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(1))
    m = torch.softmax(logits, -1) + 1e-3
    m = m / (m.sum(1, keepdim=True) + 1e-3)
    for _ in range(2):
        m = m / (m.sum(2, keepdim=True) + 1e-3)
        m = m / (m.sum(1, keepdim=True) + 1e-3)
    assert torch.equal(layers.sinkhorn(logits, eps=1e-3, steps=3), m)


def test_mix_coefficients_match_their_formula():
    g = torch.Generator().manual_seed(2)
    residual = torch.randn(2, 4, 8, generator=g).bfloat16()
    fn, scale = torch.randn(24, 32, generator=g), torch.tensor([0.5, 2.0, 1.5])
    base = torch.randn(24, generator=g)
    read, write, mix = layers.hc_mix(residual, fn, scale, base, norm_eps=1e-20, hc_eps=1e-6, steps=20)
    x = residual[1].flatten().double()
    m = fn.double() @ x / math.sqrt(float((x * x).mean()))
    for i in range(4):
        assert math.isclose(read[1, i], 1 / (1 + math.exp(-(m[i] * 0.5 + base[i]))) + 1e-6, rel_tol=1e-5)
        assert math.isclose(write[1, i], 2 / (1 + math.exp(-(m[4 + i] * 2.0 + base[4 + i]))), rel_tol=1e-5)
    logits = (m[8:] * 1.5 + base[8:].double()).view(1, 4, 4)
    assert torch.allclose(mix[1], layers.sinkhorn(logits, eps=1e-6, steps=20)[0].float(), atol=1e-5)


def test_zero_streams_mix_without_nan():
    read, write, mix = layers.hc_mix(
        torch.zeros(1, 4, 8, dtype=torch.bfloat16), torch.ones(24, 32), torch.ones(3), torch.zeros(24),
        norm_eps=1e-20, hc_eps=1e-6, steps=20,
    )  # fmt: skip
    assert torch.allclose(read, torch.full((1, 4), 0.5), atol=1e-5)
    assert torch.allclose(write, torch.ones(1, 4))
    assert torch.allclose(mix, torch.full((1, 4, 4), 0.25), atol=1e-4)


def test_streams_are_read_and_written_by_their_coefficients():
    g = torch.Generator().manual_seed(3)
    residual, y = torch.randn(1, 4, 8, generator=g).bfloat16(), torch.randn(1, 8, generator=g).bfloat16()
    write, mix = torch.rand(1, 4, generator=g), torch.rand(1, 4, 4, generator=g)
    new = layers.hc_write(residual, y, write, mix)
    for j in range(4):
        expected = write[0, j] * y[0].float()
        expected = expected + sum(mix[0, i, j] * residual[0, i].float() for i in range(4))
        assert torch.allclose(new[0, j].float(), expected, atol=0.02)
    one_hot = torch.tensor([[0.0, 1.0, 0.0, 0.0]])
    assert torch.equal(layers.hc_read(residual, one_hot), residual[:, 1])


def test_swiglu_clamps_the_gate_above_and_up_on_both_sides():
    gate, up = torch.tensor([20.0, -20.0, 1.0, 1.0]), torch.tensor([1.0, 1.0, 30.0, -30.0])
    silu = lambda v: v / (1 + math.exp(-v))  # noqa: E731
    expected = [silu(10.0), silu(-20.0), 10 * silu(1.0), -10 * silu(1.0)]
    assert torch.allclose(layers.swiglu(gate, up, 10.0), torch.tensor(expected))


def test_experts_equal_a_loop_over_the_picked_ones():
    g = torch.Generator().manual_seed(4)
    x = torch.randn(3, 16, generator=g).bfloat16()
    gate, up = (torch.randn(5, 4, 16, generator=g).bfloat16() for _ in range(2))
    down = torch.randn(5, 16, 4, generator=g).bfloat16()
    route = torch.tensor([[0.0, 0.7, 0.0, 0.8, 1.0], [1.5, 0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.1, 1.4, 1.0]])
    out = layers.experts(x, route, gate, up, down, limit=10.0)
    for row in range(3):
        total = torch.zeros(16, dtype=torch.float64)
        for e in route[row].nonzero().flatten().tolist():
            a, b = (F.linear(x[row].double(), w[e].double()).bfloat16().float() for w in (gate, up))
            hidden = (F.silu(a.clamp(max=10)) * b.clamp(-10, 10) * route[row, e]).bfloat16()
            total += down[e].double() @ hidden.double()
        assert torch.equal(out[row], total.bfloat16())


def test_projection_of_a_row_does_not_depend_on_its_batch():
    g = torch.Generator().manual_seed(5)
    x, w = torch.randn(37, 256, generator=g).bfloat16(), torch.randn(96, 256, generator=g).bfloat16()
    whole = layers.project(x, w)
    assert all(torch.equal(layers.project(x[i : i + 1], w)[0], whole[i]) for i in range(37))
