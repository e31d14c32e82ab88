"""Norm, rotation, quantization and write in one op, and the query rotated beside it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import latentkv as lk
from latentkv.reference import store as reference
from tests.store.cases import (
    INTS,
    MIXES,
    Slab,
    angle_table,
    as_complex,
    normed,
    random_rows,
    summable_rows,
)

SLOTS = torch.tensor([0, 3, -1, 11, 64])
POSITIONS = torch.tensor([0, 1, 5, 39, 17])
COUNT = len(SLOTS)


def weights(dtype: torch.dtype = torch.bfloat16, seed: int = 9) -> torch.Tensor:
    return (1 + 0.3 * torch.randn(512, generator=torch.Generator().manual_seed(seed))).to(dtype)


def store(slab: Slab, rows: torch.Tensor, weight: torch.Tensor, table: torch.Tensor, eps: float, **options) -> None:
    device = slab.buffer.device
    slots, positions = options.pop("slots", SLOTS).to(device), options.pop("positions", POSITIONS).to(device)
    lk.norm_rope_store_kv(
        rows.to(device), weight.to(device), slab.cache, slots, positions, table.to(device),
        eps=eps, **slab.form, **options,
    )  # fmt: skip


def assert_holds(slab: Slab, rows: np.ndarray, slots: torch.Tensor = SLOTS) -> None:
    wrong = np.flatnonzero(slab.bytes() != slab.after(rows, slots))
    assert wrong.size == 0, f"{wrong.size} bytes differ, the first at {wrong[0]}"


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layout", "dtype"), MIXES)
def test_rows_are_normed_rotated_at_their_positions_and_quantized(backend, layout, dtype):
    slab, rows, table = Slab.new(layout, 4, backend.device), summable_rows(COUNT, dtype), angle_table(40)
    store(slab, rows, weights(), table, 1e-6)
    assert_holds(slab, normed(rows, weights(), 1e-6, table[POSITIONS], layout))


@pytest.mark.parametrize("layout", ["v4", "v41", "v41_fp4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("eps", [1e-20, 0.25])
def test_weights_of_both_dtypes_and_any_eps_take_part(backend, layout, dtype, eps):
    slab, rows, table = Slab.new(layout, 4, backend.device), summable_rows(COUNT, torch.bfloat16), angle_table(40)
    store(slab, rows, weights(dtype), table, eps)
    assert_holds(slab, normed(rows, weights(dtype), eps, table[POSITIONS], layout))


def test_v41_rows_are_rounded_to_bf16_before_the_quantizer_and_v4_rows_are_not(backend):
    """In each layout the other rule would give other bytes."""
    rows, table = summable_rows(COUNT, torch.float32), angle_table(40)
    for layout, rounded in (("v41", True), ("v4", False)):
        slab, wide = Slab.new(layout, 4, backend.device), weights(torch.float32)
        store(slab, rows, wide, table, 1e-6)
        values = {r: normed(rows, wide, 1e-6, table[POSITIONS], "v41", r) for r in (True, False)}
        assert_holds(slab, values[rounded])
        assert not np.array_equal(slab.after(values[True], SLOTS), slab.after(values[False], SLOTS))


def test_a_zero_row_stays_zero(backend):
    slab, table = Slab.new("v41", 4, backend.device), angle_table(40)
    store(slab, torch.zeros(COUNT, 512), weights(), table, 1e-20)
    want = normed(torch.zeros(COUNT, 512), weights(), 1e-20, table[POSITIONS], "v41")
    assert not want.any()  # though some zeros are negative once rotated
    assert_holds(slab, want)


def test_random_rows_differ_in_no_more_than_one_bf16_step_of_one_value_in_ten_thousand(backend):
    """The sum of squares has no fixed order; on the reference's own path nothing may differ."""
    count, table = 24, angle_table(40)
    rows = torch.randn(count, 512, generator=torch.Generator().manual_seed(5)).bfloat16()
    slots, positions = torch.arange(count), torch.zeros(count, dtype=torch.int64)  # position 0 does not rotate
    slab = Slab.new("bf16", 16, backend.device)
    store(slab, rows, weights(), table, 1e-6, slots=slots, positions=positions)
    got = lk.load_kv(slab.cache, slots.to(backend.device), layout="bf16", page_size=16).cpu()
    cache = lk.new_kv_cache("bf16", 3, 16)
    reference.norm_rope_store_kv(rows, weights(), cache, slots, positions, table, 1e-6, "bf16", 16, None)
    want = lk.load_kv(cache, slots, layout="bf16", page_size=16)
    steps = (got.view(torch.int16).int() - want.view(torch.int16).int()).abs()
    assert steps.max() <= 1
    assert steps.count_nonzero() <= (1e-4 * steps.numel() if backend.is_kernel else 0)


def test_a_nan_poisons_its_whole_row_and_no_other(backend):
    slab, rows, table = Slab.new("v41_fp4", 4, backend.device), summable_rows(COUNT, torch.bfloat16), angle_table(40)
    rows[1, 100] = math.nan
    store(slab, rows, weights(), table, 1e-6)
    want = normed(rows, weights(), 1e-6, table[POSITIONS], "v41_fp4")
    assert np.isnan(want[1]).all()
    assert np.isfinite(np.delete(want, 1, 0)).all()
    assert_holds(slab, want)


def test_an_infinity_leaves_zeros_and_poisons_its_own_group(backend):
    slab, rows, table = Slab.new("v41", 4, backend.device), summable_rows(COUNT, torch.bfloat16), angle_table(40)
    rows[1, 100] = math.inf
    store(slab, rows, weights().abs(), table, 1e-6)
    data, scales = slab.row_bytes(3)
    assert np.flatnonzero(scales == 255).tolist() == [3]
    assert np.flatnonzero((data & 0x7F) == 0x7F).tolist() == list(range(96, 128))
    assert set(np.delete(data, range(96, 128))) <= {0x00, 0x80}


# --- positions, strides, slots ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", INTS)
def test_positions_outside_the_table_read_row_zero(backend, dtype):
    outside = [40, -1, 2**31 - 1, -(2**31)] + ([2**32 + 5, -(2**40) + 3] if dtype == torch.int64 else [])
    positions = torch.tensor([*outside, 7, 39], dtype=dtype)
    slots = torch.arange(len(positions))
    rows, table = summable_rows(len(slots), torch.bfloat16), angle_table(40)
    table[0] = angle_table(99)[98]  # row 0 turns as well
    slab = Slab.new("v41", 4, backend.device)
    store(slab, rows, weights(), table, 1e-6, positions=positions, slots=slots)
    angles = table[[0] * len(outside) + [7, 39]]
    assert_holds(slab, normed(rows, weights(), 1e-6, angles, "v41"), slots)


@pytest.mark.parametrize("slot_dtype", INTS)
@pytest.mark.parametrize("position_dtype", INTS)
def test_strided_rows_slots_positions_and_tables_are_read_as_strided(backend, slot_dtype, position_dtype):
    device, rows, table = backend.device, summable_rows(COUNT, torch.bfloat16), angle_table(40)
    wide = torch.full((COUNT, 1536), 3.0).bfloat16()
    wide[:, 511:1023] = rows
    numbers = torch.stack((SLOTS, POSITIONS, SLOTS), 1)
    spread = torch.full((40, 128), 9.0)
    spread[:, 32:96] = table
    slab = Slab.new("v41_fp4", 4, device)
    lk.norm_rope_store_kv(
        wide.to(device)[:, 511:1023],
        weights().to(device),
        slab.cache,
        numbers.to(slot_dtype).to(device)[:, 0],
        numbers.to(position_dtype).to(device)[:, 1],
        spread.to(device)[:, 32:96],
        eps=1e-6,
        **slab.form,
    )
    assert_holds(slab, normed(rows, weights(), 1e-6, table[POSITIONS], "v41_fp4"))


@pytest.mark.parametrize(("gap", "start"), [(0, 0), (1, 3), (2, 2), (4, 4)])
def test_pages_may_start_at_any_byte_of_a_slab(backend, gap, start):
    slab = Slab.new("v41", 4, backend.device, gap=gap, start=start)
    rows, table = summable_rows(COUNT, torch.bfloat16), angle_table(40)
    store(slab, rows, weights(), table, 1e-6)
    assert_holds(slab, normed(rows, weights(), 1e-6, table[POSITIONS], "v41"))


def test_a_complex_table_is_the_same_table(backend):
    slab, rows, table = Slab.new("v41", 4, backend.device), summable_rows(COUNT, torch.bfloat16), angle_table(40)
    store(slab, rows, weights(), as_complex(table), 1e-6)
    assert_holds(slab, normed(rows, weights(), 1e-6, table[POSITIONS], "v41"))


def test_no_rows_write_nothing(backend):
    slab = Slab.new("v41", 4, backend.device)
    none = torch.zeros(0, dtype=torch.int64)
    query = torch.zeros(0, 3, 512).bfloat16().to(backend.device)
    store(slab, torch.zeros(0, 512), weights(), angle_table(4), 1e-6, slots=none, positions=none, query=query)
    assert set(slab.bytes()) == {0xA5}


# --- query ------------------------------------------------------------------------------------------------------------


def turned(query: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """bf16 queries `[n, heads, 512]` with their tails rotated, through numpy."""
    values = query.float().numpy().copy()
    re, im = values[..., 448::2].copy(), values[..., 449::2].copy()
    c, s = angles[:, None, 0::2].numpy(), angles[:, None, 1::2].numpy()
    values[..., 448::2], values[..., 449::2] = re * c - im * s, re * s + im * c
    return torch.from_numpy(values).bfloat16()


@pytest.mark.parametrize("heads", [1, 3, 16, 33])
def test_every_querys_tail_is_rotated_also_beside_a_skipped_row(backend, heads):
    slab, rows, table = Slab.new("v41", 4, backend.device), summable_rows(COUNT, torch.bfloat16), angle_table(40)
    query = torch.randn(COUNT, heads, 512, generator=torch.Generator().manual_seed(2)).bfloat16()
    given = query.clone().to(backend.device)
    store(slab, rows, weights(), table, 1e-6, query=given)
    assert torch.equal(given.cpu(), turned(query, table[POSITIONS]))
    assert torch.equal(given[..., :448].cpu(), query[..., :448])
    assert_holds(slab, normed(rows, weights(), 1e-6, table[POSITIONS], "v41"))


def test_a_strided_query_is_rotated_in_place_and_its_surroundings_stay(backend):
    rows, table = summable_rows(COUNT, torch.bfloat16), angle_table(40)
    wide = torch.randn(COUNT, 5, 768, generator=torch.Generator().manual_seed(2)).bfloat16()
    given = wide.clone().to(backend.device)
    slab = Slab.new("v41", 4, backend.device)
    store(slab, rows, weights(), table, 1e-6, query=given[:, 1:4, 129:641])
    want = wide.clone()
    want[:, 1:4, 129:641] = turned(wide[:, 1:4, 129:641], table[POSITIONS])
    assert torch.equal(given.cpu(), want)


def test_a_query_without_heads_changes_nothing(backend):
    slab, rows, table = Slab.new("v41", 4, backend.device), summable_rows(COUNT, torch.bfloat16), angle_table(40)
    store(slab, rows, weights(), table, 1e-6, query=torch.zeros(COUNT, 0, 512).bfloat16().to(backend.device))
    assert_holds(slab, normed(rows, weights(), 1e-6, table[POSITIONS], "v41"))


def test_a_cache_without_pages_still_has_its_query_rotated(backend):
    rows, table = summable_rows(COUNT, torch.bfloat16), angle_table(40)
    query = torch.randn(COUNT, 2, 512, generator=torch.Generator().manual_seed(2)).bfloat16()
    given = query.clone().to(backend.device)
    cache = lk.new_kv_cache("v41", 0, 4, device=backend.device)
    arguments = (x.to(backend.device) for x in (SLOTS, POSITIONS, table))
    lk.norm_rope_store_kv(
        rows.to(backend.device), weights().to(backend.device), cache, *arguments,
        eps=1e-6, layout="v41", page_size=4, query=given,
    )  # fmt: skip
    assert torch.equal(given.cpu(), turned(query, table[POSITIONS]))


@pytest.mark.parametrize("layout", ["v4", "v41", "v41_fp4"])
def test_a_rows_bytes_do_not_depend_on_the_batch(backend, layout):
    rows, table = random_rows(COUNT, torch.bfloat16, spread=1), angle_table(40)
    slots = torch.arange(COUNT)
    whole = Slab.new(layout, 4, backend.device)
    store(whole, rows, weights(), table, 1e-6, slots=slots)
    for n in range(0, COUNT, 2):
        alone = Slab.new(layout, 4, backend.device)
        one = slice(n, n + 1)
        store(alone, rows[one], weights(), table, 1e-6, slots=slots[one], positions=POSITIONS[one])
        assert all(np.array_equal(a, b) for a, b in zip(alone.row_bytes(n), whole.row_bytes(n), strict=True))
