"""Rotation and fake quantization in place of a store."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import latentkv as lk
from tests.store import oracle
from tests.store.cases import FLOATS, INTS, angle_table, as_complex, random_rows, short

KINDS = ["index", "latent"]
IDENTITY = torch.tensor([1.0, 0.0]).repeat(32).unsqueeze(0)


def expected(x: torch.Tensor, angles: torch.Tensor, kind: str, *, inverse: bool = False) -> np.ndarray:
    """fp32 values; `angles` has one row for each of x's rows, however they are arranged."""
    width, values = angles.shape[-1], x.float().cpu().numpy()
    tail = oracle.rotate(values[..., -width:], angles.numpy(), inverse=inverse)
    values = np.concatenate((values[..., :-width], oracle.round_to(tail, "bfloat16")), -1)
    return oracle.round_to(oracle.fake_quant(values, kind), short(x.dtype))


def assert_equals(got: torch.Tensor, want: np.ndarray) -> None:
    values = got.float().cpu().numpy()
    assert np.array_equal(values, want, equal_nan=True)
    numbers = ~np.isnan(want)
    assert np.array_equal(np.signbit(values[numbers]), np.signbit(want[numbers]))


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_rotated_then_put_on_the_grid(backend, kind, dtype, inverse):
    x, table = random_rows(6, dtype), angle_table(6)
    got = lk.rope_fake_quant(x.to(backend.device), table.to(backend.device), kind=kind, inverse=inverse)
    assert got.dtype == dtype
    assert got.shape == x.shape
    assert_equals(got, expected(x, table, kind, inverse=inverse))


@pytest.mark.parametrize("dtype", INTS)
@pytest.mark.parametrize("kind", KINDS)
def test_positions_pick_rows_of_the_table_and_row_zero_if_outside(backend, kind, dtype):
    outside = [9, -1, 2**31 - 1] if dtype == torch.int32 else [9, -(2**40) + 2, 2**32 + 1]
    positions = torch.tensor([8, *outside, 3], dtype=dtype)
    x, table = random_rows(5, torch.bfloat16), angle_table(20)[11:]
    got = lk.rope_fake_quant(
        x.to(backend.device), table.to(backend.device), kind=kind, positions=positions.to(backend.device)
    )
    assert_equals(got, expected(x, table[[8, 0, 0, 0, 3]], kind))


@pytest.mark.parametrize("shape", [(3, 128), (3, 2, 128), (3, 2, 5, 64), (2, 1, 512), (3, 4, 192), (2, 7, 32)])
@pytest.mark.parametrize("kind", KINDS)
def test_all_rows_of_a_token_share_its_angles(backend, kind, shape):
    x = random_rows(64, torch.bfloat16).flatten()[: math.prod(shape)].view(shape)
    table = angle_table(shape[0] + 1, width=min(64, shape[-1]))[1:]
    got = lk.rope_fake_quant(x.to(backend.device), table.to(backend.device), kind=kind)
    rows = table.view(shape[0], *[1] * (len(shape) - 2), -1).expand(*shape[:-1], -1)
    assert_equals(got, expected(x, rows, kind))


@pytest.mark.parametrize("width", [2, 16, 32, 128])
def test_any_even_width_is_rotated(backend, width):
    x, table = random_rows(4, torch.bfloat16)[:, :128].contiguous(), angle_table(5, width=width)[1:]
    got = lk.rope_fake_quant(x.to(backend.device), table.to(backend.device), kind="index")
    assert_equals(got, expected(x, table, "index"))


def test_strided_input_and_tables_are_read_as_strided(backend):
    x, table, device = random_rows(6, torch.bfloat16), angle_table(6), backend.device
    wide = torch.full((6, 3, 400), 5.0).bfloat16()
    wide[:, 1:, 71:199] = x[:, :256].reshape(6, 2, 128)
    spread = torch.full((6, 80), 9.0)
    spread[:, 7:71] = table
    got = lk.rope_fake_quant(wide.to(device)[:, 1:, 71:199], spread.to(device)[:, 7:71], kind="latent")
    assert_equals(got, expected(wide[:, 1:, 71:199], table.unsqueeze(1).expand(6, 2, 64), "latent"))
    assert got.is_contiguous()
    turned = lk.rope_fake_quant(x.to(device), as_complex(table.to(device)), kind="latent")
    assert_equals(turned, expected(x, table, "latent"))
    flipped = wide.to(device)[:, 1:, 71:199].transpose(0, 1)  # tokens are the second dimension in memory
    got = lk.rope_fake_quant(flipped, spread.to(device)[:2, 7:71], kind="index")
    assert_equals(got, expected(flipped.cpu(), table[:2].unsqueeze(1).expand(2, 6, 64), "index"))


@pytest.mark.parametrize("kind", KINDS)
def test_the_rotated_tail_passes_through_bf16_whatever_the_dtype(backend, kind):
    """A value whose fp32 and bf16 forms lie on different sides of a tie."""
    x = torch.zeros(1, 128)
    x[0, 64:66] = torch.tensor([6.0, 0.2501])  # bf16 0.25, a tie that goes to zero
    x[0, 0:2] = torch.tensor([6.0, 0.2501])  # not rotated: above the tie
    got = lk.rope_fake_quant(x.to(backend.device), IDENTITY.to(backend.device), kind=kind)[0].cpu()
    assert got[64:66].tolist() == [6.0, 0.0]
    assert got[0:2].tolist() == [6.0, 0.5]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("kind", "size"), [("index", 32), ("latent", 16)])
def test_a_bad_value_stays_in_its_group(backend, kind, size, bad):
    x, table = random_rows(3, torch.bfloat16, spread=2), angle_table(3)
    device = backend.device
    clean = lk.rope_fake_quant(x.to(device), table.to(device), kind=kind).cpu()
    x[1, 70] = bad
    got = lk.rope_fake_quant(x.to(device), table.to(device), kind=kind).cpu()
    inside = torch.zeros(3, 512, dtype=torch.bool)
    inside[1, 64 : 64 + size] = True
    assert torch.equal(got[~inside], clean[~inside])
    if kind == "latent" and not math.isnan(bad):
        assert got[1, 70] == math.copysign(2688, bad)
    else:
        assert bool(torch.isnan(got[inside]).all())


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_have_the_documented_signs(backend, kind):
    x = torch.zeros(1, 128)
    x[0, :4] = torch.tensor([-0.0, -0.1, 0.1, 6.0])
    got = lk.rope_fake_quant(x.bfloat16().to(backend.device), IDENTITY.to(backend.device), kind=kind)[0, :4].cpu()
    assert got.tolist() == [0.0, 0.0, 0.0, 6.0]
    assert torch.signbit(got).tolist() == [False, True, False, False]


@given(
    bits=st.lists(st.integers(0, 2**32 - 1), min_size=32, max_size=32),
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from(FLOATS),
)
def test_groups_of_any_bits_land_where_the_oracle_says(backend, bits, kind, dtype):
    x = torch.zeros(1, 128)
    x[0, :32] = torch.from_numpy(np.array(bits, np.uint32).view(np.float32))
    x[0, 32:36] = x[0, :4]
    x = x.to(dtype)
    got = lk.rope_fake_quant(x.to(backend.device), IDENTITY.to(backend.device), kind=kind)
    assert_equals(got, expected(x, IDENTITY, kind))


@pytest.mark.parametrize("shape", [(0, 128), (3, 0, 128)])
def test_no_rows_give_no_rows(backend, shape):
    x = torch.zeros(shape, device=backend.device)
    assert lk.rope_fake_quant(x, angle_table(shape[0]).to(backend.device), kind="index").shape == shape


def test_the_input_is_only_read(backend):
    x, table = random_rows(3, torch.bfloat16).to(backend.device), angle_table(3).to(backend.device)
    before = x.clone()
    lk.rope_fake_quant(x, table, kind="latent")
    assert torch.equal(x.view(torch.int16), before.view(torch.int16))
