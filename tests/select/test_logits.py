"""Index logits: the bit contract, visibility, pages, layouts, independence."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import latentkv as lk

F32 = np.float32
FORMS = [("fused", 64), ("fused", 128), ("split64", 64), ("split8", 64)]
IDENTITY = torch.tensor([1.0, 0.0]).repeat(32).unsqueeze(0)


@dataclass
class Scene:
    """Sequences whose keys lie on shuffled pages, and packed queries."""

    cache: lk.IndexKeyCache
    table: Tensor
    query: tuple[Tensor, Tensor]
    weights: Tensor
    queries: np.ndarray  # what the bytes decode to
    keys: np.ndarray  # [B, W * P, 128]


def scene(
    device: torch.device,
    *,
    batches: int = 2,
    pages: int = 2,
    rows: int = 4,
    heads: int = 16,
    form: tuple[str, int] = ("fused", 64),
    query_layout: str = "packed",
    weights_dtype: torch.dtype = torch.bfloat16,
    spread: int = 8,
    seed: int = 0,
) -> Scene:
    """`spread`: groups differ in size by up to 2^spread, so that the order of roundings shows."""
    layout, page_size = form
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        size = 2.0 ** torch.randint(-spread, spread + 1, (*shape, 4, 1), generator=generator)
        return (torch.randn(*shape, 4, 32, generator=generator) * size).flatten(-2).bfloat16()

    keys = random(batches * pages * page_size)
    cache = lk.new_index_key_cache(layout, batches * pages + 1, page_size, device=device)
    table = (torch.randperm(batches * pages, generator=generator) + 1).view(batches, pages).int()
    slots = (table.unsqueeze(-1) * page_size + torch.arange(page_size)).flatten()
    lk.store_index_key_plain(keys.to(device), cache, slots.to(device))
    stored = lk.dequantize_index(*lk.load_index_key(cache, slots.to(device))).cpu().numpy()
    query = random(rows, heads)
    positions = torch.zeros(rows, dtype=torch.int64, device=device)
    packed = lk.pack_index_query(query.to(device), IDENTITY.to(device), positions, layout=query_layout)
    as_packed = lk.pack_index_query(query.to(device), IDENTITY.to(device), positions, layout="packed")
    decoded = lk.dequantize_index(*as_packed).cpu().numpy().reshape(rows, heads, 128)
    weights = torch.randn(rows, heads, generator=generator).to(weights_dtype)
    return Scene(cache, table.to(device), packed, weights.to(device), decoded, stored.reshape(batches, -1, 128))


def contract(query: np.ndarray, keys: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Logits of one row by the published order of roundings: query [H, 128], keys [N, 128], weights [H]."""
    terms = []
    for head, weight in zip(query, weights, strict=True):
        groups = [
            keys[:, g : g + 32].astype(np.float64) @ head[g : g + 32].astype(np.float64) for g in range(0, 128, 32)
        ]
        g0, g1, g2, g3 = (g.astype(F32) for g in groups)
        assert all(np.array_equal(g, g.astype(F32)) for g in groups if np.isfinite(g).all())  # exact
        score = ((g0 + g1) + g2) + g3
        score = np.where(score < 0, F32(0), score)
        terms.append(score * weight)
    while len(terms) & (len(terms) - 1):
        terms.append(np.zeros(keys.shape[0], F32))
    while len(terms) > 1:
        half = len(terms) // 2
        terms = [low + high for low, high in zip(terms[:half], terms[half:], strict=True)]
    return terms[0] + F32(0)


def expected(s: Scene, lengths: list[int], width: int, batch_of: list[int]) -> np.ndarray:
    out = np.full((len(lengths), width), -np.inf, F32)
    for t, (length, batch) in enumerate(zip(lengths, batch_of, strict=True)):
        seen = max(0, min(length, width, s.keys.shape[1]))
        out[t, :seen] = contract(s.queries[t], s.keys[batch, :seen], s.weights[t].float().cpu().numpy())
    return out


def same_bits(got: Tensor, want: np.ndarray) -> bool:
    return np.array_equal(got.cpu().numpy().view(np.uint32), want.view(np.uint32))


def lengths_on(device: torch.device, lengths: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(lengths, dtype=dtype, device=device)


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("query_layout", ["packed", "flydsl"])
@pytest.mark.parametrize(("heads", "weights_dtype"), [(16, torch.bfloat16), (64, torch.float32)])
def test_logits_equal_the_contract_bit_by_bit(backend, form, query_layout, heads, weights_dtype):
    s = scene(backend.device, form=form, query_layout=query_layout, heads=heads, weights_dtype=weights_dtype)
    lengths = [form[1] * 2, 1, 65, 100]
    got = lk.index_logits(s.query, s.weights, s.cache, s.table, lengths_on(backend.device, lengths))
    assert same_bits(got, expected(s, lengths, 2 * form[1], [0, 0, 1, 1]))


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("heads", [16, 32, 64])
def test_queries_whose_groups_are_of_one_size(backend, form, heads):
    """Kernels take such a query's scales into its values; the scenes above are too wide for that."""
    s = scene(backend.device, form=form, heads=heads, spread=1, seed=2)
    lengths = [form[1] * 2, 1, 65, 100]
    got = lk.index_logits(s.query, s.weights, s.cache, s.table, lengths_on(backend.device, lengths))
    assert same_bits(got, expected(s, lengths, 2 * form[1], [0, 0, 1, 1]))


@pytest.mark.parametrize("heads", [32, 48])
def test_other_head_counts(backend, heads):
    s = scene(backend.device, heads=heads, rows=3, batches=1, query_layout="flydsl", seed=1)
    lengths = [128, 17, 64]
    got = lk.index_logits(s.query, s.weights, s.cache, s.table, lengths_on(backend.device, lengths))
    assert same_bits(got, expected(s, lengths, 128, [0, 0, 0]))


def test_the_scenes_tell_orders_apart(backend):
    """Adding groups or heads in another order changes bits, so the equalities above mean something."""
    s = scene(backend.device, rows=1, batches=1)
    weights = s.weights[0].float().cpu().numpy()
    want = contract(s.queries[0], s.keys[0], weights)
    turned = np.roll(s.queries[0].reshape(16, 4, 32), 1, 1).reshape(16, 128)
    keys = np.roll(s.keys[0].reshape(-1, 4, 32), 1, 1).reshape(-1, 128)
    assert not np.array_equal(contract(turned, keys, weights), want)
    swapped = [0, 2, 1, *range(3, 16)]
    assert not np.array_equal(contract(s.queries[0][swapped], s.keys[0], weights[swapped]), want)


@given(
    seed=st.integers(0, 10**6),
    spread=st.integers(0, 10),
    lengths=st.lists(st.integers(-2, 140), min_size=3, max_size=3),
)
def test_logits_are_near_the_real_sum(backend, seed, spread, lengths):
    s = scene(backend.device, rows=3, batches=1, seed=seed, spread=spread)
    got = lk.index_logits(s.query, s.weights, s.cache, s.table, lengths_on(backend.device, lengths)).cpu().numpy()
    for t, length in enumerate(lengths):
        seen = max(0, min(length, 128))
        scores = np.maximum(s.queries[t].astype(np.float64) @ s.keys[0, :seen].T.astype(np.float64), 0)
        weights = s.weights[t].double().cpu().numpy()
        size = np.abs(s.queries[t]).astype(np.float64) @ np.abs(s.keys[0, :seen]).T.astype(np.float64)
        assert (np.abs(got[t, :seen] - weights @ scores) <= 24 * 2.0**-24 * (np.abs(weights) @ size)).all()
        assert (got[t, seen:] == -np.inf).all()


def test_no_logit_is_negative_zero(backend):
    s = scene(backend.device, rows=2, batches=1)
    s.cache.payload.zero_()
    weights = -s.weights.abs()
    got = lk.index_logits(s.query, weights, s.cache, s.table, lengths_on(backend.device, [128, 128]))
    assert (got.view(torch.int32) == 0).all()


def test_a_key_with_a_nan_group_has_a_nan_logit_in_every_row(backend):
    s = scene(backend.device, rows=2, batches=1)
    clean = lk.index_logits(s.query, s.weights, s.cache, s.table, lengths_on(backend.device, [128, 70]))
    bad = torch.ones(1, 128, device=backend.device)
    bad[0, 77] = torch.inf
    slot = s.table[0, 1].long() * 64 + 5
    lk.store_index_key_plain(bad, s.cache, slot.view(1))
    got = lk.index_logits(s.query, s.weights, s.cache, s.table, lengths_on(backend.device, [128, 70]))
    assert got[:, 69].isnan().all()
    got[:, 69] = clean[:, 69]
    assert torch.equal(got, clean)


def test_a_query_with_a_nan_group_has_nan_logits(backend):
    s = scene(backend.device, rows=2, batches=1, query_layout="flydsl")
    s.query[1][1, 0, 3, 4, 0] = 255  # row 1, group 3 of head 4
    got = lk.index_logits(s.query, s.weights, s.cache, s.table, lengths_on(backend.device, [100, 100]))
    assert not got[0].isnan().any()
    assert got[1, :100].isnan().all()
    assert (got[1, 100:] == -torch.inf).all()


# --- visibility and pages ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_lengths_are_clamped_to_what_exists(backend, dtype):
    s = scene(backend.device, rows=4, batches=1)
    lengths = [0, -7, 2**31 - 1, 129]
    got = lk.index_logits(s.query, s.weights, s.cache, s.table, lengths_on(backend.device, lengths, dtype))
    assert same_bits(got, expected(s, lengths, 128, [0] * 4))


@pytest.mark.parametrize("max_len", [0, 1, 63, 64, 100, 300])
def test_max_len_sets_the_columns(backend, max_len):
    s = scene(backend.device, rows=2, batches=1)
    got = lk.index_logits(s.query, s.weights, s.cache, s.table, lengths_on(backend.device, [128, 40]), max_len=max_len)
    assert got.shape == (2, max_len)
    assert same_bits(got, expected(s, [128, 40], max_len, [0, 0]))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_page_table_entries_past_the_length_are_never_looked_at(backend, form):
    s = scene(backend.device, form=form, rows=2, batches=1, pages=3)
    lengths = [form[1], form[1] + 1]
    wild = s.table.clone()
    wild[0, 2] = 2**31 - 1
    got = lk.index_logits(s.query, s.weights, s.cache, wild, lengths_on(backend.device, lengths))
    wild[0, 2] = -(2**31)
    again = lk.index_logits(s.query, s.weights, s.cache, wild, lengths_on(backend.device, lengths))
    assert same_bits(got, expected(s, lengths, 3 * form[1], [0, 0]))
    assert torch.equal(got, again)


def test_masked_keys_of_a_page_may_hold_any_bytes(backend):
    s = scene(backend.device, rows=2, batches=1)
    lengths = lengths_on(backend.device, [70, 3])
    clean = lk.index_logits(s.query, s.weights, s.cache, s.table, lengths)
    for byte in (0xFF, 0x7F):
        s.cache.payload[0] = byte  # a page that no sequence owns
        pages = s.cache.payload[s.table[0, 1].long()]
        pages[6 * 64 : 4096] = byte
        pages[4096 + 6 * 4 :] = byte
        assert torch.equal(lk.index_logits(s.query, s.weights, s.cache, s.table, lengths), clean)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_page_outside_the_cache_reads_as_zero_keys(backend, form):
    s = scene(backend.device, form=form, rows=2, batches=1)
    s.keys[0, : form[1]] = 0
    s.cache.payload[0] = 0xFF  # the page that an implementation may read instead
    if s.cache.scale is not None:
        s.cache.scale[0] = 0xFF
    for page in (-1, s.cache.num_pages, 2**31 - 1, -(2**31)):
        table = s.table.clone()
        table[0, 0] = page
        got = lk.index_logits(s.query, s.weights, s.cache, table, lengths_on(backend.device, [form[1] * 2, 9]))
        assert same_bits(got, expected(s, [form[1] * 2, 9], form[1] * 2, [0, 0]))


def test_a_cache_without_pages_reads_as_zero_keys(backend):
    s = scene(backend.device, rows=2, batches=1)
    for layout in ("fused", "split64"):
        empty = lk.new_index_key_cache(layout, 0, device=backend.device)
        got = lk.index_logits(s.query, s.weights, empty, s.table, lengths_on(backend.device, [5, 0]))
        assert (got[0, :5].view(torch.int32) == 0).all()
        assert (got[0, 5:] == -torch.inf).all()
        assert (got[1] == -torch.inf).all()


def test_rows_name_their_page_table_row(backend):
    s = scene(backend.device, rows=5, batches=3)
    batch_of, lengths = [2, 0, 2, 1, 0], [100, 128, 3, 0, 66]
    for dtype in (torch.int32, torch.int64):
        got = lk.index_logits(
            s.query, s.weights, s.cache, s.table, lengths_on(backend.device, lengths),
            row_to_batch=torch.tensor(batch_of, dtype=dtype, device=backend.device),
        )  # fmt: skip
        assert same_bits(got, expected(s, lengths, 128, batch_of))


def test_a_row_of_no_sequence_sees_no_key(backend):
    s = scene(backend.device, rows=4, batches=1)
    batch_of = torch.tensor([-1, 0, 1, 2**31 - 1], dtype=torch.int32, device=backend.device)
    got = lk.index_logits(
        s.query, s.weights, s.cache, s.table, lengths_on(backend.device, [128] * 4), row_to_batch=batch_of
    )
    assert same_bits(got[1:2], expected(s, [0, 128], 128, [0, 0])[1:2])
    assert (got[[0, 2, 3]] == -torch.inf).all()


@pytest.mark.parametrize("fill", [True, False])
def test_columns_past_the_length_are_filled_or_left_alone(backend, fill):
    s = scene(backend.device, rows=2, batches=1)
    buffer = torch.full((2, 200), 123.0, device=backend.device)
    out = buffer[:, 8:136]  # strided rows
    got = lk.index_logits(
        s.query, s.weights, s.cache, s.table, lengths_on(backend.device, [5, 0]), fill=fill, max_len=128, out=out
    )
    assert got is out
    want = expected(s, [5, 0], 128, [0, 0])
    assert same_bits(out, want if fill else np.where(np.isinf(want), F32(123), want))
    assert (buffer[:, :8] == 123).all()
    assert (buffer[:, 136:] == 123).all()


@pytest.mark.parametrize("layout", ["fused", "split64", "split8"])
def test_pages_of_a_slab(backend, layout):
    s = scene(backend.device, rows=2, batches=1, form=(layout, 64))
    pages = s.cache.num_pages

    def apart(x: Tensor) -> Tensor:
        size = x[0].numel()
        slab = torch.full((pages, size + 80), 0xFF, dtype=torch.uint8, device=backend.device)
        slab[:, 16 : 16 + size] = x.flatten(1)
        return slab[:, 16 : 16 + size].unflatten(1, x.shape[1:])

    scale = apart(s.cache.scale) if s.cache.scale is not None else None
    cache = lk.IndexKeyCache(apart(s.cache.payload), scale, s.cache.layout)
    got = lk.index_logits(s.query, s.weights, cache, s.table, lengths_on(backend.device, [128, 77]))
    assert same_bits(got, expected(s, [128, 77], 128, [0, 0]))


def test_strided_weights_tables_and_lengths(backend):
    s = scene(backend.device, rows=4, batches=2)
    weights = torch.zeros(4, 40, dtype=torch.bfloat16, device=backend.device)
    weights[:, 3:19] = s.weights
    table = torch.full((2, 9), 10**6, dtype=torch.int32, device=backend.device)
    table[:, 1:3] = s.table
    lengths = torch.tensor([[9, 1], [128, 1], [64, 1], [65, 1]], device=backend.device)[:, 0]
    got = lk.index_logits(s.query, weights[:, 3:19], s.cache, table[:, 1:3], lengths)
    assert same_bits(got, expected(s, [9, 128, 64, 65], 128, [0, 0, 1, 1]))


# --- independence -----------------------------------------------------------------------------------------------------


def test_a_row_alone_has_the_bits_it_has_in_a_batch(backend):
    s = scene(backend.device, rows=6, batches=3, heads=32)
    lengths = [128, 1, 77, 0, 64, 127]
    whole = lk.index_logits(s.query, s.weights, s.cache, s.table, lengths_on(backend.device, lengths))
    for t in range(6):
        query = tuple(x.unflatten(0, (6, 32))[t] for x in s.query)
        alone = lk.index_logits(
            query,
            s.weights[t : t + 1],
            s.cache,
            s.table[t // 2 : t // 2 + 1],
            lengths_on(backend.device, lengths[t : t + 1]),
        )
        assert torch.equal(alone[0], whole[t])


@pytest.mark.parametrize("workers", [4, 7, 64])
def test_a_schedule_never_changes_a_logit(backend, workers):
    s = scene(backend.device, rows=4, batches=2, pages=6, heads=16)
    lengths = lengths_on(backend.device, [384, 0, 257, 300])
    plain = lk.index_logits(s.query, s.weights, s.cache, s.table, lengths)
    decode = lk.decode_schedule(lengths, workers=workers, max_len=384)
    batch_of = torch.tensor([0, 0, 1, 1], device=backend.device)
    prefill = lk.prefill_schedule(lengths, workers=workers, max_len=384, row_to_batch=batch_of)
    for schedule in (decode, prefill):
        got = lk.index_logits(s.query, s.weights, s.cache, s.table, lengths, schedule=schedule)
        assert torch.equal(got, plain)


def test_more_keys_than_a_chunk_of_any_path(backend):
    """Rows of one sequence that cross every internal chunk, against the same keys read in pieces."""
    s = scene(backend.device, rows=2, batches=1, pages=80)
    lengths = [5120, 4097]
    got = lk.index_logits(s.query, s.weights, s.cache, s.table, lengths_on(backend.device, lengths))
    assert same_bits(got, expected(s, lengths, 5120, [0, 0]))


@pytest.mark.parametrize(("batches", "rows", "named"), [(3, 6, False), (2, 10, False), (1, 7, False), (3, 7, True)])
def test_rows_of_several_launches(backend, monkeypatch, batches, rows, named):
    """More rows than a grid's axis holds, in small: whole sequences a launch, parts of one, rows that name theirs."""
    monkeypatch.setattr(importlib.import_module("latentkv.kernels.select"), "ROWS_A_LAUNCH", 4)
    for query_layout in ("packed", "flydsl"):
        s = scene(backend.device, batches=batches, rows=rows, query_layout=query_layout)
        lengths = [(37 * t) % 129 for t in range(rows)]
        batch_of = [t % batches if named else t // (rows // batches) for t in range(rows)]
        names = torch.tensor(batch_of, device=backend.device) if named else None
        lengths_here = lengths_on(backend.device, lengths)
        got = lk.index_logits(s.query, s.weights, s.cache, s.table, lengths_here, row_to_batch=names)
        assert same_bits(got, expected(s, lengths, 128, batch_of))


def test_no_rows_and_no_columns(backend):
    s = scene(backend.device, rows=2, batches=1)
    none = tuple(x[:0] for x in s.query)
    got = lk.index_logits(none, s.weights[:0], s.cache, s.table, lengths_on(backend.device, []))
    assert got.shape == (0, 128)
    got = lk.index_logits(s.query, s.weights, s.cache, s.table[:, :0], lengths_on(backend.device, [9, 9]))
    assert got.shape == (2, 0)


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"query": torch.zeros(32, 64, dtype=torch.int8)}, TypeError, "query: a pair"),
        ({"query": (torch.zeros(31, 64, dtype=torch.int8), torch.zeros(32, dtype=torch.int32))}, ValueError, "payload"),
        ({"query": (torch.zeros(32, 64, dtype=torch.int8), torch.zeros(31, dtype=torch.int32))}, ValueError, "scale"),
        (
            {"query": (torch.zeros(2, 16, 64, dtype=torch.int8), torch.zeros(2, 64))},
            TypeError,
            "query scale: dtype",
        ),
        ({"weights": torch.zeros(2, 16, dtype=torch.float16)}, TypeError, "weights: dtype float16"),
        ({"weights": torch.zeros(2, 65)}, ValueError, "65 heads given"),
        ({"cache": torch.zeros(1, 4352, dtype=torch.uint8)}, TypeError, "an IndexKeyCache"),
        ({"page_table": torch.zeros(1, 2, dtype=torch.int64)}, TypeError, "page_table: dtype int64"),
        ({"page_table": torch.zeros(3, 2, dtype=torch.int32)}, ValueError, "page_table: 3 rows given"),
        ({"lengths": torch.zeros(3, dtype=torch.int32)}, ValueError, "lengths: shape"),
        ({"row_to_batch": torch.zeros(3, dtype=torch.int32)}, ValueError, "row_to_batch: shape"),
        ({"schedule": torch.zeros(3, 5, dtype=torch.int32)}, ValueError, "schedule: shape"),
        ({"schedule": torch.zeros(3, 4)}, TypeError, "schedule: dtype"),
        ({"out": torch.zeros(2, 127)}, ValueError, "out: shape"),
        ({"max_len": -1}, ValueError, "max_len: -1"),
    ],
)
def test_bad_arguments_raise(change, error, text):
    s = scene(torch.device("cpu"), rows=2, batches=1)
    arguments = {
        "query": s.query, "weights": s.weights, "cache": s.cache, "page_table": s.table,
        "lengths": torch.tensor([1, 2], dtype=torch.int32),
    }  # fmt: skip
    with pytest.raises(error, match=text):
        lk.index_logits(**arguments | change)


def test_checked_mode_names_a_page_outside_the_cache():
    s = scene(torch.device("cpu"), rows=2, batches=1)
    table = s.table.clone()
    table[0, 1] = 99
    with lk.checked():
        lk.index_logits(s.query, s.weights, s.cache, table, torch.tensor([64, 10]))
        with pytest.raises(ValueError, match=r"page_table: 99 is outside the cache's pages 0\.\.2"):
            lk.index_logits(s.query, s.weights, s.cache, table, torch.tensor([65, 10]))
        got = lk.index_logits(s.query, s.weights, s.cache, table, torch.tensor([65, 10]), max_len=64)
    assert same_bits(got, expected(s, [64, 10], 64, [0, 0]))
