"""Reading rows back: every byte, slots, pages, outputs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import latentkv as lk
from tests.store import oracle
from tests.store.cases import INTS, LAYOUTS, OUTSIDE, OUTSIDE_64, Slab, finished, patterns, random_rows, slots_of


def place(slab: Slab, slots: list[int], data: np.ndarray, scale: np.ndarray) -> None:
    """Put row bytes into the buffer, by the format page's addresses."""
    form, buffer = oracle.FORMS[slab.layout], slab.buffer.cpu().numpy().copy()
    for n, slot in enumerate(slots):
        data_at, scale_at = (slab.start + at for at in form.addresses(slot, slab.page_size, slab.stride))
        buffer[data_at : data_at + form.data_bytes] = data[n]
        buffer[scale_at : scale_at + form.scale_bytes] = scale[n]
    slab.buffer.copy_(torch.from_numpy(buffer))


def random_bytes(count: int, layout: str, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    form, generator = oracle.FORMS[layout], np.random.default_rng(seed)
    data = generator.integers(0, 256, (count, form.data_bytes), dtype=np.uint8)
    return data, generator.integers(0, 256, (count, form.scale_bytes), dtype=np.uint8)


def load(slab: Slab, slots: torch.Tensor, **options: object) -> np.ndarray:
    return lk.load_kv(slab.cache, slots.to(slab.buffer.device), **slab.form, **options).float().cpu().numpy()


def every_code_with_every_scale(layout: str) -> tuple[np.ndarray, np.ndarray]:
    """Rows' bytes in which each of the 256 scales meets each of the codes."""
    form = oracle.FORMS[layout]
    if form.element == "bf16":
        return patterns(torch.bfloat16).view(128, 512).view(torch.uint8).numpy(), np.zeros((128, 0), np.uint8)
    width, codes = 512 - form.tail, 256 if form.element == "e4m3" else 16
    code, scale = np.tile(np.arange(codes, dtype=np.uint8), 256), np.repeat(np.arange(256, dtype=np.uint8), codes)
    if codes < form.group:  # every code twice in a group
        code, scale = np.tile(np.arange(codes, dtype=np.uint8), 512), np.repeat(np.arange(256, dtype=np.uint8), 32)
    code = np.pad(code, (0, -len(code) % width)).reshape(-1, width)
    scale = np.pad(scale[:: form.group], (0, len(code) * width // form.group - len(scale) // form.group))
    scale = np.pad(scale.reshape(len(code), -1), ((0, 0), (0, form.scale_bytes - width // form.group)))
    data = code[:, 0::2] | (code[:, 1::2] << 4) if codes == 16 else code
    tail = np.zeros((len(code), form.data_bytes - data.shape[1]), np.uint8)
    tail[:, 1::2] = np.arange(tail.shape[1] // 2, dtype=np.uint8)
    return np.concatenate((data, tail), 1), scale


@pytest.mark.parametrize("layout", ["v4", "v41", "v41_fp4", "v41_mxfp4", "bf16"])
def test_every_code_with_every_scale_reads_as_the_oracle_decodes_it(backend, layout):
    data, scale = every_code_with_every_scale(layout)
    slab = Slab.new(layout, 16, backend.device, pages=-(-len(data) // 16))
    place(slab, list(range(len(data))), data, scale)
    got, want = load(slab, torch.arange(len(data))), oracle.decode(data, scale, layout)
    assert np.array_equal(got, want, equal_nan=True)
    numbers = ~np.isnan(want)
    assert np.array_equal(np.signbit(got[numbers]), np.signbit(want[numbers]))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_size", [1, 4, 64])
def test_any_bytes_at_any_place_are_read(backend, layout, page_size):
    slab = Slab.new(layout, page_size, backend.device, pages=7, gap=40)
    slots = slots_of(6, slab.capacity, 3, torch.int64, backend.device)
    data, scale = random_bytes(6, layout)
    place(slab, slots.tolist(), data, scale)
    assert np.array_equal(load(slab, slots), oracle.decode(data, scale, layout), equal_nan=True)


@given(
    seed=st.integers(0, 10**6), layout=st.sampled_from(LAYOUTS), skew=st.tuples(st.integers(0, 9), st.integers(0, 9))
)
def test_slabs_of_any_alignment_are_read(backend, seed, layout, skew):
    slab = Slab.new(layout, 2, backend.device, gap=skew[0], start=skew[1])
    data, scale = random_bytes(2, layout, seed)
    place(slab, [5, 2], data, scale)
    assert np.array_equal(load(slab, torch.tensor([5, 2])), oracle.decode(data, scale, layout), equal_nan=True)


@pytest.mark.parametrize("layout", ["v4", "v41_fp4", "v41_interleaved", "bf16"])
@pytest.mark.parametrize(("dtype", "outside"), [(torch.int32, OUTSIDE), (torch.int64, OUTSIDE + OUTSIDE_64)])
def test_slots_outside_the_cache_read_zeros_even_where_all_bytes_are_nan(backend, layout, dtype, outside):
    slab = Slab.new(layout, 16, backend.device, pages=4)
    slab.buffer.fill_(0xFF)
    rows = random_rows(1, torch.bfloat16)
    lk.store_kv(rows.to(backend.device), slab.cache, torch.tensor([63], device=backend.device), **slab.form)
    got = load(slab, torch.tensor([*outside, 63], dtype=dtype))
    assert not np.any(got[:-1])
    assert not np.signbit(got[:-1]).any()
    assert np.array_equal(got[-1:], oracle.decode(*oracle.encode(finished(rows), layout), layout))
    assert np.isnan(load(slab, torch.tensor([62], dtype=dtype))).all()


@pytest.mark.parametrize("dtype", INTS)
def test_slots_may_repeat_and_be_strided(backend, dtype):
    slab = Slab.new("v41_fp4", 4, backend.device)
    data, scale = random_bytes(2, "v41_fp4")
    place(slab, [5, 2], data, scale)
    table = torch.full((5, 4), 3, dtype=dtype)
    table[:, 2] = torch.tensor([5, 2, 2, -1, 5])
    got = load(slab, table.to(backend.device)[:, 2])
    want = oracle.decode(data, scale, "v41_fp4")[[0, 1, 1, 0, 0]]
    want[3] = 0
    assert np.array_equal(got, want, equal_nan=True)


@pytest.mark.parametrize("first", [0, 1, 2, 8])
def test_a_given_output_is_filled_where_it_lies(backend, first):
    slab, slots = Slab.new("v41", 4, backend.device), torch.tensor([5, -1, 11])
    rows = random_rows(3, torch.bfloat16)
    lk.store_kv(rows.to(backend.device), slab.cache, slots.to(backend.device), **slab.form)
    wide = torch.full((6, 640), 7.0, dtype=torch.bfloat16, device=backend.device)
    out = wide[::2, first : first + 512]
    assert lk.load_kv(slab.cache, slots.to(backend.device), **slab.form, out=out) is out
    assert np.array_equal(out.float().cpu().numpy(), load(slab, slots))
    around = wide.clone()
    around[::2, first : first + 512] = 7.0
    assert bool((around == 7.0).all())
    assert out[1].count_nonzero() == 0


def test_an_output_of_odd_rows_is_filled(backend):
    slab, slots = Slab.new("v41_fp4", 4, backend.device), torch.tensor([5, 2])
    data, scale = random_bytes(2, "v41_fp4")
    place(slab, [5, 2], data, scale)
    out = torch.zeros(2, 513, dtype=torch.bfloat16, device=backend.device)[:, 1:]
    lk.load_kv(slab.cache, slots.to(backend.device), **slab.form, out=out)
    assert np.array_equal(out.float().cpu().numpy(), oracle.decode(data, scale, "v41_fp4"), equal_nan=True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_whole_pages_read_in_order(backend, layout):
    slab = Slab.new(layout, 4, backend.device, gap=44)
    data, scale = random_bytes(12, layout)
    place(slab, list(range(12)), data, scale)
    pages = lk.load_kv_pages(slab.cache, **slab.form)
    assert pages.shape == (3, 4, 512)
    assert pages.dtype == torch.bfloat16
    want = oracle.decode(data, scale, layout)
    assert np.array_equal(pages.flatten(0, 1).float().cpu().numpy(), want, equal_nan=True)


def test_no_slots_and_no_pages_read_as_nothing(backend):
    device, form = backend.device, {"layout": "v41", "page_size": 16}
    empty = lk.new_kv_cache("v41", 0, 16, device=device)
    assert lk.load_kv(empty, torch.zeros(0, dtype=torch.int32, device=device), **form).shape == (0, 512)
    assert lk.load_kv_pages(empty, **form).shape == (0, 16, 512)
    out = torch.ones(3, 512, dtype=torch.bfloat16, device=device)
    lk.load_kv(empty, torch.tensor([0, 1, -1], device=device), **form, out=out)
    assert out.count_nonzero() == 0


def test_reading_changes_no_byte(backend):
    slab = Slab.new("v4", 4, backend.device)
    data, scale = random_bytes(12, "v4")
    place(slab, list(range(12)), data, scale)
    before = slab.buffer.clone()
    load(slab, torch.arange(-1, 13))
    lk.load_kv_pages(slab.cache, **slab.form)
    assert torch.equal(slab.buffer, before)


@pytest.mark.parametrize("layout", ["v41_fp4", "v41_fp4_interleaved"])
def test_what_is_written_reads_back_as_fake_quantized(backend, layout):
    rows, slab = random_rows(6, torch.bfloat16), Slab.new(layout, 4, backend.device)
    slots = torch.tensor([0, 3, 4, 7, 8, 11])
    lk.store_kv(rows.to(backend.device), slab.cache, slots.to(backend.device), **slab.form)
    want = oracle.fake_quant(rows.float().numpy(), "latent")
    assert np.array_equal(load(slab, slots), oracle.round_to(want, "bfloat16"))


def test_bf16_rows_read_back_as_they_were(backend):
    rows, slab = random_rows(3, torch.bfloat16), Slab.new("bf16", 4, backend.device)
    slots = torch.tensor([0, 3, 11], device=backend.device)
    lk.store_kv(rows.to(backend.device), slab.cache, slots, **slab.form)
    assert torch.equal(lk.load_kv(slab.cache, slots, **slab.form).cpu().view(torch.int16), rows.view(torch.int16))
