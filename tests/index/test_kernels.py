"""What the kernels promise beyond the ops: tiles, alignment, every table of codes, non-finite values, far splits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import latentkv as lk
from latentkv import numerics
from latentkv.reference import index as reference
from tests.index.sweeps import IDENTITY, near_ties, value_sweep

LAYOUTS = ["fused", "split64", "split8"]
NAN, INF = math.nan, math.inf


def packed(backend, rows: Tensor, heads: int = 64) -> tuple[Tensor, Tensor]:
    """Rows `[n, 128]` as unrotated query heads: payload and scale words."""
    count = len(rows)
    query = torch.nn.functional.pad(rows, (0, 0, 0, -count % heads)).view(-1, heads, 128).to(backend.device)
    positions = torch.zeros(len(query), dtype=torch.int32, device=backend.device)
    payload, words = lk.pack_index_query(query, IDENTITY.to(backend.device), positions, layout="packed")
    return payload[:count].cpu(), words[:count].cpu()


def assert_equal(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    for x, y in zip(got, want, strict=True):
        assert x.shape == y.shape
        assert torch.equal(x, y)


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "exponents", [range(4), range(103, 123), range(126, 130), range(250, 254)], ids=lambda r: f"{r.start}-{r.stop - 1}"
)
def test_both_stages_in_one_step_are_both_stages(backend, oracle, exponents):
    """Every kind of largest value: where either exponent steps, at the floor and under it, subnormal and huge."""
    rows = value_sweep(exponents, step=1 if backend.name != "interpreter" else 17)
    assert_equal(packed(backend, rows), oracle.bytes_of(oracle.stage1(rows.float().numpy())))


def test_a_group_that_the_first_stage_rounds_to_infinity_is_poisoned(backend):
    rows = torch.zeros(5, 128)
    rows[:, 40] = torch.tensor([1.5, 1.7421875, 1.75, 1.9921875, -1.75])
    rows[:, 41] = 0.5
    rows = (rows * 2.0**127).bfloat16()
    payload, words = packed(backend, rows)
    assert ((words >> 8) & 0xFF).tolist() == [252, 252, 255, 255, 255]
    assert payload[:, 20].tolist() == [0x47, 0x47, 0, 0, 0]
    assert_equal((payload, words), numerics.quantize_index(numerics.fake_quant_index(rows.float())))


def test_the_second_stage_moves_the_exponent_by_every_distance(backend):
    """A largest value that became 3 takes one away; under the floor up to 113 are added, and the codes run out at 5."""
    tops = torch.tensor([3.25, 6.0, *(6.0 * 2.0**-n for n in range(13, 20))])
    rows = torch.zeros(len(tops), 128).bfloat16()
    rows[:, 0], rows[:, 1] = tops, -tops
    payload, words = packed(backend, rows)
    assert (words & 0xFF).tolist() == [126, 127] + [114] * 7
    assert (payload[:, 0].view(torch.uint8) & 0xF).tolist() == [7, 7, 7, 5, 3, 2, 1, 0, 0]
    assert (payload[:, 0].view(torch.uint8) >> 4).tolist() == [15, 15, 15, 13, 11, 10, 9, 0, 0]


@given(bits=st.lists(st.integers(0, 2**16 - 1), min_size=32, max_size=32), group=st.integers(0, 3))
def test_groups_of_any_bf16_bits_are_packed_like_the_reference(backend, bits, group):
    rows = torch.randn(1, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    rows[0, 32 * group : 32 * group + 32] = torch.tensor(np.array(bits, np.uint16).view(np.int16)).view(torch.bfloat16)
    want = reference.pack_index_query(rows[None], IDENTITY, torch.zeros(1, dtype=torch.int32), "packed")
    assert_equal(packed(backend, rows, heads=1), want)


@given(
    bits=st.lists(st.integers(0, 2**32 - 1), min_size=32, max_size=32),
    layout=st.sampled_from(LAYOUTS),
    half_even=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float16]),
)
def test_plain_stores_take_any_bits(backend, bits, layout, half_even, dtype):
    rows = torch.randn(1, 128, generator=torch.Generator().manual_seed(2))
    rows[0, 64:96] = torch.from_numpy(np.array(bits, np.uint32).view(np.float32))
    rows, slot = rows.to(dtype), torch.tensor([63])
    near, far = (lk.new_index_key_cache(layout, 1, device=d) for d in ("cpu", backend.device))
    reference.store_index_key_plain(rows, near.payload, near.scale, slot, half_even, layout, 64)
    lk.store_index_key_plain(rows.to(backend.device), far, slot.to(backend.device), round_half_even=half_even)
    assert torch.equal(far.payload.cpu(), near.payload)
    assert near.scale is None or torch.equal(far.scale.cpu(), near.scale)


@pytest.mark.parametrize("half_even", [True, False])
def test_plain_stores_round_fp32_next_to_every_tie(backend, oracle, half_even):
    rows = near_ties(range(-16, 60, 3))
    cache = lk.new_index_key_cache("fused", 1, device=backend.device)
    slots = torch.arange(len(rows), device=backend.device)
    lk.store_index_key_plain(rows.to(backend.device), cache, slots, round_half_even=half_even)
    got = tuple(x.cpu() for x in lk.load_index_key(cache, slots))
    assert_equal(got, oracle.bytes_of(rows.numpy(), half_even))


def test_every_byte_under_every_exponent_is_decoded(backend):
    payload = torch.arange(256, dtype=torch.uint8).view(torch.int8).view(4, 64).repeat(64, 1)
    exponents = torch.arange(256, dtype=torch.int64).repeat_interleave(4).view(256, 4)
    words = (exponents << (8 * torch.arange(4))).sum(1)
    words = torch.where(words >= 2**31, words - 2**32, words).int()
    for word in (words, words.flip(0)):
        got = lk.dequantize_index(payload.to(backend.device), word.to(backend.device)).cpu()
        want = numerics.dequantize_index(payload, word)
        assert torch.equal(got.isnan(), want.isnan())
        assert want.isnan().any()
        assert bool(((got.view(torch.int32) == want.view(torch.int32)) | want.isnan()).all())


def test_packed_rows_of_any_shape_and_stride_are_decoded(backend):
    generator = torch.Generator().manual_seed(3)
    payload = torch.randint(-128, 128, (3, 5, 2, 64), generator=generator, dtype=torch.int8)
    words = torch.randint(0x70, 0x90, (3, 5, 2), generator=generator, dtype=torch.int32) * 0x01010101
    want = numerics.dequantize_index(payload, words)
    wide = torch.zeros(3, 5, 4, 67, dtype=torch.int8, device=backend.device)
    wide[:, :, ::2, 2:66] = payload.to(backend.device)
    for given_payload in (payload.to(backend.device), wide[:, :, ::2, 2:66]):
        for given_words in (words.to(backend.device), words.transpose(0, 2).contiguous().transpose(0, 2)):
            assert torch.equal(lk.dequantize_index(given_payload, given_words.to(backend.device)).cpu(), want)
    one = lk.dequantize_index(payload[0, 0, 0].to(backend.device), words[0, 0, 0].to(backend.device))
    assert torch.equal(one.cpu(), want[0, 0, 0])
    assert lk.dequantize_index(payload[:0].to(backend.device), words[:0].to(backend.device)).shape == (0, 5, 2, 128)


def test_random_keys_differ_in_no_more_than_the_norms_last_bf16_step(backend, angles):
    """The sum of squares has no promised order: bytes may differ where a normed value does; few do."""
    count = 256
    rows = torch.randn(count, 128, generator=torch.Generator().manual_seed(5)).bfloat16()
    weight = (1 + 0.2 * torch.randn(128, generator=torch.Generator().manual_seed(6))).bfloat16()
    slots = torch.arange(count) + 1
    near, far = (lk.new_index_key_cache("fused", 5, device=d) for d in ("cpu", backend.device))
    reference.store_index_key(rows, weight, near.payload, None, slots, slots, angles, 1e-6, 1, "fused", 64)
    given = [x.to(backend.device) for x in (rows, weight, slots, angles)]
    lk.store_index_key(given[0], given[1], far, given[2], given[2], given[3], eps=1e-6, ratio=1)
    differing = (far.payload.cpu() != near.payload).count_nonzero()
    assert differing <= (0.0002 * count * 68 if backend.is_kernel else 0)
    # a scale far above all steps between values: the normed values themselves, to their first bit
    values = [lk.dequantize_index(*lk.load_index_key(c, slots.to(c.device))).cpu() for c in (near, far)]
    largest = values[0].unflatten(1, (4, 32)).abs().amax(-1, keepdim=True).expand(-1, -1, 32).flatten(1)
    assert ((values[0] - values[1]).abs() <= largest / 3).all()


# --- values that are not finite ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("dim", [0, 63, 64, 127])
def test_a_bad_weight_poisons_one_group_of_each_key(backend, angles, summable, bad, dim):
    rows, slots = summable(3).abs() + 1, torch.tensor([1, 64, 127], device=backend.device)
    weight = torch.ones(128)
    weight[dim] = bad
    results = []
    for w in (torch.ones(128), weight):
        cache = lk.new_index_key_cache("split64", 2, device=backend.device)
        on = [x.to(backend.device) for x in (rows, w, angles)]
        lk.store_index_key(on[0], on[1], cache, slots, slots, on[2], eps=1e-20, ratio=2)
        payload, words = lk.load_index_key(cache, slots)
        results.append((payload.cpu().unflatten(1, (4, 16)), words.cpu().unsqueeze(-1).view(torch.uint8)))
    (clean_payload, clean_scale), (payload, scale) = results
    others = [g for g in range(4) if g != dim // 32]
    assert (scale[:, dim // 32] == 255).all()
    assert payload[:, dim // 32].count_nonzero() == 0
    assert torch.equal(scale[:, others], clean_scale[:, others])
    assert torch.equal(payload[:, others], clean_payload[:, others])


@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_bad_angle_poisons_the_groups_that_it_turns(backend, bad):
    """Pair 3 of the table turns values 70 and 71: group 2 of the tokens at that position, and no other."""
    table = IDENTITY.repeat(4, 1)
    table[2, 6] = bad
    query = torch.randn(4, 16, 128, generator=torch.Generator().manual_seed(8)).bfloat16()
    positions = torch.tensor([1, 2, 3, 0], device=backend.device)
    payload, words = lk.pack_index_query(query.to(backend.device), table.to(backend.device), positions, layout="packed")
    scale = words.cpu().unsqueeze(-1).view(torch.uint8).view(4, 16, 4)
    assert (scale == 255).nonzero().tolist() == [[1, h, 2] for h in range(16)]
    assert payload.cpu().view(4, 16, 4, 16)[1, :, 2].count_nonzero() == 0


# --- tiles ------------------------------------------------------------------------------------------------------------

KEY_TILES = [(1, 1), (4, 1), (16, 4)]
QUERY_TILES = [(4, 1), (16, 4), (64, 8)]


def with_tile(monkeypatch: pytest.MonkeyPatch, name: str, tile: tuple[int, int]) -> None:
    from latentkv.kernels import index

    monkeypatch.setattr(index, name, lambda *args: tile)


@pytest.mark.parametrize("layout", ["fused", "split8"])
def test_a_keys_bits_do_not_depend_on_the_tile(backend, angles, layout, monkeypatch):
    """Random rows, so that another order of the norm's sum would show."""
    if not backend.is_kernel:
        pytest.skip("no tiles")
    rows = torch.randn(9, 128, generator=torch.Generator().manual_seed(7)).to(backend.device)
    weight, table = torch.linspace(-2, 2, 128, device=backend.device), angles.to(backend.device)
    slots = torch.arange(9, device=backend.device) * 15 + 2
    found = []
    for tile in KEY_TILES:
        with_tile(monkeypatch, "key_tile", tile)
        with_tile(monkeypatch, "read_tile", tile)
        cache = lk.new_index_key_cache(layout, 2, device=backend.device)
        lk.store_index_key(rows, weight, cache, slots, slots * 3, table, eps=1e-6, ratio=2)
        read = lk.load_index_key(cache, slots)
        found.append((cache.payload, *read, lk.dequantize_index(*read)))
    for other in found[1:]:
        assert_equal(other, found[0])


@pytest.mark.parametrize(("layout", "heads"), [("packed", 5), ("flydsl", 48)])
def test_a_querys_bytes_do_not_depend_on_the_tile(backend, angles, layout, heads, monkeypatch):
    if not backend.is_kernel:
        pytest.skip("no tiles")
    query = torch.randn(2, heads, 128, generator=torch.Generator().manual_seed(7)).bfloat16().to(backend.device)
    positions, table = torch.tensor([7, 500], device=backend.device), angles.to(backend.device)
    partials = torch.randn(3, 2, heads, generator=torch.Generator().manual_seed(8)).to(backend.device)
    found = []
    for tile in QUERY_TILES:
        with_tile(monkeypatch, "query_tile", tile)
        found.append(lk.pack_index_query_weights(query, table, positions, partials, 0.3, layout=layout))
    for other in found[1:]:
        assert_equal(other, found[0])


# --- addresses --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gap", [1, 6, 4, 8192])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_may_start_at_any_byte_of_a_slab(backend, oracle, slab, summable, angles, layout, gap):
    cache, between_is_untouched = slab(layout, 3, 64, backend.device, gap)
    slots = torch.tensor([191, 64, 127, 9, 130], device=backend.device)
    values = summable(5, seed=gap)
    lk.store_index_key_plain(values.to(backend.device), cache, slots)
    got = tuple(x.cpu() for x in lk.load_index_key(cache, slots))
    assert_equal(got, oracle.bytes_of(values.float().numpy()))
    on = [x.to(backend.device) for x in (values, torch.ones(128), angles)]
    lk.store_index_key(on[0], on[1], cache, slots, slots, on[2], eps=0.0, ratio=1)
    keys = oracle.rope(oracle.norm(values.float().numpy(), np.ones(128, np.float32), 0.0), angles.numpy()[slots.cpu()])
    got = tuple(x.cpu() for x in lk.load_index_key(cache, slots))
    assert_equal(got, oracle.bytes_of(oracle.stage1(keys)))
    assert between_is_untouched()


@pytest.mark.parametrize("by", [1, 2])
def test_rows_weights_and_tables_may_start_at_any_element(backend, angles, summable, by):
    def shifted(x: Tensor) -> Tensor:
        wide = torch.zeros(*x.shape[:-1], x.shape[-1] + by, dtype=x.dtype, device=backend.device)
        wide[..., by:] = x.to(backend.device)
        return wide[..., by:]

    slots = torch.tensor([3, 60, 63], device=backend.device)
    rows, weight, table = (x.to(backend.device) for x in (summable(3), torch.linspace(1, 2, 128).bfloat16(), angles))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        caches = [lk.new_index_key_cache("split8", 1, device=backend.device) for _ in range(2)]
        lk.store_index_key(rows.to(dtype), weight, caches[0], slots, slots, table, eps=0.0, ratio=1)
        odd = shifted(rows.to(dtype)), shifted(weight), shifted(table)
        lk.store_index_key(odd[0], odd[1], caches[1], slots, slots, odd[2], eps=0.0, ratio=1)
        assert torch.equal(caches[0].payload, caches[1].payload)
        assert torch.equal(caches[0].scale, caches[1].scale)
    query = torch.randn(3, 16, 128, generator=torch.Generator().manual_seed(4)).bfloat16().to(backend.device)
    want = lk.pack_index_query(query, table, slots, layout="flydsl")
    assert_equal(lk.pack_index_query(shifted(query), shifted(table), slots, layout="flydsl"), want)


def test_every_layout_holds_the_same_codes(backend, angles):
    """The split writers and the fused one, random rows, two page sizes."""
    rows = torch.randn(60, 128, generator=torch.Generator().manual_seed(11)).bfloat16().to(backend.device)
    weight, table = torch.ones(128, device=backend.device), angles.to(backend.device)
    slots = torch.arange(60, device=backend.device) * 2 + 1
    found = []
    for layout, page_size in (("fused", 64), ("fused", 128), ("split64", 64), ("split8", 64)):
        cache = lk.new_index_key_cache(layout, 128 // page_size, page_size, device=backend.device)
        lk.store_index_key(rows, weight, cache, slots, slots, table, eps=1e-20, ratio=2)
        found.append(lk.load_index_key(cache, slots))
    for other in found[1:]:
        assert_equal(other, found[0])


def test_padded_rows_beside_others_change_nothing(backend, form, slab, summable, angles):
    """Rows of a captured batch: slot 0, wild positions, NaN values; every byte but the live row's stays."""
    layout, page_size = form
    cache, between_is_untouched = slab(layout, 2, page_size, backend.device)
    for x in (cache.payload, cache.scale):
        if x is not None:
            x.fill_(0x5A)
    rows = summable(5)
    rows[[0, 1, 3, 4]] = NAN
    slots = torch.tensor([0, 0, 2 * page_size - 1, -7, 2 * page_size], device=backend.device)
    positions = torch.tensor([2**40, -(2**40), 11, 2**62, -1], device=backend.device)
    on = [x.to(backend.device) for x in (rows, torch.ones(128), angles)]
    lk.store_index_key(on[0], on[1], cache, slots, positions, on[2], eps=1e-20, ratio=4)
    payload, words = (x.cpu() for x in lk.load_index_key(cache, torch.arange(2 * page_size, device=backend.device)))
    assert (payload[:-1] == 0x5A).all()
    assert (words[:-1] == 0x5A5A5A5A).all()
    assert (words[-1] != 0x5A5A5A5A).all()
    assert between_is_untouched()


# --- head weights -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("splits", [16, 17, 33])
def test_any_number_of_partials_is_added_left_to_right(backend, splits):
    partials = torch.randn(splits, 9, 48, generator=torch.Generator().manual_seed(splits)) * 1e4
    partials[:, 3, 5], partials[:, 4, 6] = -0.0, 0.0
    total = partials[0].clone()
    for partial in partials[1:]:
        total += partial
    want = (total.bfloat16().float() * torch.tensor(0.3)).bfloat16()
    query = torch.zeros(9, 48, 128, dtype=torch.bfloat16, device=backend.device)
    positions = torch.zeros(9, dtype=torch.int32, device=backend.device)
    given = query, IDENTITY.to(backend.device), positions, partials.to(backend.device), 0.3
    got = lk.pack_index_query_weights(*given, layout="flydsl")[2].cpu()
    assert torch.equal(got.view(torch.int16), want.view(torch.int16))
    assert want[3, 5].signbit()
