"""Writing rows: bytes, addresses, slots, rotation, what stays untouched."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import latentkv as lk
from tests.store import oracle
from tests.store.cases import (
    FLOATS,
    INTS,
    LAYOUTS,
    MIXES,
    OUTSIDE,
    OUTSIDE_64,
    QUANTIZED,
    Slab,
    angle_table,
    as_complex,
    finished,
    near_ties,
    random_rows,
    slots_of,
    summable_rows,
)

NANS = [math.nan, math.inf, -math.inf]


def store(slab: Slab, rows: torch.Tensor, slots: torch.Tensor, **options: object) -> None:
    device = slab.buffer.device
    lk.store_kv(rows.to(device), slab.cache, slots.to(device), **slab.form, **options)


def assert_holds(slab: Slab, rows: np.ndarray, slots: torch.Tensor) -> None:
    """Every byte of the buffer, those between pages included, is what writing these rows leaves."""
    got, want = slab.bytes(), slab.after(rows, slots)
    wrong = np.flatnonzero(got != want)
    assert wrong.size == 0, f"{wrong.size} bytes differ, the first at {wrong[0]}: {got[wrong[0]]} for {want[wrong[0]]}"


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "values", "payload", "scale"),
    [
        ("v41", [1, -0.5, 0.25], "78f068", 0x77),
        ("v41", [450, 1], "7630", 0x80),
        ("v41", [1e-6, -1e-6], "0484", 0x72),
        ("v41", [448, 17, 18, 19, -17, 1.0625], "7e58595ad838", 0x7F),
        ("v41", [], "00", 0x72),
        ("v41_interleaved", [-0.0, 1], "8078", 0x77),
        ("v41_fp4", [6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], "07224466", 0x38),
        ("v41_fp4", [2688, 1344, -224], "5709", 0x7E),
        ("v41_fp4", [6, -0.1, 0.1], "8700", 0x38),
        ("v41_fp4_interleaved", [0.01, 0.003], "37", 0x01),
    ],
)
@pytest.mark.parametrize("group", [0, -1])
def test_worked_groups_have_the_worked_bytes_in_the_first_and_the_last_place(
    backend, layout, values, payload, scale, group
):
    slab, form = Slab.new(layout, 16, backend.device), oracle.FORMS[layout]
    rows = torch.zeros(1, 512)
    first = 0 if group == 0 else 512 - form.group
    rows[0, first : first + len(values)] = torch.tensor(values, dtype=torch.float32)
    store(slab, rows, torch.tensor([21]))
    data, scales = slab.row_bytes(21)
    want = bytes.fromhex(payload)
    at = first * form.data_bytes // 512
    assert bytes(data[at : at + len(want)]) == want
    assert scales[group] == scale


@pytest.mark.parametrize(("layout", "dtype"), MIXES)
def test_random_rows_have_the_oracles_bytes_and_nothing_else_changes(backend, layout, dtype):
    slab, rows = Slab.new(layout, 16, backend.device), random_rows(9, dtype)
    slots = slots_of(9, slab.capacity, 1, torch.int64, backend.device)
    store(slab, rows, slots)
    assert_holds(slab, finished(rows), slots)


@pytest.mark.parametrize("layout", QUANTIZED)
def test_fp32_values_around_ties_are_rounded_to_even(backend, layout):
    rows = near_ties(layout)
    if backend.name == "interpreter":
        rows = rows[:: max(1, len(rows) // 24)]
    slab = Slab.new(layout, 64, backend.device, pages=-(-len(rows) // 64))
    slots = torch.arange(len(rows))
    store(slab, rows, slots)
    assert_holds(slab, finished(rows), slots)


@given(bits=st.lists(st.integers(0, 2**32 - 1), min_size=16, max_size=16), layout=st.sampled_from(QUANTIZED[1:]))
def test_groups_of_any_fp32_bits_have_the_oracles_bytes(backend, bits, layout):
    group = np.array(bits, np.uint32).view(np.float32)
    rows = np.zeros((1, 512), np.float32)
    rows[0, 96:112], rows[0, 304:308], rows[0, 508:] = group, group[:4], group[-4:]
    slab = Slab.new(layout, 4, backend.device)
    store(slab, torch.from_numpy(rows), torch.tensor([9]))
    assert_holds(slab, rows, torch.tensor([9]))


@given(
    bits=st.lists(st.integers(0, 2**16 - 1), min_size=16, max_size=16),
    layout=st.sampled_from(LAYOUTS),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
)
def test_groups_of_any_half_bits_have_the_oracles_bytes(backend, bits, layout, dtype):
    group = torch.tensor(np.array(bits, np.uint16).view(np.int16)).view(dtype)
    rows = torch.zeros(1, 512, dtype=dtype)
    rows[0, 64:80], rows[0, 300:304] = group, group[:4]
    finite = torch.where(torch.isfinite(group), group, 1.0)
    rows[0, 500:] = finite[:12]  # NaN bits in bf16 parts have tests of their own
    if layout == "bf16":
        rows = torch.where(torch.isnan(rows), 1.0, rows)
    slab = Slab.new(layout, 4, backend.device)
    store(slab, rows, torch.tensor([11]))
    assert_holds(slab, finished(rows), torch.tensor([11]))


# --- values that are not finite ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "bad"), [*((torch.bfloat16, x) for x in NANS), (torch.float32, -math.nan)])
@pytest.mark.parametrize("layout", QUANTIZED)
def test_a_bad_value_poisons_its_own_group_alone(backend, layout, dtype, bad):
    form, rows = oracle.FORMS[layout], random_rows(4, dtype, spread=3)
    width = 512 - form.tail
    clean, slots = Slab.new(layout, 4, backend.device), torch.tensor([0, 5, 7, 2])
    store(clean, rows, slots)
    places = [(0, 0), (1, form.group), (2, width // 2 + form.group - 1), (3, width - 1)]
    for row, at in places:
        rows[row, at] = bad
    slab = Slab.new(layout, 4, backend.device)
    store(slab, rows, slots)
    assert_holds(slab, finished(rows), slots)
    for row, at in places:
        (data, scales), (clean_data, clean_scales) = (s.row_bytes(slots[row].item()) for s in (slab, clean))
        group, size = at // form.group, form.group * (form.data_bytes - 2 * form.tail) // width
        inside = slice(group * size, (group + 1) * size)
        assert np.array_equal(np.delete(data, inside), np.delete(clean_data, inside))
        assert np.array_equal(np.delete(scales, group), np.delete(clean_scales, group))
        if layout != "v41_fp4":
            assert scales[group] == 255
            assert set(data[inside]) == {0 if layout == "v41_mxfp4" else 0x7F}
        elif math.isnan(bad):
            assert scales[group] == 0x7F
            assert set(data[inside]) == {0}
        else:
            assert scales[group] == 0x7E


@pytest.mark.parametrize(("layout", "at"), [("bf16", 0), ("bf16", 511), ("v4", 448), ("v4", 511)])
def test_bf16_parts_keep_a_nans_bits_only_if_the_row_is_untouched_bf16(backend, layout, at):
    patterns = [0x7F81, 0x7FFF, 0xFF81, 0xFFFF, 0x7FC0, 0x7F80, 0xFF80]
    rows = torch.zeros(len(patterns), 512).bfloat16()
    rows[:, at] = torch.tensor(np.array(patterns, np.uint16).view(np.int16)).view(torch.bfloat16)
    slots = torch.arange(len(patterns))
    first = 2 * at if layout == "bf16" else 448 + 2 * (at - 448)

    def stored(rows: torch.Tensor, **options: object) -> list[int]:
        slab = Slab.new(layout, 16, backend.device)
        store(slab, rows, slots, **options)
        return [int(np.frombuffer(slab.row_bytes(s)[0][first : first + 2].tobytes(), "<u2")[0]) for s in slots.tolist()]

    settled = [0x7FC0] * 5 + [0x7F80, 0xFF80]
    assert stored(rows) == patterns
    assert stored(rows.float()) == settled
    assert stored(rows.half()) == settled
    identity = torch.tensor([1.0, 0.0]).repeat(32).expand(len(patterns), 64).contiguous().to(backend.device)
    assert stored(rows, freqs=identity) == settled


# --- addresses, strides, slots ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 2, 64, 256])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_lie_where_the_layout_says_for_any_page_size(backend, layout, page_size):
    slab, rows = Slab.new(layout, page_size, backend.device, pages=5), random_rows(4, torch.bfloat16)
    slots = torch.tensor([slab.capacity - 1, 0, slab.capacity // 2, 1])
    store(slab, rows, slots)
    assert_holds(slab, finished(rows), slots)


@pytest.mark.parametrize(("gap", "start"), [(0, 0), (1, 0), (0, 1), (3, 5), (2, 2), (4, 4), (8192, 16)])
@pytest.mark.parametrize("layout", ["v4", "bf16", "v41_fp4_interleaved"])
def test_pages_may_start_at_any_byte_of_a_slab(backend, layout, gap, start):
    slab, rows = Slab.new(layout, 4, backend.device, gap=gap, start=start), random_rows(3, torch.bfloat16)
    slots = torch.tensor([11, 3, 4])
    store(slab, rows, slots)
    assert_holds(slab, finished(rows), slots)
    values = lk.load_kv(slab.cache, slots.to(backend.device), **slab.form)
    want = oracle.decode(*oracle.encode(finished(rows), layout), layout)
    assert np.array_equal(values.float().cpu().numpy(), want)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("first", [0, 1, 2, 7, 64])
def test_rows_may_be_slices_of_a_wider_projection(backend, dtype, first):
    wide = random_rows(6, dtype).view(3, 1024).to(backend.device)
    slab, slots = Slab.new("v41_fp4", 4, backend.device), torch.tensor([11, 3, 4])
    rows = wide[:, first : first + 512]
    store(slab, rows, slots)
    assert_holds(slab, finished(rows.cpu()), slots)
    other = Slab.new("v41", 4, backend.device)
    lk.store_kv(wide[::2, first : first + 512], other.cache, slots[::2].to(backend.device), **other.form)
    assert_holds(other, finished(rows[::2].cpu()), slots[::2])


def test_an_odd_row_stride_is_read_as_it_is(backend):
    wide = torch.zeros(4, 513).bfloat16()
    wide[:, :512] = random_rows(4, torch.bfloat16)
    slab, slots = Slab.new("v41", 4, backend.device), torch.tensor([1, 3, 4, 0])
    store(slab, wide.to(backend.device)[:, :512], slots)
    assert_holds(slab, finished(wide[:, :512]), slots)


def test_one_row_may_be_written_to_many_slots(backend):
    """A row stride of 0."""
    rows = random_rows(1, torch.bfloat16).to(backend.device).expand(5, 512)
    slab, slots = Slab.new("v41", 4, backend.device), torch.tensor([1, 3, 4, 0, 11])
    store(slab, rows, slots)
    assert_holds(slab, finished(rows.cpu()), slots)


@pytest.mark.parametrize("dtype", INTS)
def test_slots_may_be_strided(backend, dtype):
    table = torch.full((7, 3), 2, dtype=dtype, device=backend.device)
    table[:, 1] = torch.tensor([1, 3, -1, 0, 11, 64, 5])
    slab, rows = Slab.new("v41", 4, backend.device), random_rows(7, torch.bfloat16)
    store(slab, rows, table[:, 1])
    assert_holds(slab, finished(rows), table[:, 1])


@pytest.mark.parametrize("layout", ["v4", "v41_fp4", "v41_interleaved"])
@pytest.mark.parametrize(("dtype", "outside"), [(torch.int32, OUTSIDE), (torch.int64, OUTSIDE + OUTSIDE_64)])
def test_slots_outside_the_cache_write_nothing(backend, layout, dtype, outside):
    slab = Slab.new(layout, 16, backend.device, pages=4)
    assert slab.capacity == 64
    slots = torch.tensor([*outside[:5], 63, *outside[5:], 0], dtype=dtype)
    rows = random_rows(len(slots), torch.bfloat16)
    store(slab, rows, slots)
    assert_holds(slab, finished(rows), slots)
    store(empty := Slab.new(layout, 16, backend.device, pages=4), rows[: len(outside)], torch.tensor(outside))
    assert set(empty.bytes()) == {0xA5}


def test_slot_zero_is_an_ordinary_slot(backend):
    slab, rows = Slab.new("v41", 4, backend.device), random_rows(1, torch.bfloat16)
    store(slab, rows, torch.tensor([0]))
    assert_holds(slab, finished(rows), torch.tensor([0]))


@pytest.mark.parametrize("pages", [0, 3])
def test_no_rows_and_no_pages_write_nothing(backend, pages):
    cache = lk.new_kv_cache("v41", pages, 16, device=backend.device)
    lk.store_kv(
        torch.zeros(0, 512, device=backend.device), cache, torch.zeros(0, dtype=torch.int64, device=backend.device),
        layout="v41", page_size=16,
    )  # fmt: skip
    lk.store_kv(
        torch.ones(2, 512, device=backend.device), cache, torch.tensor([-1, pages * 16], device=backend.device),
        layout="v41", page_size=16,
    )  # fmt: skip
    assert cache.count_nonzero() == 0


def test_a_row_is_overwritten_whole(backend):
    slab, slots = Slab.new("v4", 4, backend.device), torch.tensor([5])
    store(slab, random_rows(1, torch.bfloat16, seed=1), slots)
    rows = random_rows(1, torch.bfloat16, seed=2)
    store(slab, rows, slots)
    assert_holds(slab, finished(rows), slots)


@pytest.mark.parametrize("layout", ["v41", "v41_fp4", "v4"])
def test_a_rows_bytes_do_not_depend_on_the_batch(backend, layout):
    rows = random_rows(7, torch.bfloat16)
    whole, slots = Slab.new(layout, 4, backend.device), torch.arange(7)
    store(whole, rows, slots)
    for n in (0, 3, 6):
        alone = Slab.new(layout, 4, backend.device)
        store(alone, rows[n : n + 1], slots[n : n + 1])
        assert all(np.array_equal(a, b) for a, b in zip(alone.row_bytes(n), whole.row_bytes(n), strict=True))


def test_forty_rows_are_written_by_more_than_one_program(backend):
    slab, rows = Slab.new("v41_fp4", 16, backend.device), random_rows(40, torch.bfloat16)
    slots = slots_of(40, slab.capacity, 3, torch.int32, backend.device)
    store(slab, rows, slots)
    assert_holds(slab, finished(rows), slots)


def test_arguments_are_only_read(backend):
    slab, rows = Slab.new("v41", 4, backend.device), random_rows(3, torch.bfloat16).to(backend.device)
    slots, freqs = torch.tensor([1, -1, 9], device=backend.device), angle_table(3).to(backend.device)
    before = [x.clone() for x in (rows, slots, freqs)]
    store(slab, rows, slots, freqs=freqs)
    assert all(torch.equal(a, b) for a, b in zip((rows, slots, freqs), before, strict=True))


# --- rotation ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layout", "dtype"), MIXES)
def test_the_tail_is_rotated_by_the_rows_angles_and_rounded_to_the_rows_dtype(backend, layout, dtype):
    slab, rows = Slab.new(layout, 4, backend.device), random_rows(5, dtype)
    table, slots = angle_table(5), torch.tensor([1, 3, -1, 11, 0])
    store(slab, rows, slots, freqs=table.to(backend.device))
    assert_holds(slab, finished(rows, table), slots)
    plain = Slab.new(layout, 4, backend.device)
    store(plain, rows, slots)
    assert not np.array_equal(plain.bytes(), slab.bytes())


def test_a_complex_table_and_a_strided_one_rotate_alike(backend):
    rows, slots, table = random_rows(5, torch.bfloat16), torch.tensor([1, 3, 4, 11, 0]), angle_table(5)
    wide = torch.full((5, 70), 9.0)
    wide[:, 3:67] = table
    forms = [as_complex(table.to(backend.device)), wide.to(backend.device)[:, 3:67]]
    for freqs in forms:
        slab = Slab.new("v41", 4, backend.device)
        store(slab, rows, slots, freqs=freqs)
        assert_holds(slab, finished(rows, table), slots)


@pytest.mark.parametrize("layout", ["v41", "v41_fp4", "v4", "bf16"])
@pytest.mark.parametrize("bad", NANS)
def test_a_bad_value_in_the_tail_stays_in_its_group_through_the_rotation(backend, layout, bad):
    rows = summable_rows(2, torch.bfloat16)
    table, slots = angle_table(3)[1:], torch.tensor([1, 3])
    clean, slab = Slab.new(layout, 4, backend.device), Slab.new(layout, 4, backend.device)
    store(clean, rows, slots, freqs=table.to(backend.device))
    rows[0, 470] = bad  # group 14 of 32, 29 of 16; its pair is 470, 471
    store(slab, rows, slots, freqs=table.to(backend.device))
    values = lk.load_kv(slab.cache, slots.to(backend.device), **slab.form).cpu()
    want = lk.load_kv(clean.cache, slots.to(backend.device), **slab.form).cpu()
    span = {"v41": (448, 480), "v41_fp4": (464, 480), "v4": (470, 472), "bf16": (470, 472)}[layout]
    inside = torch.zeros(512, dtype=torch.bool)
    inside[slice(*span)] = True
    assert torch.equal(values[0, ~inside], want[0, ~inside])
    assert torch.equal(values[1], want[1])
    if layout == "v41_fp4" and not math.isnan(bad):
        assert set(values[0, 470:472].abs().tolist()) == {2688.0}
    elif layout in ("v41", "v41_fp4"):
        assert bool(torch.isnan(values[0, inside]).all())
    else:
        assert not bool(torch.isfinite(values[0, inside]).any())
