"""Index keys: bytes, addresses, slots, pages."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ml_dtypes import bfloat16

import latentkv as lk
from latentkv.numerics import fake_quant_index
from latentkv.reference import index as reference

IDENTITY = torch.tensor([1.0, 0.0]).repeat(32).unsqueeze(0)  # a table whose rotation changes nothing
LAYOUTS = ["fused", "split64", "split8"]


def group_row(*values: float, rest: float = 0.0) -> torch.Tensor:
    """A key whose first 32 values are given."""
    row = torch.zeros(1, 128)
    row[0, :32] = rest
    row[0, : len(values)] = torch.tensor(values)
    return row


def tensors_of(cache: lk.IndexKeyCache) -> list[torch.Tensor]:
    return [x.cpu().clone() for x in (cache.payload, cache.scale) if x is not None]


def codes_and_exponent(cache: lk.IndexKeyCache, slot: int, count: int) -> tuple[list[int], int]:
    payload, scale = lk.load_index_key(cache, torch.tensor([slot], device=cache.device))
    codes = [c for b in payload.view(torch.uint8)[0].tolist() for c in (b & 15, b >> 4)]
    return codes[:count], int(scale[0]) & 0xFF


# --- numbers ----------------------------------------------------------------------------------------------------------

WORKED = [
    (group_row(6.0, rest=0.25), [7, 0, 0], 127),
    (group_row(6.5, rest=1.0), [7, 2, 2], 127),
    (group_row(5.0, -0.25, 2.5, 3.5, -1.25), [6, 0, 4, 6, 10, 0], 127),
    (group_row(3e-4, -1e-4, 2e-5), [4, 10, 0, 0], 114),
    (group_row(2.0**-20, -(2.0**-22)), [0, 0, 0, 0], 114),
    (group_row(), [0, 0, 0, 0], 114),
]


@pytest.mark.parametrize(("row", "codes", "exponent"), WORKED)
def test_worked_groups_pack_after_the_first_stage(backend, row, codes, exponent):
    cache = lk.new_index_key_cache("fused", 1, device=backend.device)
    staged = lk.rope_fake_quant(row.bfloat16(), IDENTITY, kind="index")
    lk.store_index_key_plain(staged.to(backend.device), cache, torch.tensor([3], device=backend.device))
    assert codes_and_exponent(cache, 3, len(codes)) == (codes, exponent)


def test_one_stage_alone_gives_other_bytes_than_two(backend):
    cache = lk.new_index_key_cache("fused", 1, device=backend.device)
    row = group_row(6.5, rest=1.0).bfloat16().to(backend.device)
    lk.store_index_key_plain(row, cache, torch.tensor([1], device=backend.device))
    assert codes_and_exponent(cache, 1, 3) == ([5, 1, 1], 128)


def test_the_worked_first_stage_values():
    staged = fake_quant_index(group_row(3e-4, -1e-4, 2e-5).bfloat16().float())[0, :4]
    assert staged.tolist() == [2.44140625e-4, -9.1552734375e-5, 3.0517578125e-5, 0.0]
    assert fake_quant_index(group_row(6.5, rest=1.0))[0, :3].tolist() == [6.0, 1.0, 1.0]


def test_c4_rounding_sends_ties_toward_zero(backend):
    cache = lk.new_index_key_cache("split64", 1, device=backend.device)
    row = group_row(5.0, -0.25, 2.5, 3.5, -1.25).to(backend.device)
    lk.store_index_key_plain(row, cache, torch.tensor([1], device=backend.device), round_half_even=False)
    assert codes_and_exponent(cache, 1, 6) == ([6, 0, 4, 5, 10, 0], 127)


def test_ties_of_every_step_go_to_the_even_code(backend):
    cache = lk.new_index_key_cache("fused", 1, device=backend.device)
    row = group_row(6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0).to(backend.device)
    lk.store_index_key_plain(row, cache, torch.tensor([1], device=backend.device))
    assert codes_and_exponent(cache, 1, 8) == ([7, 0, 2, 2, 4, 4, 6, 6], 127)


def test_two_stages_change_an_eighth_of_the_bytes_and_no_value(backend):
    """12.35 % of N(0, 1) groups have other bytes; what they decode to is the same."""
    x = torch.randn(6400, 128, generator=torch.Generator().manual_seed(3)).bfloat16().to(backend.device)
    slots = torch.arange(6400, device=backend.device)
    both, second = (lk.new_index_key_cache("fused", 100, device=backend.device) for _ in range(2))
    lk.store_index_key_plain(fake_quant_index(x.float()), both, slots)
    lk.store_index_key_plain(x, second, slots)
    payloads, words = zip(lk.load_index_key(both, slots), lk.load_index_key(second, slots), strict=True)
    scales = [w.unsqueeze(-1).view(torch.uint8) for w in words]
    other = (payloads[0] != payloads[1]).unflatten(1, (4, 16)).any(-1) | (scales[0] != scales[1])
    assert abs(other.float().mean().item() - 0.1235) < 0.008  # four standard deviations of 25600 groups
    assert torch.equal(lk.dequantize_index(payloads[0], words[0]), lk.dequantize_index(payloads[1], words[1]))
    step = scales[0].int() - scales[1].int()
    assert set(step.unique().tolist()) <= {-1, 0}


@given(
    bits=st.lists(st.integers(0, 0xFFFF).filter(lambda b: b & 0x7F80 != 0x7F80), min_size=128, max_size=128),
    half_even=st.booleans(),
)
def test_plain_store_encodes_any_finite_bf16_like_the_oracle(backend, oracle, bits, half_even):
    values = np.array(bits, np.uint16).view(bfloat16).astype(np.float32)[None]
    cache = lk.new_index_key_cache("split8", 1, device=backend.device)
    row = torch.from_numpy(values).bfloat16().to(backend.device)
    slot = torch.tensor([17], device=backend.device)
    lk.store_index_key_plain(row, cache, slot, round_half_even=half_even)
    payload, words = lk.load_index_key(cache, slot)
    want_payload, want_words = oracle.bytes_of(values, half_even)
    assert torch.equal(words.cpu(), want_words)
    assert torch.equal(payload.cpu(), want_payload)


@given(scale=st.integers(-30, 30), seed=st.integers(0, 1000))
def test_staged_values_of_any_size_equal_the_oracle(oracle, scale, seed):
    x = torch.randn(4, 128, generator=torch.Generator().manual_seed(seed)).mul_(2.0**scale).bfloat16().float()
    staged = oracle.stage1(x.numpy())
    got = fake_quant_index(x)
    assert np.array_equal(got.numpy().view(np.uint32), staged.view(np.uint32))


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("count", [1, 31, 64, 65])
def test_fused_store_equals_the_oracle_byte_by_byte(backend, oracle, form, angles, summable, count, ratio):
    layout, page_size = form
    rows, weight = summable(count), (torch.arange(128) % 7 / 4 - 0.5).bfloat16()
    positions = torch.arange(count) * 3 + 5
    slots = torch.randperm(2 * page_size - 1, generator=torch.Generator().manual_seed(1))[:count] + 1
    cache = lk.new_index_key_cache(layout, 2, page_size, device=backend.device)
    on = [x.to(backend.device) for x in (rows, weight, slots, positions, angles)]
    lk.store_index_key(on[0], on[1], cache, on[2], on[3], on[4], eps=1e-20, ratio=ratio)
    keys = oracle.norm(rows.float().numpy(), weight.float().numpy(), 1e-20)
    keys = oracle.stage1(oracle.rope(keys, angles.numpy()[positions.numpy() // ratio * ratio]))
    payload, words = oracle.bytes_of(keys)
    every_payload = torch.zeros(2 * page_size, 64, dtype=torch.int8)
    every_word = torch.zeros(2 * page_size, dtype=torch.int32)
    every_payload[slots], every_word[slots] = payload, words
    pages, scales = oracle.pages_of(layout, page_size, every_payload, every_word)
    assert torch.equal(cache.payload.cpu(), pages)
    assert scales is None or torch.equal(cache.scale.cpu(), scales)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fused_store_equals_the_reference(backend, angles, summable, layout, dtype):
    rows = summable(40, seed=9).to(dtype)
    weight = torch.linspace(-2, 2, 128)
    slots, positions = torch.arange(40, dtype=torch.int32) + 60, torch.arange(40, dtype=torch.int32) * 11
    want = lk.new_index_key_cache(layout, 2)
    reference.store_index_key(rows, weight, want.payload, want.scale, slots, positions, angles, 1e-6, 4, layout, 64)
    cache = lk.new_index_key_cache(layout, 2, device=backend.device)
    on = [x.to(backend.device) for x in (rows, weight, slots, positions, angles)]
    lk.store_index_key(on[0], on[1], cache, on[2], on[3], on[4], eps=1e-6, ratio=4)
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(cache), tensors_of(want), strict=True))


def test_norm_of_zero_row_is_zero_bytes_with_the_floor_exponent(backend, angles):
    cache = lk.new_index_key_cache("fused", 1, device=backend.device)
    zero = torch.zeros(1, 128, dtype=torch.bfloat16, device=backend.device)
    one = torch.tensor([1], device=backend.device)
    lk.store_index_key(zero, torch.ones(128, device=backend.device), cache, one, one, angles.to(backend.device),
                       eps=1e-20, ratio=1)  # fmt: skip
    payload, scale = lk.load_index_key(cache, one)
    assert payload.count_nonzero() == 0
    assert scale.item() == 0x72727272


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("group", range(4))
def test_a_non_finite_value_poisons_its_group_alone(backend, oracle, bad, group):
    row = torch.randn(1, 128, generator=torch.Generator().manual_seed(4)).bfloat16()
    clean_payload, clean_words = oracle.bytes_of(row.float().numpy())
    row[0, group * 32 + 5] = bad
    cache = lk.new_index_key_cache("split64", 1, device=backend.device)
    slot = torch.tensor([9], device=backend.device)
    lk.store_index_key_plain(row.to(backend.device), cache, slot)
    payload, words = (x.cpu() for x in lk.load_index_key(cache, slot))
    want_payload = clean_payload.clone().unflatten(1, (4, 16))
    want_payload[0, group] = 0
    want_scales = clean_words.unsqueeze(-1).view(torch.uint8).clone()
    want_scales[0, group] = 255
    assert torch.equal(payload, want_payload.flatten(1))
    assert torch.equal(words.unsqueeze(-1).view(torch.uint8), want_scales)
    values = lk.dequantize_index(payload, words).unflatten(1, (4, 32))
    assert values.isnan().all(-1)[0].tolist() == [g == group for g in range(4)]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_the_fused_store_keeps_a_non_finite_row_to_itself(backend, angles, summable, bad):
    """The norm spreads a NaN over the row; an Inf makes itself NaN and the rest zero."""
    rows = summable(3)
    rows[1, 40] = bad
    cache = lk.new_index_key_cache("fused", 1, device=backend.device)
    slots = torch.tensor([1, 2, 3], device=backend.device)
    on = [x.to(backend.device) for x in (rows, torch.ones(128), angles)]
    lk.store_index_key(on[0], on[1], cache, slots, slots, on[2], eps=1e-20, ratio=1)
    payload, words = lk.load_index_key(cache, slots)
    values = lk.dequantize_index(payload, words)
    assert not values[[0, 2]].isnan().any()
    assert values[1, 32:64].isnan().all()


# --- addresses --------------------------------------------------------------------------------------------------------

ADDRESSES = [  # slot, dim, then payload byte and scale byte of fused, split64 and split8
    (83, 77, (5606, 8526), (6454, 397), (5574, 339)),
    (1, 0, (64, 4100), (16, 4), (128, 1)),
    (63, 127, (4095, 4351), (4095, 255), (4095, 255)),
    (6, 33, (400, 4121), (1120, 88), (304, 14)),
]


@pytest.mark.parametrize(("slot", "dim", "fused", "split64", "split8"), ADDRESSES)
def test_worked_addresses(backend, slot, dim, fused, split64, split8):
    row = torch.zeros(1, 128)
    row[0, dim] = 6.0 * 2.0**40  # code 7, exponent 167 in its group; 114 in the others
    for layout, (payload_at, scale_at) in zip(LAYOUTS, (fused, split64, split8), strict=True):
        cache = lk.new_index_key_cache(layout, 2, device=backend.device)
        lk.store_index_key_plain(row.to(backend.device), cache, torch.tensor([slot], device=backend.device))
        payload = cache.payload.flatten().cpu()
        scale = payload if cache.scale is None else cache.scale.flatten().cpu()
        assert payload[payload_at] == (0x70 if dim % 2 else 0x07)
        assert scale[scale_at] == 167
        assert (scale == 114).sum() == 3


def test_every_byte_of_three_pages_lies_where_a_permutation_puts_it(backend, oracle, form):
    """192 slots x 128 values, every code and many exponents."""
    layout, page_size = form
    slots = 3 * 64 if page_size == 64 else 2 * 128
    generator = torch.Generator().manual_seed(5)
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = grid[torch.randint(0, 8, (slots, 4, 32), generator=generator)]
    values *= torch.randint(0, 2, values.shape, generator=generator) * 2.0 - 1
    values[..., 0] = 6.0
    values = (values * 2.0 ** torch.randint(-12, 60, (slots, 4, 1), generator=generator)).flatten(1)
    cache = lk.new_index_key_cache(layout, slots // page_size, page_size, device=backend.device)
    order = torch.randperm(slots, generator=generator)
    lk.store_index_key_plain(values[order].to(backend.device), cache, order.to(backend.device))
    payload, words = oracle.bytes_of(values.numpy())
    pages, scales = oracle.pages_of(layout, page_size, payload, words)
    assert torch.equal(cache.payload.cpu(), pages)
    assert scales is None or torch.equal(cache.scale.cpu(), scales)
    got_payload, got_words = lk.load_index_key(cache, order.to(backend.device))
    assert torch.equal(got_payload.cpu(), payload[order])
    assert torch.equal(got_words.cpu(), words[order])
    assert torch.equal(lk.dequantize_index(payload, words), values)


def test_a_scale_word_with_a_large_fourth_exponent_is_negative(backend):
    cache = lk.new_index_key_cache("split8", 1, device=backend.device)
    row = torch.zeros(1, 128)
    row[0, 96] = 6.0 * 2.0**20  # exponent 147
    slot = torch.tensor([5], device=backend.device)
    lk.store_index_key_plain(row.to(backend.device), cache, slot)
    _, scale = lk.load_index_key(cache, slot)
    assert scale.item() == (0x93727272 - (1 << 32))


@pytest.mark.parametrize("pages", [1, 3])
def test_bytes_between_pages_are_never_written(backend, oracle, form, slab, summable, angles, pages):
    layout, page_size = form
    cache, between_is_untouched = slab(layout, pages, page_size, backend.device)
    slots = torch.arange(pages * page_size, device=backend.device)
    values = summable(slots.shape[0])
    lk.store_index_key_plain(values.to(backend.device), cache, slots)
    payload, words = oracle.bytes_of(values.float().numpy())
    got_payload, got_words = lk.load_index_key(cache, slots)
    assert between_is_untouched()
    assert torch.equal(got_payload.cpu(), payload)
    assert torch.equal(got_words.cpu(), words)
    weight = torch.ones(128, device=backend.device)
    lk.store_index_key(
        values.to(backend.device), weight, cache, slots, slots, angles.to(backend.device), eps=0.0, ratio=1
    )
    assert between_is_untouched()


# --- slots and positions ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_padded_and_foreign_slots_write_nothing(backend, form, angles, summable, dtype):
    layout, page_size = form
    cache = lk.new_index_key_cache(layout, 2, page_size, device=backend.device)
    end = 2 * page_size
    slots = torch.tensor([0, -1, -(2**31), end, 2**31 - 1, end - 1], dtype=dtype, device=backend.device)
    on = [x.to(backend.device) for x in (summable(6), torch.ones(128), angles)]
    lk.store_index_key(on[0], on[1], cache, slots, torch.zeros_like(slots), on[2], eps=1e-20, ratio=1)
    everything = torch.arange(end, device=backend.device)
    payload, scale = lk.load_index_key(cache, everything)
    assert payload[:-1].count_nonzero() == 0
    assert scale[:-1].count_nonzero() == 0
    assert scale[-1] != 0


def test_huge_64_bit_slots_do_not_wrap(backend, angles, summable):
    cache = lk.new_index_key_cache("fused", 1, device=backend.device)
    slots = torch.tensor([2**32 + 5, -(2**32) + 5, 2**62], device=backend.device)
    on = [x.to(backend.device) for x in (summable(3), torch.ones(128), angles)]
    lk.store_index_key(on[0], on[1], cache, slots, torch.zeros_like(slots), on[2], eps=1e-20, ratio=1)
    lk.store_index_key_plain(on[0], cache, slots)
    assert cache.payload.count_nonzero() == 0
    payload, scale = lk.load_index_key(cache, slots)
    assert payload.count_nonzero() == 0
    assert scale.count_nonzero() == 0


def test_the_plain_store_writes_slot_0_and_skips_negative_slots(backend, summable):
    cache = lk.new_index_key_cache("split64", 1, device=backend.device)
    slots = torch.tensor([0, -1, 64, -64], device=backend.device)
    lk.store_index_key_plain(summable(4).to(backend.device), cache, slots)
    _, scale = lk.load_index_key(cache, torch.arange(64, device=backend.device))
    assert scale.nonzero().flatten().tolist() == [0]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_foreign_slot_reads_zeros(backend, form, dtype):
    layout, page_size = form
    cache = lk.new_index_key_cache(layout, 1, page_size, device=backend.device)
    cache.payload.fill_(0xFF)
    if cache.scale is not None:
        cache.scale.fill_(0xFF)
    slots = torch.tensor([-1, page_size, 2**31 - 1, -(2**31), page_size - 1], dtype=dtype, device=backend.device)
    payload, scale = lk.load_index_key(cache, slots)
    assert payload[:4].count_nonzero() == 0
    assert scale[:4].count_nonzero() == 0
    assert (payload[4] == -1).all()
    assert scale[4] == -1


def test_a_cache_without_pages_takes_and_gives_nothing(backend, form, summable):
    layout, page_size = form
    cache = lk.new_index_key_cache(layout, 0, page_size, device=backend.device)
    slots = torch.tensor([0, 1], device=backend.device)
    lk.store_index_key_plain(summable(2).to(backend.device), cache, slots)
    payload, scale = lk.load_index_key(cache, slots)
    assert payload.count_nonzero() == 0
    assert scale.tolist() == [0, 0]


def test_no_rows_are_no_work(backend, form, angles):
    layout, page_size = form
    cache = lk.new_index_key_cache(layout, 1, page_size, device=backend.device)
    none = torch.zeros(0, dtype=torch.int64, device=backend.device)
    rows = torch.zeros(0, 128, dtype=torch.bfloat16, device=backend.device)
    weight = torch.ones(128, device=backend.device)
    lk.store_index_key(rows, weight, cache, none, none, angles.to(backend.device), eps=1e-20, ratio=2)
    lk.store_index_key_plain(rows, cache, none)
    payload, scale = lk.load_index_key(cache, none)
    assert payload.shape == (0, 64)
    assert scale.shape == (0,)
    assert cache.payload.count_nonzero() == 0


def test_both_tokens_of_a_pair_rotate_at_the_first(backend, angles, summable):
    row = summable(1).expand(2, 128).contiguous().to(backend.device)
    weight, table = torch.ones(128, device=backend.device), angles.to(backend.device)
    cache = lk.new_index_key_cache("fused", 1, device=backend.device)
    positions = torch.tensor([6, 7], device=backend.device)
    for ratio, slots in ((1, [1, 2]), (2, [3, 4])):
        lk.store_index_key(row, weight, cache, torch.tensor(slots, device=backend.device), positions, table, eps=0.0,
                           ratio=ratio)  # fmt: skip
    payload, _ = lk.load_index_key(cache, torch.arange(1, 5, device=backend.device))
    assert not torch.equal(payload[0], payload[1])
    assert torch.equal(payload[0], payload[2])
    assert torch.equal(payload[0], payload[3])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_position_outside_the_table_reads_row_0(backend, angles, summable, dtype):
    rows = summable(1).expand(5, 128).contiguous().to(backend.device)
    cache = lk.new_index_key_cache("fused", 1, device=backend.device)
    table = angles[3:].to(backend.device)  # row 0 is no identity
    positions = torch.tensor([0, -1, 509, 2**31 - 1, 1], dtype=dtype, device=backend.device)
    slots = torch.arange(1, 6, device=backend.device)
    lk.store_index_key(rows, torch.ones(128, device=backend.device), cache, slots, positions, table, eps=0.0, ratio=1)
    payload, _ = lk.load_index_key(cache, slots)
    assert all(torch.equal(payload[0], payload[i]) for i in range(1, 4))
    assert not torch.equal(payload[0], payload[4])


def test_strided_rows_and_tables_and_complex_tables_give_the_same_bytes(backend, angles, summable):
    rows, slots = summable(20).to(backend.device), torch.arange(1, 21, device=backend.device)
    weight, table = torch.ones(128, device=backend.device), angles.to(backend.device)
    wide = torch.zeros(20, 200, dtype=torch.bfloat16, device=backend.device)
    wide[:, 8:136] = rows
    spread = torch.zeros(512, 96, device=backend.device)
    spread[:, :64] = table
    apart = torch.stack((slots, slots - 1), 1)[:, 0]
    tables = (table, spread[:, :64], torch.view_as_complex(table.unflatten(1, (32, 2)).contiguous()))
    caches = []
    for x, freqs, at in zip((rows, wide[:, 8:136], rows), tables, (slots, apart, slots), strict=True):
        cache = lk.new_index_key_cache("split8", 1, device=backend.device)
        lk.store_index_key(x, weight, cache, at, at * 9, freqs, eps=0.0, ratio=2)
        caches.append(tensors_of(cache))
    assert all(torch.equal(a, b) for other in caches[1:] for a, b in zip(caches[0], other, strict=True))


# --- errors -----------------------------------------------------------------------------------------------------------


def good_arguments(device: torch.device, angles: torch.Tensor) -> dict:
    return {
        "values": torch.ones(2, 128, dtype=torch.bfloat16, device=device),
        "weight": torch.ones(128, device=device),
        "cache": lk.new_index_key_cache("split64", 1, device=device),
        "slots": torch.tensor([1, 2], device=device),
        "positions": torch.tensor([0, 1], device=device),
        "freqs": angles.to(device),
        "eps": 1e-20,
        "ratio": 2,
    }


@pytest.mark.parametrize(
    ("name", "bad", "error", "text"),
    [
        ("values", torch.ones(2, 127, dtype=torch.bfloat16), ValueError, r"values: shape \[2, 127\]"),
        ("values", torch.ones(128, 2, dtype=torch.bfloat16).t(), ValueError, "values: last stride 2"),
        ("values", torch.ones(2, 128, dtype=torch.float64), TypeError, "values: dtype float64"),
        ("weight", torch.ones(127), ValueError, "weight: shape"),
        ("weight", torch.ones(128, dtype=torch.float16), TypeError, "weight: dtype float16"),
        ("cache", torch.zeros(1, 4352, dtype=torch.uint8), TypeError, "cache: Tensor given, an IndexKeyCache"),
        ("slots", torch.tensor([1]), ValueError, "slots: shape"),
        ("slots", torch.tensor([1.0, 2.0]), TypeError, "slots: dtype float32"),
        ("positions", torch.tensor([1, 2, 3]), ValueError, "positions: shape"),
        ("freqs", torch.ones(4, 32), ValueError, "freqs: shape"),
        ("freqs", torch.ones(0, 64), ValueError, "freqs: the table is empty"),
        ("eps", -1.0, ValueError, "eps: -1.0"),
        ("eps", float("nan"), ValueError, "eps: nan"),
        ("ratio", 3, ValueError, "ratio: 3 given, a power of two"),
        ("ratio", 0, ValueError, "ratio: 0 given"),
    ],
)
def test_bad_arguments_raise_and_write_nothing(angles, name, bad, error, text):
    arguments = good_arguments(torch.device("cpu"), angles)
    cache = arguments["cache"]
    arguments[name] = bad
    with pytest.raises(error, match=text):
        lk.store_index_key(**arguments)
    assert cache.payload.count_nonzero() == 0
    assert cache.scale.count_nonzero() == 0


def test_checked_mode_names_the_bad_slot_and_position(angles):
    arguments = good_arguments(torch.device("cpu"), angles)
    with lk.checked():
        with pytest.raises(ValueError, match=r"slots: 64 is past the cache's 63 \(1 pages of 64\)"):
            lk.store_index_key(**arguments | {"slots": torch.tensor([1, 64])})
        with pytest.raises(ValueError, match="positions: 512 is outside"):
            lk.store_index_key(**arguments | {"positions": torch.tensor([512, 0])})
        with pytest.raises(ValueError, match="slots: -2 is negative"):
            lk.load_index_key(arguments["cache"], torch.tensor([-2]))
        lk.store_index_key(**arguments | {"slots": torch.tensor([0, -1])})
    assert arguments["cache"].scale.count_nonzero() == 0


@pytest.mark.parametrize(
    ("payload", "scale", "layout", "page_size", "error", "text"),
    [
        (torch.zeros(2, 4351, dtype=torch.uint8), None, "fused", 64, ValueError, "pages of 4351 bytes given"),
        (torch.zeros(2, 4352, dtype=torch.uint8), None, "fused", 32, ValueError, "page_size: 32"),
        (torch.zeros(2, 8000, dtype=torch.uint8), None, "fused", 128, ValueError, "128 keys takes 8704"),
        (torch.zeros(2, 4352, dtype=torch.int8), None, "fused", 64, TypeError, "payload: dtype int8"),
        (torch.zeros(2, 4352, dtype=torch.uint8), torch.zeros(1), "fused", 64, ValueError, "scale: given"),
        (torch.zeros(4352, dtype=torch.uint8).expand(2, 4352), None, "fused", 64, ValueError, "a page stride of 0"),
        (torch.zeros(2, 4096, dtype=torch.uint8), None, "split64", 64, ValueError, "payload: shape"),
        (torch.zeros(2, 1, 4, 64, 16, dtype=torch.uint8), None, "split64", 64, TypeError, "scale: NoneType"),
        (torch.zeros(2, 1, 4, 64, 16, dtype=torch.uint8), torch.zeros(3, 1, 4, 64, dtype=torch.uint8), "split8", 64,
         ValueError, "scale: shape"),
        (torch.zeros(2, 1, 4, 64, 32, dtype=torch.uint8)[..., :16], torch.zeros(2, 1, 4, 64, dtype=torch.uint8),
         "split8", 64, ValueError, "payload: strides"),
        (torch.zeros(2, 1, 4, 64, 16, dtype=torch.uint8), torch.zeros(2, 1, 4, 64, dtype=torch.uint8), "split9", 64,
         ValueError, "'split9' is none of"),
        (torch.zeros(2, 1, 4, 64, 16, dtype=torch.uint8), torch.zeros(2, 1, 4, 64, dtype=torch.uint8), "split64", 128,
         ValueError, "page_size: 128"),
    ],
)  # fmt: skip
def test_a_cache_says_what_is_wrong_with_its_tensors(payload, scale, layout, page_size, error, text):
    with pytest.raises(error, match=text):
        lk.IndexKeyCache(payload, scale, layout, page_size)


def test_a_new_cache_is_zeroed_and_knows_its_size(form):
    layout, page_size = form
    cache = lk.new_index_key_cache(layout, 3, page_size)
    assert (cache.num_pages, cache.capacity, cache.page_size) == (3, 3 * page_size, page_size)
    assert cache.layout is lk.IndexKeyLayout(layout)
    assert sum(x.numel() for x in tensors_of(cache)) == 3 * page_size * 68
    assert all(x.count_nonzero() == 0 for x in tensors_of(cache))
    with pytest.raises(ValueError, match="num_pages: -1"):
        lk.new_index_key_cache(layout, -1, page_size)


def test_dequantize_rejects_other_shapes_and_types():
    with pytest.raises(ValueError, match="payload: shape"):
        lk.dequantize_index(torch.zeros(2, 63, dtype=torch.int8), torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ValueError, match="scale: shape"):
        lk.dequantize_index(torch.zeros(2, 64, dtype=torch.int8), torch.zeros(3, dtype=torch.int32))
    with pytest.raises(TypeError, match="scale: dtype int64"):
        lk.dequantize_index(torch.zeros(2, 64, dtype=torch.int8), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(TypeError, match="payload"):
        lk.dequantize_index(None, None)
