"""Router logits: the value, the bits that no batch changes, and head weights."""

from __future__ import annotations

import pytest
import torch

import latentkv as lk

SHAPES = [(512, 64), (1024, 384), (700, 48), (100, 8)]


def inputs(
    rows: int, width: int, experts: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows * 7 + width)
    x = torch.randn(rows, width, generator=generator).bfloat16()
    return x, torch.randn(experts, width, generator=generator).to(dtype)


@pytest.mark.parametrize(("width", "experts"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_logits_are_near_the_exact_sum(backend, width, experts, dtype):
    x, w = inputs(9, width, experts, dtype)
    want = x.double() @ w.double().T
    size = x.double().abs() @ w.double().abs().T
    for op in (lk.linear_fp32, lk.router_logits):
        got = op(x.to(backend.device), w.to(backend.device)).cpu().double()
        assert ((got - want).abs() <= size * 2.0**-20).all()  # fp32 sums; a bf16 or tf32 product would miss by 2^-11


@pytest.mark.parametrize(("width", "experts"), SHAPES)
def test_partials_cover_512_columns_each_and_sum_to_the_logits(backend, width, experts):
    x, w = (t.to(backend.device) for t in inputs(5, width, experts))
    partials = lk.router_partials(x, w)
    assert partials.shape == (-(-width // 512), 5, experts)
    total = partials[0].clone()
    for i, partial in enumerate(partials):
        alone = lk.router_partials(x[:, 512 * i : 512 * i + 512], w[:, 512 * i : 512 * i + 512])
        assert torch.equal(alone[0], partial)
        total = total if i == 0 else total + partial
    assert torch.equal(lk.router_logits(x, w), total)


@pytest.mark.parametrize(
    "op",
    [lk.linear_fp32, lk.router_logits, lambda x, w: lk.head_weights(x, w, 0.0883)],
    ids=["linear_fp32", "router_logits", "head_weights"],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_rows_bits_do_not_depend_on_the_batch(backend, op, dtype):
    x, w = (t.to(backend.device) for t in inputs(64, 1024, 32, dtype))
    whole = op(x, w)
    for rows in (1, 2, 3, 7, 16, 33):
        assert torch.equal(op(x[:rows], w), whole[:rows])
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1)).to(backend.device)
    assert torch.equal(op(x[order], w), whole[order])
    padded = torch.cat((x[5:6], torch.full((3, 1024), float("nan"), device=backend.device).bfloat16()))
    assert torch.equal(op(padded, w)[0], whole[5])


def test_fp32_weights_are_not_rounded(backend):
    x = torch.ones(1, 512, device=backend.device, dtype=torch.bfloat16)
    w = torch.full((8, 512), 1.0 + 2.0**-15, device=backend.device)
    assert lk.router_logits(x, w)[0, 0].item() == 512.0 + 2.0**-6
    assert lk.linear_fp32(x, w)[0, 0].item() == 512.0 + 2.0**-6


def test_head_weights_round_the_sum_and_then_the_product(backend):
    x, w = (t.to(backend.device) for t in inputs(6, 1024, 32))
    scale = torch.tensor(128**-0.5 * 32**-0.5, dtype=torch.float32)
    want = (lk.router_logits(x, w).bfloat16().float() * scale.to(backend.device)).bfloat16()
    assert torch.equal(lk.head_weights(x, w, 128**-0.5 * 32**-0.5), want)


def test_a_scale_is_rounded_on_the_cpu_whatever_the_default_device():
    """On a GPU it would wait for the device, which a captured region must not."""
    x, w = inputs(2, 512, 8)
    want, gated = lk.head_weights(x, w, 0.1), lk.route_topk(torch.zeros(1, 8), k=2, scale=0.1)
    with torch.device("meta"):
        assert torch.equal(lk.head_weights(x, w, 0.1), want)
        assert torch.equal(lk.route_topk(torch.zeros(1, 8, device="cpu"), k=2, scale=0.1)[0], gated[0])


def test_strided_rows_and_no_rows(backend):
    x, w = (t.to(backend.device) for t in inputs(6, 1024, 16))
    assert torch.equal(
        lk.router_logits(x[::2, 256:768], w[:, 256:768]),
        lk.router_logits(x[::2, 256:768].clone(), w[:, 256:768].clone()),
    )
    assert lk.router_logits(x[:0], w).shape == (0, 16)


@pytest.mark.parametrize(
    ("x", "w", "error"),
    [
        (torch.zeros(2, 8), torch.zeros(4, 8), TypeError),
        (torch.zeros(2, 8).bfloat16(), torch.zeros(4, 9), ValueError),
        (torch.zeros(8).bfloat16(), torch.zeros(4, 8), ValueError),
        (torch.zeros(8, 2).bfloat16().T, torch.zeros(4, 8), ValueError),
        (torch.zeros(2, 8).bfloat16(), torch.zeros(4, 8, dtype=torch.float16), TypeError),
    ],
    ids=["fp32 rows", "widths differ", "one row", "transposed", "fp16 weights"],
)
@pytest.mark.parametrize("op", [lk.linear_fp32, lk.router_partials, lk.router_logits], ids=lambda op: op.__name__)
def test_bad_operands_raise(op, x, w, error):
    with pytest.raises(error):
        op(x, w)


def test_ops_trace_and_declare_what_they_change():
    x, w = inputs(3, 512, 16)
    for op in ("linear_fp32", "router_partials", "router_logits"):
        torch.library.opcheck(getattr(torch.ops.latentkv, op).default, (x, w))
    torch.library.opcheck(torch.ops.latentkv.head_weights.default, (x, w, 0.5))
    gate = (torch.randn(3, 16), None, None, 2, True, 1.0, 1, "index", "log1p")
    torch.library.opcheck(torch.ops.latentkv.route_topk.default, gate)
