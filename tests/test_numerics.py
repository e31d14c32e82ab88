"""Codecs, quantizers, norm and rotation against ml_dtypes, exact rationals and worked vectors."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from latentkv import numerics
from latentkv.layout import KVLayout
from tests.store import oracle
from tests.store.cases import (
    FLOATS,
    QUANTIZED,
    angle_table,
    largest_sweep,
    near_ties,
    patterns,
    random_rows,
    value_sweep,
)

HALVES = [torch.bfloat16, torch.float16]
F32 = np.float32


def every(dtype: torch.dtype) -> torch.Tensor:
    return patterns(dtype).float()


def random_bits(count: int, seed: int = 0) -> torch.Tensor:
    """fp32 values of random bits: every exponent, NaN and Inf included."""
    bits = np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint32)
    return torch.from_numpy(bits.view(F32).copy())


def around(values: np.ndarray) -> torch.Tensor:
    """Values with their fp32 neighbours, both signs."""
    x = values.astype(F32)
    x = np.concatenate((np.nextafter(x, F32(-np.inf)), x, np.nextafter(x, F32(np.inf))))
    return torch.from_numpy(np.concatenate((x, -x)))


def middles(values: np.ndarray) -> np.ndarray:
    return (values[:-1] + values[1:]) / 2


# --- e2m1 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "x",
    [every(torch.bfloat16), every(torch.float16), random_bits(100_000), around(middles(oracle.E2M1_VALUES))],
    ids=["bf16", "fp16", "fp32", "middles"],
)
def test_e2m1_codes_are_those_of_ml_dtypes(x):
    want = x.nan_to_num(0.0, math.inf, -math.inf).numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    assert np.array_equal(numerics.e2m1_encode(x).numpy(), want)


@pytest.mark.parametrize("dtype", HALVES)
def test_e2m1_ties_can_go_toward_zero(dtype):
    x = every(dtype)
    codes = numerics.e2m1_encode(x, round_half_even=False) & 7
    a = x.abs().double().numpy()
    want = np.where(np.isnan(a), 0, (a[:, None] > middles(oracle.E2M1_VALUES)).sum(-1))
    assert np.array_equal(codes.numpy(), want)
    even = numerics.e2m1_encode(x) & 7
    ties = np.isin(a, middles(oracle.E2M1_VALUES))
    assert set(np.unique(a[(codes != even).numpy()])) == {0.75, 1.75, 3.5}
    assert ties.sum() == 14


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("half_even", [True, False])
def test_e2m1_can_drop_the_sign_of_zero(dtype, half_even):
    x = every(dtype)
    kept = numerics.e2m1_encode(x, round_half_even=half_even)
    dropped = numerics.e2m1_encode(x, round_half_even=half_even, keep_negative_zero=False)
    assert torch.equal(dropped, torch.where(kept == 8, 0, kept))
    assert bool((kept == 8).any())


def test_e2m1_values_are_those_of_ml_dtypes():
    codes = np.arange(16, dtype=np.uint8)
    got = numerics.e2m1_decode(torch.from_numpy(codes)).numpy()
    assert np.array_equal(got.view(np.uint32), codes.view(ml_dtypes.float4_e2m1fn).astype(F32).view(np.uint32))
    assert np.array_equal(numerics.e2m1_encode(torch.from_numpy(got)).numpy(), codes)


def test_nibbles_hold_the_even_value_low():
    codes = torch.arange(256).reshape(2, 128).remainder(16).to(torch.uint8)
    packed = numerics.pack_nibbles(codes)
    assert packed[0, :3].tolist() == [0x10, 0x32, 0x54]
    assert torch.equal(numerics.unpack_nibbles(packed), codes)


# --- e4m3 and ue8m0 ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "x",
    [every(torch.bfloat16), every(torch.float16), random_bits(200_000), around(middles(oracle.E4M3_VALUES))],
    ids=["bf16", "fp16", "fp32", "middles"],
)
def test_e4m3_bytes_are_those_of_ml_dtypes_but_saturate(x):
    clamped = x.clamp(-448, 448).numpy()
    want = clamped.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    want = np.where(np.isnan(clamped), 0x7F, want)
    assert np.array_equal(numerics.e4m3_encode(x).numpy(), want)


def test_e4m3_saturates_instead_of_becoming_nan():
    x = torch.tensor([448.0, 463.9, 464.0, 480.0, 1e30, math.inf, -448.0, -465.0, -math.inf, math.nan, -math.nan])
    assert numerics.e4m3_encode(x).tolist() == [0x7E] * 6 + [0xFE] * 3 + [0x7F] * 2


def test_e4m3_values_are_those_of_ml_dtypes():
    codes = np.arange(256, dtype=np.uint8)
    got = numerics.e4m3_decode(torch.from_numpy(codes)).numpy()
    want = codes.view(ml_dtypes.float8_e4m3fn).astype(F32)
    assert np.array_equal(got, want, equal_nan=True)
    assert np.array_equal(np.signbit(got), np.signbit(want))
    assert np.flatnonzero(np.isnan(got)).tolist() == [0x7F, 0xFF]


def test_ue8m0_values_are_those_of_ml_dtypes():
    codes = np.arange(256, dtype=np.uint8)
    got = numerics.ue8m0_decode(torch.from_numpy(codes)).numpy()
    assert np.array_equal(got, codes.view(ml_dtypes.float8_e8m0fnu).astype(F32), equal_nan=True)
    assert got[0] == 2.0**-127
    assert np.isnan(got[255])


# --- quantizers -------------------------------------------------------------------------------------------------------


def assert_quantizes(rows: torch.Tensor, name: str) -> None:
    """Codes and scales of rows `[n, 512]`, quantized part, are the oracle's."""
    layout = KVLayout.parse(name)
    x = rows.float()[:, : layout.quantized_values].contiguous()
    codes, scale = numerics.quantize(x, layout)
    want_codes, want_scale = oracle.quantize(x.numpy(), name)
    assert np.array_equal(scale.numpy(), want_scale)
    assert np.array_equal(codes.numpy(), want_codes)


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("dtype", HALVES)
def test_every_largest_value_gives_the_oracles_scale(name, dtype):
    assert_quantizes(largest_sweep(name, dtype), name)


@pytest.mark.parametrize(("name", "binades"), [("v4", 19), ("v41", 19), ("v41_fp4", 5), ("v41_mxfp4", 5)])
@pytest.mark.parametrize("dtype", HALVES)
def test_every_value_under_every_scale_gives_the_oracles_code(name, binades, dtype):
    assert_quantizes(value_sweep(name, dtype, binades=binades), name)


@pytest.mark.parametrize("name", QUANTIZED)
def test_fp32_values_around_every_tie_give_the_oracles_code(name):
    assert_quantizes(near_ties(name), name)


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("dtype", FLOATS)
def test_random_rows_of_any_size_give_the_oracles_bytes(name, dtype):
    assert_quantizes(random_rows(64, dtype, spread=40 if dtype == torch.float32 else 12), name)


@pytest.mark.parametrize("name", QUANTIZED)
def test_random_bits_give_the_oracles_bytes(name):
    """A group of random bits almost always has a NaN, an Inf or a huge value; so few values are kept in each."""
    rows = random_bits(256 * 512).view(256, 512)
    keep = torch.rand(rows.shape, generator=torch.Generator().manual_seed(1)) < 0.05
    assert_quantizes(torch.where(keep, rows, 0.0), name)


@pytest.mark.parametrize("name", ["v4", "v41", "v41_mxfp4"])
def test_power_of_two_scales_are_the_smallest_that_do_not_saturate(name):
    """Straight from the definition, in exact arithmetic and without the oracle's search."""
    top = 6 if name == "v41_mxfp4" else 448
    largest = torch.tensor([1.0, 447.9, 448.0, 448.1, 6.0, 6.1, 7.0, 1e-3, 2.0**-90, 3e38, 0.0])
    x = torch.zeros(len(largest), KVLayout.parse(name).group_size)
    x[:, 3] = largest
    scale = numerics.quantize(x, KVLayout.parse(name))[1][:, 0].int() - 127
    floor = {"v4": -22, "v41": -13, "v41_mxfp4": -126}[name]
    for e, value in zip(scale.tolist(), largest.double().tolist(), strict=True):
        assert e >= floor
        assert value <= top * 2.0**e
        assert e == floor or value > top * 2.0 ** (e - 1)


WORKED = [
    ("v41", [1, -0.5, 0.25], "78f068", 0x77),
    ("v41", [448, 1, -1], "7e38b8", 0x7F),
    ("v41", [450, 1], "7630", 0x80),
    ("v41", [0.05, -0.01], "7dea", 0x72),
    ("v41", [0.0546875, 0.01], "7e6a", 0x72),
    ("v41", [1e-6, -1e-6], "0484", 0x72),
    ("v41", [3.3895e38, 1], "7800", 0xF7),
    ("v41", [-0.0, 1], "8078", 0x77),
    ("v41", [448, 17, 18, 19, -17, 1.0625], "7e58595ad838", 0x7F),
    ("v41", [], "00", 0x72),
    ("v41_fp4", [6, 3, 1.5, 0.5, -6, -0.25, 0.25, 0.75], "57138f20", 0x38),
    ("v41_fp4", [6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], "07224466", 0x38),
    ("v41_fp4", [1, -0.5], "d7", 0x23),
    ("v41_fp4", [0.01, 0.003], "37", 0x01),
    ("v41_fp4", [1e-3, -1e-3], "91", 0x01),
    ("v41_fp4", [2688, 1344, -224], "5709", 0x7E),
    ("v41_fp4", [1e6, -1e6, 1000], "f704", 0x7E),
    ("v41_fp4", [6, -0.1, 0.1], "8700", 0x38),
    ("v41_fp4", [-0.0, 1], "78", 0x23),
    ("v41_fp4", [], "00", 0x01),
]


@pytest.mark.parametrize(("name", "values", "payload", "scale_byte"), WORKED)
def test_the_worked_groups_have_the_worked_bytes(name, values, payload, scale_byte):
    layout = KVLayout.parse(name)
    x = torch.zeros(layout.group_size)
    x[: len(values)] = torch.tensor(values, dtype=torch.float32)
    codes, scale = numerics.quantize(x, layout)
    data = numerics.pack_nibbles(codes) if layout.element.bits == 4 else codes
    want = bytes.fromhex(payload)
    assert bytes(data.tolist())[: len(want)] == want
    assert scale.tolist() == [scale_byte]


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_poisons_its_own_group_alone(name, bad):
    layout = KVLayout.parse(name)
    clean = random_rows(1, torch.float32, spread=2)[:, : layout.quantized_values]
    clean_codes, clean_scale = numerics.quantize(clean, layout)
    for at in (0, layout.group_size - 1, layout.group_size, layout.quantized_values - 1):
        x = clean.clone()
        x[0, at] = bad
        codes, scale = numerics.quantize(x, layout)
        group = at // layout.group_size
        inside = torch.arange(layout.quantized_values) // layout.group_size == group
        others = torch.arange(layout.groups) != group
        assert torch.equal(codes[0, ~inside], clean_codes[0, ~inside])
        assert torch.equal(scale[0, others], clean_scale[0, others])
        if name != "v41_fp4":
            assert scale[0, group] == 255
            assert set(codes[0, inside].tolist()) == {0 if name == "v41_mxfp4" else 0x7F}
        elif math.isnan(bad):
            assert scale[0, group] == 0x7F
            assert set(codes[0, inside].tolist()) == {0}
        else:
            assert scale[0, group] == 0x7E
            assert codes[0, at] == (7 if bad > 0 else 15)
            assert set(codes[0, inside].tolist()) <= {0, 8, 7, 15}


@pytest.mark.parametrize("name", QUANTIZED)
def test_codes_decode_to_the_oracles_values(name):
    layout = KVLayout.parse(name)
    generator = torch.Generator().manual_seed(0)
    bits = 1 << layout.element.bits
    codes = torch.randint(0, bits, (512, layout.quantized_values), generator=generator).to(torch.uint8)
    scale = torch.randint(0, 256, (512, layout.groups), generator=generator).to(torch.uint8)
    scale[:32] = torch.arange(256).repeat(32 * layout.groups // 256 + 1)[: 32 * layout.groups].view(32, -1)
    got = numerics.dequantize(codes, scale, layout).numpy()
    with np.errstate(over="ignore"):
        want = oracle.dequantize(codes.numpy(), scale.numpy(), name).astype(F32)
    assert np.array_equal(got, want, equal_nan=True)


@pytest.mark.parametrize("name", ["v41", "v41_fp4"])
def test_values_of_usual_size_are_exact_in_bf16(name):
    """e4m3 * 2^k and e2m1 * e4m3, as long as nothing is below bf16's normal numbers."""
    layout = KVLayout.parse(name)
    codes = torch.arange(1 << layout.element.bits, dtype=torch.uint8).repeat_interleave(layout.group_size)
    for byte in range(10, 127) if name == "v41_fp4" else range(20, 240):
        scale = torch.full((len(codes) // layout.group_size,), byte, dtype=torch.uint8)
        values = numerics.dequantize(codes, scale, layout)
        assert torch.equal(numerics.round_bf16(values).nan_to_num(), values.nan_to_num())


def test_dividing_by_six_or_multiplying_by_its_reciprocal_gives_one_scale_for_every_bf16():
    largest = every(torch.bfloat16)[:32640]  # every finite magnitude
    assert bool(torch.isfinite(largest).all())
    sixth = torch.tensor(1 / 6, dtype=torch.float32)
    scales = [numerics.e4m3_encode(x.clamp(2.0**-9, 448.0)) for x in (largest / 6, largest * sixth)]
    assert torch.equal(*scales)
    assert not torch.equal(largest / 6, largest * sixth)


# --- fake quantization ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["latent", "index"])
def test_fake_quantized_rows_are_the_oracles(kind):
    quantize = numerics.fake_quant_latent if kind == "latent" else numerics.fake_quant_index
    rows = torch.cat((random_rows(64, torch.float32, spread=30), torch.zeros(1, 512), random_rows(64, torch.bfloat16)))
    rows[0, 3], rows[1, 40], rows[2, 511], rows[3, 0] = math.nan, math.inf, -math.inf, -math.nan
    got, want = quantize(rows).numpy(), oracle.fake_quant(rows.numpy(), kind)
    assert np.array_equal(got, want, equal_nan=True)
    numbers = ~np.isnan(want)
    assert np.array_equal(np.signbit(got[numbers]), np.signbit(want[numbers]))


def test_fake_quantized_zeros_have_the_documented_signs():
    x = torch.zeros(16)
    x[:4] = torch.tensor([-0.0, -0.1, 0.1, 6.0])
    got = numerics.fake_quant_latent(x)[:4]
    assert got.tolist() == [0.0, 0.0, 0.0, 6.0]
    assert torch.signbit(got).tolist() == [False, True, False, False]


def test_fake_quantized_latents_are_what_fp4_rows_read_back():
    rows = random_rows(32, torch.bfloat16).float()
    codes, scale = numerics.quantize(rows, KVLayout.V41_FP4)
    assert torch.equal(numerics.fake_quant_latent(rows), numerics.dequantize(codes, scale, KVLayout.V41_FP4))


@given(st.integers(0, 2**32 - 1))
def test_fake_quantizing_twice_changes_nothing_above_the_subnormal_scales(seed):
    rows = torch.randn(4, 64, generator=torch.Generator().manual_seed(seed)) * 3
    once = numerics.fake_quant_index(rows)
    assert torch.equal(numerics.fake_quant_index(once), once)


# --- bf16, norm, rotation ---------------------------------------------------------------------------------------------


def test_every_bf16_keeps_its_bytes():
    got = numerics.bf16_bytes(every(torch.bfloat16))
    assert torch.equal(got.view(torch.int16), patterns(torch.bfloat16).view(torch.int16))


def test_fp32_values_round_to_the_bf16_of_ml_dtypes():
    x = random_bits(200_000)
    ties = (every(torch.bfloat16)[: 0x7F80 - 1].view(torch.int32) | 0x8000).view(torch.float32)
    x = torch.cat((x[~torch.isnan(x)], ties, -ties))
    want = x.numpy().astype(ml_dtypes.bfloat16)
    assert np.array_equal(numerics.bf16_bytes(x).numpy(), want.view(np.uint8))
    assert np.array_equal(numerics.round_bf16(x).numpy(), want.astype(F32))


def test_a_nan_stays_a_nan_in_bf16_and_keeps_its_upper_bits():
    bits = torch.tensor([0x7F800001, 0x7F80FFFF, -1, 0x7FC00000, 0x7F810000, -0x7FFFFF], dtype=torch.int32)
    got = numerics.bf16_bytes(bits.view(torch.float32)).view(torch.int16).int() & 0xFFFF
    assert got.tolist() == [0x7FC0, 0x7FC0, 0xFFFF, 0x7FC0, 0x7F81, 0xFFC0]


def test_every_nan_becomes_the_canonical_one():
    x = random_bits(10_000)
    x[:3] = torch.tensor([-1, 0x7F800001, 0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    got = numerics.canonical_nan(x)
    assert torch.equal(got[~torch.isnan(x)], x[~torch.isnan(x)])
    assert set(got[torch.isnan(x)].view(torch.int32).tolist()) == {0x7FC00000}


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("eps", [1e-20, 1e-6, 0.5])
def test_the_norm_is_the_oracles_where_squares_sum_exactly(weight_dtype, eps):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(-20, 21, (50, 512), generator=generator).float() / 8
    weight = (1 + 0.3 * torch.randn(512, generator=generator)).to(weight_dtype)
    want = oracle.norm(rows.numpy(), weight.float().numpy(), eps)
    assert np.array_equal(numerics.rms_norm(rows, weight, eps).numpy(), want)
    assert np.array_equal(numerics.rms_norm(rows.bfloat16(), weight, eps).numpy(), want)


def test_the_norm_of_random_rows_is_accurate():
    rows = torch.randn(50, 512, generator=torch.Generator().manual_seed(0)).double()
    want = rows / (rows.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert torch.allclose(numerics.rms_norm(rows.float(), torch.ones(512), 1e-6).double(), want, rtol=3e-7, atol=0)


def test_a_zero_row_is_normed_to_zero():
    assert numerics.rms_norm(torch.zeros(1, 512), torch.ones(512), 1e-20).count_nonzero() == 0


@pytest.mark.parametrize("inverse", [False, True])
def test_rotation_rounds_every_product_on_its_own(inverse):
    x, table = random_rows(40, torch.float32)[:, :64], angle_table(40)
    got = numerics.rotate(x, table, inverse=inverse).numpy()
    assert np.array_equal(got, oracle.rotate(x.numpy(), table.numpy(), inverse=inverse))
    fused = x[:, 0::2].double() * table[:, 0::2] - x[:, 1::2].double() * table[:, 1::2] * (-1 if inverse else 1)
    assert not np.array_equal(got[:, 0::2], fused.float().numpy())  # the values tell the difference


def test_a_quarter_turn_maps_re_to_im():
    assert numerics.rotate(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 1.0])).tolist() == [-2.0, 1.0]
    assert numerics.rotate(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 1.0]), inverse=True).tolist() == [2.0, -1.0]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_position_outside_the_table_reads_row_zero(dtype):
    table = torch.arange(12.0).view(3, 4)
    positions = [2, -1, 3, 1, 2**31 - 1, -(2**31)] + ([2**32 + 1, -(2**40)] if dtype == torch.int64 else [])
    rows = numerics.freqs_at(table, torch.tensor(positions, dtype=dtype))
    assert rows[:, 0].tolist() == [8.0, 0.0, 0.0, 4.0] + [0.0] * (len(positions) - 4)


# --- frequencies ------------------------------------------------------------------------------------------------------


def frequency(table: torch.Tensor) -> torch.Tensor:
    """Radians a position, from row 1 of a table."""
    return torch.atan2(table[1, 1::2].double(), table[1, 0::2].double())


def test_the_plain_table_has_the_powers_of_theta():
    table = numerics.yarn_freqs(5, theta=10000.0)
    want = 10000.0 ** -(torch.arange(32).double() / 32)
    assert table.shape == (5, 64)
    assert torch.allclose(frequency(table), want, rtol=1e-6)
    assert table[0].tolist() == [1.0, 0.0] * 32
    assert torch.allclose(table[3, 0::2].double(), (3 * want).cos(), atol=1e-6)
    assert torch.allclose(table[3, 1::2].double(), (3 * want).sin(), atol=1e-6)


def test_deepseeks_yarn_ramp_runs_from_dimension_15_to_25():
    """theta 160000, factor 16, original 65536, beta 32 and 1; no magnitude scale."""
    plain = 160000.0 ** -(torch.arange(32).double() / 32)
    table = numerics.yarn_freqs(2, theta=160000.0, factor=16.0)
    ratio = frequency(table) / plain
    assert torch.allclose(ratio[:16], torch.ones(16).double(), rtol=1e-5)
    assert torch.allclose(ratio[25:], torch.full((7,), 1 / 16).double(), rtol=1e-5)
    ramp = (torch.arange(16, 25).double() - 15) / 10
    assert torch.allclose(ratio[16:25], (1 - ramp) + ramp / 16, rtol=1e-5)
    assert torch.allclose(table[1].double().unflatten(0, (-1, 2)).square().sum(-1), torch.ones(32).double(), atol=1e-6)


def test_the_ramp_moves_with_the_original_context():
    """A dimension that turns more than 32 times within it is kept; one that turns less than once is divided."""
    plain = 10000.0 ** -(torch.arange(32).double() / 32)
    ratio = frequency(numerics.yarn_freqs(2, theta=10000.0, factor=4.0, original_positions=4096)) / plain
    turns = 4096 * plain / (2 * math.pi)
    assert torch.allclose(ratio[turns > 32 * 10000 ** (1 / 32)], torch.ones(1).double(), rtol=1e-5)
    assert torch.allclose(ratio[turns < 10000 ** (-1 / 32)], torch.full((1,), 0.25).double(), rtol=1e-5)
    assert bool((ratio.diff() <= 1e-6).all())
