"""Sizes, addresses and names of the layouts, against the format pages' tables and worked addresses."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from latentkv.layout import Element, IndexKeyLayout, IndexQueryLayout, KVLayout, Scale
from tests.store.oracle import FORMS

LAYOUTS = {m.name: m for m in KVLayout.members()}
PAGE_SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 1024]


# --- key-value rows ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "row", "data", "scales", "group", "groups", "tail", "unit"),
    [
        ("v4", 584, 576, 8, 64, 7, 64, 576),
        ("v41", 528, 512, 16, 32, 16, 0, 512),
        ("v41_fp4", 288, 256, 32, 16, 32, 0, 256),
        ("v41_mxfp4", 272, 256, 16, 32, 16, 0, 256),
        ("bf16", 1024, 1024, 0, 512, 0, 0, 1024),
        ("v41_interleaved", 528, 512, 16, 32, 16, 0, 512),
        ("v41_fp4_interleaved", 288, 256, 32, 16, 32, 0, 256),
    ],
)
def test_rows_have_the_documented_sizes(name, row, data, scales, group, groups, tail, unit):
    layout = LAYOUTS[name]
    assert (layout.row_bytes, layout.data_bytes, layout.scale_bytes) == (row, data, scales)
    assert (layout.group_size, layout.groups, layout.tail_values) == (group, groups, tail)
    assert layout.page_unit_bytes == unit
    assert layout.quantized_values == 512 - tail


def test_the_members_are_these_seven():
    assert list(LAYOUTS) == list(FORMS)


@pytest.mark.parametrize(
    ("name", "element", "scale", "pair_bytes", "payload"),
    [
        ("v4", Element.E4M3, Scale.UE8M0, 2, 448),
        ("v41", Element.E4M3, Scale.UE8M0, 2, 512),
        ("v41_fp4", Element.E2M1, Scale.E4M3, 1, 256),
        ("v41_mxfp4", Element.E2M1, Scale.UE8M0, 1, 256),
        ("bf16", Element.BF16, Scale.NONE, 4, 1024),
    ],
)
def test_rows_have_the_documented_numbers(name, element, scale, pair_bytes, payload):
    layout = LAYOUTS[name]
    assert (layout.element, layout.scale) == (element, scale)
    assert (layout.pair_bytes, layout.payload_bytes) == (pair_bytes, payload)


@pytest.mark.parametrize(
    ("name", "page_size", "size"),
    [
        ("v4", 64, 37440),
        ("v4", 1, 1152),
        ("v4", 256, 149760),
        ("v41", 256, 135168),
        ("v41", 1, 1024),
        ("v41", 16, 8704),
        ("v41", 32, 16896),
        ("v41_fp4", 64, 18432),
        ("v41_fp4", 4, 1280),
        ("v41_mxfp4", 1, 512),
        ("bf16", 64, 65536),
        ("v41_interleaved", 1, 528),
        ("v41_interleaved", 64, 33792),
        ("v41_fp4_interleaved", 2, 576),
    ],
)
def test_pages_have_the_documented_sizes(name, page_size, size):
    assert LAYOUTS[name].page_bytes(page_size) == size


@pytest.mark.parametrize(
    ("name", "page_size", "slot", "data", "scale"),
    [
        ("v41", 256, 300, 157696, 266944),
        ("v41_fp4", 64, 65, 18688, 34848),
        ("v4", 64, 63, 63 * 576, 64 * 576 + 63 * 8),
        ("v4", 64, 64, 37440, 37440 + 36864),
        ("v41_interleaved", 256, 300, 135168 + 44 * 528, 135168 + 44 * 528 + 512),
        ("v41_fp4_interleaved", 64, 65, 18432 + 288, 18432 + 288 + 256),
        ("bf16", 16, 17, 17 * 1024, 32768),
    ],
)
def test_slots_lie_at_the_worked_addresses(name, page_size, slot, data, scale):
    assert LAYOUTS[name].data_offset(slot, page_size) == data
    assert LAYOUTS[name].scale_offset(slot, page_size) == scale


@given(
    name=st.sampled_from(list(LAYOUTS)),
    page_size=st.sampled_from(PAGE_SIZES),
    slot=st.integers(0, 2**40),
    pad=st.integers(0, 4096),
)
def test_any_slot_lies_where_the_formula_says_also_past_two_to_the_32(name, page_size, slot, pad):
    layout, form = LAYOUTS[name], FORMS[name]
    stride = form.page_bytes(page_size) + pad
    assert layout.page_bytes(page_size) == form.page_bytes(page_size)
    data, scale = form.addresses(slot, page_size, stride)
    assert layout.data_offset(slot, page_size, stride) == data
    assert layout.scale_offset(slot, page_size, stride) == scale


@pytest.mark.parametrize("name", list(LAYOUTS))
@pytest.mark.parametrize("page_size", [1, 2, 64, 256])
def test_rows_of_a_page_neither_overlap_nor_leave_it(name, page_size):
    layout = LAYOUTS[name]
    spans = []
    for offset in range(page_size):
        for start, size in (
            (layout.data_in_page(offset, page_size), layout.data_bytes),
            (layout.scale_in_page(offset, page_size), layout.scale_bytes),
        ):
            spans.append((start, start + size))
    spans.sort()
    assert spans[0][0] == 0
    assert spans[-1][1] <= layout.page_bytes(page_size) < spans[-1][1] + layout.page_unit_bytes
    assert all(a[1] <= b[0] for a, b in pairwise(spans))


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_addresses_are_affine_in_the_offset(name):
    """Kernels take a base and a step."""
    layout = LAYOUTS[name]
    for at in (layout.data_in_page, layout.scale_in_page):
        base, step = at(0, 64), at(1, 64) - at(0, 64)
        assert [at(o, 64) for o in range(64)] == [base + o * step for o in range(64)]


@pytest.mark.parametrize(("name", "text"), [("v41", "V41"), ("v41_fp4", " v41-FP4 "), ("v41_fp4", "v41.fp4")])
def test_names_are_read_leniently(name, text):
    assert KVLayout.parse(text) is LAYOUTS[name]


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_a_name_and_a_layout_read_back_as_the_layout(name):
    layout = LAYOUTS[name]
    assert str(layout) == layout.name == name
    assert KVLayout.parse(name) == layout
    assert KVLayout.parse(layout) is layout
    assert KVLayout.parse(name.replace("_", " ")) == layout


@pytest.mark.parametrize("name", ["", "v5", "fp8", "v4_interleaved", "v41_interleaved_interleaved", 584, None])
def test_unknown_names_are_refused_with_the_known_ones(name):
    with pytest.raises(ValueError, match=r"layout: .* is none of v4, v41, v41_fp4, v41_mxfp4, bf16, v41_i"):
        KVLayout.parse(name)


def test_two_layouts_have_an_interleaved_form():
    for name in ("v41", "v41_fp4"):
        layout = LAYOUTS[name]
        assert layout.interleaved == LAYOUTS[name + "_interleaved"]
        assert layout.interleaved.interleaved == layout.interleaved
        assert layout.interleaved.split == layout == layout.split
        assert layout.interleaved != layout
    for name in ("v4", "v41_mxfp4", "bf16"):
        message = f"{name} has no interleaved form; v41, v41_fp4 have"
        with pytest.raises(NotImplementedError, match=message):
            _ = LAYOUTS[name].interleaved


def test_layouts_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        KVLayout.V41.group_size = 64  # type: ignore[misc]


def test_layouts_are_usable_as_keys():
    assert {KVLayout.V41: 1, KVLayout.V41.interleaved: 2}[KVLayout.parse("v41 interleaved")] == 2


def test_readers_pair_equal_layouts_and_v41_with_its_fp4():
    pairs = {(a, b) for a, x in LAYOUTS.items() for b, y in LAYOUTS.items() if x.pairs_with(y)}
    mixed = {("v41", "v41_fp4"), ("v41_interleaved", "v41_fp4_interleaved")}
    assert pairs == {(n, n) for n in LAYOUTS} | mixed | {(b, a) for a, b in mixed}


@pytest.mark.parametrize("page_size", [0, -1, -64, 3, 65, 192])
def test_page_sizes_that_are_no_power_of_two_are_refused(page_size):
    for call in (KVLayout.V41.page_bytes, lambda p: KVLayout.V41.data_offset(0, p)):
        with pytest.raises(ValueError, match=f"page_size: {page_size} is not a power of two"):
            call(page_size)


def test_negative_slots_and_short_strides_are_refused():
    with pytest.raises(ValueError, match="slot: -1 is negative"):
        KVLayout.V41.data_offset(-1, 64)
    with pytest.raises(ValueError, match="page_stride: 18431 is below the 18432 bytes of a page of 64 v41_fp4 rows"):
        KVLayout.V41_FP4.scale_offset(0, 64, 18431)


# --- index keys and queries -------------------------------------------------------------------------------------------

INDEX_FORMS = [(k, p) for k in IndexKeyLayout for p in k.page_sizes]


@pytest.mark.parametrize(("layout", "page_size"), INDEX_FORMS)
def test_index_rows_fill_their_page_without_overlap(layout, page_size):
    payload = [layout.payload_in_page(o, d, page_size) for o in range(page_size) for d in range(0, 128, 2)]
    scales = [layout.scale_in_page(o, g, page_size) for o in range(page_size) for g in range(4)]
    assert layout.page_bytes(page_size) == page_size * 68
    if layout is not IndexKeyLayout.FUSED:
        assert sorted(payload) == list(range(page_size * 64))
        assert sorted(scales) == list(range(page_size * 4))
    else:
        assert sorted(payload + scales) == list(range(page_size * 68))


@pytest.mark.parametrize(("layout", "page_size"), INDEX_FORMS)
def test_the_two_values_of_a_pair_share_a_byte(layout, page_size):
    for d in range(0, 128, 2):
        assert layout.payload_in_page(5, d, page_size) == layout.payload_in_page(5, d + 1, page_size)


@pytest.mark.parametrize("heads", [16, 64])
def test_query_scales_of_a_token_fill_their_bytes(heads):
    packed = [IndexQueryLayout.PACKED.scale_in_token(h, g) for h in range(heads) for g in range(4)]
    assert packed == list(range(4 * heads))
    flydsl = {IndexQueryLayout.FLYDSL.scale_in_token(h, g) for h in range(64) for g in range(4)}
    assert flydsl == set(range(256))


def test_index_layouts_are_parsed_and_refused_by_name():
    assert IndexKeyLayout.parse(" SPLIT8 ") is IndexKeyLayout.SPLIT8
    assert IndexKeyLayout.parse(IndexKeyLayout.FUSED) is IndexKeyLayout.FUSED
    assert IndexQueryLayout.parse("FlyDSL") is IndexQueryLayout.FLYDSL
    with pytest.raises(ValueError, match="layout: 'split16' is none of fused, split64, split8"):
        IndexKeyLayout.parse("split16")
    with pytest.raises(ValueError, match="layout: 'fused' is none of packed, flydsl"):
        IndexQueryLayout.parse("fused")


@pytest.mark.parametrize(("layout", "page_size"), [(IndexKeyLayout.SPLIT64, 128), (IndexKeyLayout.FUSED, 32)])
def test_index_page_sizes_that_a_layout_lacks_are_refused(layout, page_size):
    for call in (layout.page_bytes, lambda p: layout.payload_in_page(0, 0, p), lambda p: layout.scale_in_page(0, 0, p)):
        with pytest.raises(ValueError, match=f"page_size: {page_size} is none of"):
            call(page_size)
