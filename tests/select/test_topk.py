"""Top-k and candidate blocks: exactness, ties, hostile rows, translation to slots."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import latentkv as lk

NAN, INF = math.nan, math.inf
HOSTILE = [0.0, -0.0, 1.0, -1.0, 1.0000001, 3e38, -3e38, 1e-45, -1e-45, INF, -INF, NAN]


def order(row: list[float], index: int) -> tuple[float, int]:
    """Sorts the best first: the larger score, then the lower index; NaN is -inf."""
    return (INF if math.isnan(row[index]) else -row[index], index)


def best(row: list[float], among: list[int], k: int) -> list[int]:
    """The k best, ascending, -1 padded."""
    kept = sorted(sorted(among, key=lambda i: order(row, i))[:k])
    return kept + [-1] * (k - len(kept))


def run(backend, rows: list[list[float]] | Tensor, lengths: list[int], k: int, **options) -> list[list[int]]:
    logits = torch.as_tensor(rows, dtype=torch.float32).to(backend.device)
    lengths_on = torch.tensor(lengths, dtype=torch.int32, device=backend.device)
    positions, slots = lk.select_topk(logits, lengths_on, k, **options)
    assert positions.dtype == slots.dtype == torch.int32
    assert positions.shape == slots.shape == (len(lengths), k)
    if "page_table" not in options:
        assert torch.equal(positions, slots)
    return positions.tolist()


@st.composite
def score_rows(draw) -> tuple[list[list[float]], list[int]]:
    """Rows drawn from few values, so that ties are everywhere."""
    width = draw(st.integers(1, 40))
    values = draw(st.lists(st.sampled_from(HOSTILE), min_size=1, max_size=5))
    rows = draw(st.lists(st.lists(st.sampled_from(values), min_size=width, max_size=width), min_size=1, max_size=4))
    return rows, draw(st.lists(st.integers(-3, width + 3), min_size=len(rows), max_size=len(rows)))


# --- top-k ------------------------------------------------------------------------------------------------------------


@given(case=score_rows(), k=st.integers(1, 45))
def test_topk_equals_a_sort(backend, case, k):
    rows, lengths = case
    want = [best(row, list(range(max(0, min(x, len(row))))), k) for row, x in zip(rows, lengths, strict=True)]
    assert run(backend, rows, lengths, k) == want


@pytest.mark.parametrize("k", [1, 16, 512, 2048])
@pytest.mark.parametrize("width", [2049, 5000])
def test_topk_of_random_rows_equals_a_sort(backend, k, width):
    logits = torch.randn(3, width, generator=torch.Generator().manual_seed(k))
    lengths = [width, width - 1, min(width, k + 1)]
    got = run(backend, logits, lengths, k)
    assert got == [best(row, list(range(x)), k) for row, x in zip(logits.tolist(), lengths, strict=True)]


def test_equal_scores_by_the_thousand_keep_the_lowest_positions(backend):
    logits = torch.full((2, 4096), 0.5)
    logits[1, 4000:] = 0.75
    assert run(backend, logits, [4096, 4096], 512) == [
        list(range(512)),
        [*range(416), *range(4000, 4096)],
    ]


def test_scores_one_bit_apart_stay_apart(backend):
    ladder = (torch.arange(3000, dtype=torch.int32) + 0x3F800000).view(torch.float32)
    shuffled = torch.randperm(3000, generator=torch.Generator().manual_seed(7))
    row = ladder[shuffled]
    want = (shuffled >= 3000 - 600).nonzero().flatten().tolist()
    assert run(backend, row[None], [3000], 600) == [want]
    assert run(backend, -row[None], [3000], 600) == [(shuffled < 600).nonzero().flatten().tolist()]


def test_negative_scores_order_by_value(backend):
    assert run(backend, [[-5.0, -1.0, -3.0, -2.0, -4.0]], [5], 2) == [[1, 3]]


def test_plus_zero_ties_with_minus_zero(backend):
    assert run(backend, [[-0.0, 0.0, -0.0, 0.0]], [4], 2) == [[0, 1]]
    assert run(backend, [[-1.0, -0.0, 0.0, -1e-45]], [4], 2) == [[1, 2]]


def test_subnormal_scores_are_ordered(backend):
    assert run(backend, [[0.0, 1e-45, 3e-45, -1e-45, 2.8e-45]], [5], 2) == [[2, 4]]


def test_nan_loses_to_everything_but_minus_infinity(backend):
    row = [NAN, -3e38, NAN, 1.0, -INF, NAN, 2.0]
    assert run(backend, [row], [7], 3) == [[1, 3, 6]]
    assert run(backend, [row], [7], 5) == [[0, 1, 2, 3, 6]]  # two of NaN, NaN, -inf, NaN: the lowest
    assert run(backend, [[-NAN] * 6], [6], 4) == [[0, 1, 2, 3]]


def test_a_short_row_is_taken_whole_whatever_its_scores(backend):
    rows = [[NAN, -INF, 1.0, INF, 9.0, 9.0]] * 4
    assert run(backend, rows, [4, 2, 1, 0], 4) == [[0, 1, 2, 3], [0, 1, -1, -1], [0, -1, -1, -1], [-1] * 4]


@pytest.mark.parametrize("poison", [INF, NAN, 3e38])
def test_columns_past_the_length_are_never_taken(backend, poison):
    logits = torch.arange(64.0).repeat(4, 1)
    lengths = [0, 3, 10, 33]
    for row, length in zip(logits, lengths, strict=True):
        row[length:] = poison
    want = [best(list(range(64)), list(range(x)), 8) for x in lengths]
    assert run(backend, logits, lengths, 8) == want


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_lengths_are_clamped_to_the_row(backend, dtype):
    logits = torch.arange(10.0, device=backend.device).repeat(4, 1)
    lengths = torch.tensor([-1, -(2**31), 11, 2**31 - 1], dtype=dtype, device=backend.device)
    positions, _ = lk.select_topk(logits, lengths, 3)
    assert positions.tolist() == [[-1, -1, -1], [-1, -1, -1], [7, 8, 9], [7, 8, 9]]
    positions, _ = lk.select_topk(logits, lengths, 20)
    assert positions[2].tolist() == [*range(10), *[-1] * 10]


def test_strided_score_rows_are_read_as_strided(backend):
    wide = torch.full((8, 300), INF, device=backend.device)
    logits = torch.randn(4, 100, generator=torch.Generator().manual_seed(1))
    wide[::2, 50:150] = logits.to(backend.device)
    lengths = torch.tensor([[100, 0], [99, 0], [50, 0], [3, 0]], device=backend.device)[:, 0]
    positions, _ = lk.select_topk(wide[::2, 50:150], lengths, 20)
    assert positions.tolist() == [
        best(row, list(range(x)), 20) for row, x in zip(logits.tolist(), lengths.tolist(), strict=True)
    ]


def test_a_row_selects_the_same_alone_and_in_a_batch(backend):
    logits = torch.randint(0, 9, (7, 777), generator=torch.Generator().manual_seed(2)).float()
    lengths = [777, 1, 0, 600, 65, 64, 700]
    whole = run(backend, logits, lengths, 64)
    assert whole == [run(backend, logits[t : t + 1], lengths[t : t + 1], 64)[0] for t in range(7)]


def test_no_rows_and_no_columns(backend):
    assert run(backend, torch.zeros(0, 9), [], 4) == []
    assert run(backend, torch.zeros(2, 0), [5, 0], 3) == [[-1] * 3] * 2


# --- slots ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [64, 128, 3])
def test_positions_become_slots_of_their_pages(backend, page_size):
    logits = torch.randn(4, 6 * page_size, generator=torch.Generator().manual_seed(3))
    table = torch.tensor([[9, 2, 7, 0, 5, 1], [3, 4, 8, 6, 11, 10]], dtype=torch.int32)
    positions, slots = lk.select_topk(
        logits.to(backend.device), torch.tensor([6 * page_size, 5, 0, 4 * page_size + 1], device=backend.device), 12,
        page_table=table.to(backend.device), page_size=page_size,
    )  # fmt: skip
    for t, (row, got) in enumerate(zip(positions.tolist(), slots.tolist(), strict=True)):
        pages = table[t // 2].tolist()
        assert got == [-1 if p < 0 else pages[p // page_size] * page_size + p % page_size for p in row]


def test_rows_name_their_page_table_row_and_strangers_have_no_slots(backend):
    table = torch.tensor([[4, 5], [6, 7]], dtype=torch.int32, device=backend.device)
    batch_of = torch.tensor([1, 0, -1, 2, 2**31 - 1], dtype=torch.int32, device=backend.device)
    logits = torch.zeros(5, 128, device=backend.device)
    lengths = torch.full((5,), 2, dtype=torch.int32, device=backend.device)
    positions, slots = lk.select_topk(logits, lengths, 3, page_table=table, row_to_batch=batch_of)
    assert positions.tolist() == [[0, 1, -1]] * 5
    assert slots.tolist() == [[384, 385, -1], [256, 257, -1], *[[-1] * 3] * 3]


def test_a_position_without_a_page_has_no_slot(backend):
    table = torch.tensor([[3, -1]], dtype=torch.int32, device=backend.device)  # two pages, the second unmapped
    logits = torch.zeros(1, 200, device=backend.device)
    logits[0, [5, 70, 130]] = 1.0
    lengths = torch.tensor([200], device=backend.device)
    positions, slots = lk.select_topk(logits, lengths, 3, page_table=table)
    assert positions.tolist() == [[5, 70, 130]]
    assert slots.tolist() == [[197, -1, -1]]
    positions, slots = lk.select_topk(logits, lengths, 3, page_table=table[:, :0])
    assert slots.tolist() == [[-1, -1, -1]]


def test_a_strided_page_table(backend):
    table = torch.full((2, 8), 10**6, dtype=torch.int32, device=backend.device)
    table[:, 2:4] = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)
    logits = torch.zeros(2, 128, device=backend.device)
    logits[:, [1, 65]] = 1.0
    _, slots = lk.select_topk(logits, torch.tensor([128, 128], device=backend.device), 2, page_table=table[:, 2:4])
    assert slots.tolist() == [[65, 129], [193, 257]]


# --- candidate blocks -------------------------------------------------------------------------------------------------


def best_blocks(row: list[float], length: int, blocks: int, size: int) -> list[int]:
    length = max(0, min(length, len(row)))
    count = -(-length // size)
    keys = [max([-INF] + [x for x in row[b * size : min((b + 1) * size, length)] if x == x]) for b in range(count)]
    if count == 0:
        return [-1] * blocks
    others = sorted(range(count - 1), key=lambda b: order(keys, b))[: blocks - 1]
    kept = [*sorted(others), count - 1]
    return kept + [-1] * (blocks - len(kept))


def run_blocks(backend, rows, lengths: list[int], blocks: int, block_size: int = 8) -> list[list[int]]:
    logits = torch.as_tensor(rows, dtype=torch.float32).to(backend.device)
    ids = lk.select_blocks(
        logits, torch.tensor(lengths, dtype=torch.int32, device=backend.device), blocks=blocks, block_size=block_size
    )
    assert ids.dtype == torch.int32
    return ids.tolist()


@given(case=score_rows(), blocks=st.integers(1, 12), size=st.sampled_from([1, 2, 4, 8]))
def test_blocks_equal_a_sort_of_their_maxima(backend, case, blocks, size):
    rows, lengths = case
    want = [best_blocks(row, x, blocks, size) for row, x in zip(rows, lengths, strict=True)]
    assert run_blocks(backend, rows, lengths, blocks, size) == want


def test_blocks_of_long_rows(backend):
    logits = torch.randn(3, 3000, generator=torch.Generator().manual_seed(4))
    lengths = [3000, 2993, 160]
    want = [best_blocks(row, x, 20, 8) for row, x in zip(logits.tolist(), lengths, strict=True)]
    assert run_blocks(backend, logits, lengths, 20) == want


def test_the_newest_block_is_kept_against_any_score(backend):
    row = [INF] * 32 + [-INF] * 8
    assert run_blocks(backend, [row], [40], 2) == [[0, 4]]
    assert run_blocks(backend, [row], [40], 1) == [[4]]
    assert run_blocks(backend, [row], [33], 3) == [[0, 1, 4]]  # the newest block holds one visible position


def test_scores_past_the_length_do_not_raise_a_block(backend):
    row = [0.0] * 8 + [1.0] * 8 + [0.5] * 8 + [9.0] * 16
    assert run_blocks(backend, [row, row], [24, 20], 2) == [[1, 2], [1, 2]]
    row = [3.0] * 8 + [0.0] * 7 + [9.0] + [0.0] * 8
    assert run_blocks(backend, [row], [15], 1) == [[1]]
    assert run_blocks(backend, [row], [17], 2) == [[1, 2]]


def test_nan_scores_do_not_raise_a_block(backend):
    row = [NAN] * 8 + [NAN, -5.0] * 4 + [-6.0] * 8 + [0.0] * 8
    assert run_blocks(backend, [row], [32], 2) == [[1, 3]]
    assert run_blocks(backend, [row], [32], 3) == [[1, 2, 3]]


def test_no_visible_position_keeps_no_block(backend):
    assert run_blocks(backend, torch.ones(3, 16), [0, -4, 1], 2) == [[-1, -1], [-1, -1], [0, -1]]
    assert run_blocks(backend, torch.ones(2, 0), [5, 0], 2) == [[-1, -1]] * 2
    assert run_blocks(backend, torch.ones(0, 16), [], 2) == []


# --- top-k in blocks --------------------------------------------------------------------------------------------------


def run_in_blocks(backend, rows, lengths, ids, k, block_size=8, **options) -> list[list[int]]:
    logits = torch.as_tensor(rows, dtype=torch.float32).to(backend.device)
    positions, slots = lk.select_topk_in_blocks(
        logits,
        torch.tensor(lengths, dtype=torch.int32, device=backend.device),
        torch.as_tensor(ids, dtype=torch.int32).to(backend.device),
        k,
        block_size=block_size,
        **options,
    )
    if "page_table" not in options:
        assert torch.equal(positions, slots)
    return positions.tolist()


@given(
    case=score_rows(),
    k=st.integers(1, 20),
    size=st.sampled_from([1, 2, 8]),
    ids=st.lists(st.integers(-2, 9), min_size=0, max_size=6),
)
def test_topk_in_blocks_equals_a_sort_of_the_kept_positions(backend, case, k, size, ids):
    """Whatever the ids: unordered, twice, negative, past the row."""
    rows, lengths = case
    want = []
    for row, length in zip(rows, lengths, strict=True):
        seen = range(max(0, min(length, len(row))))
        want.append(best(row, [i for i in seen if i // size in ids], k))
    assert run_in_blocks(backend, rows, lengths, [ids] * len(rows), k, size) == want


def test_foreign_and_repeated_ids_give_no_position_twice(backend):
    ids = [[2, 2, 2**31 - 1, -(2**31), -1, 2, 5]]
    got = run_in_blocks(backend, torch.zeros(1, 40), [20], ids, 8)
    assert got == [[16, 17, 18, 19, -1, -1, -1, -1]]


def test_two_levels_equal_one_while_every_block_is_kept(backend):
    logits = torch.randn(4, 500, generator=torch.Generator().manual_seed(5))
    lengths = [500, 497, 33, 0]
    on = torch.tensor(lengths, dtype=torch.int32, device=backend.device)
    ids = lk.select_blocks(logits.to(backend.device), on, blocks=63)
    assert run_in_blocks(backend, logits, lengths, ids, 32) == run(backend, logits, lengths, 32)


def test_two_levels_of_a_long_row(backend):
    logits = torch.randn(2, 2000, generator=torch.Generator().manual_seed(6))
    lengths = [2000, 1999]
    on = torch.tensor(lengths, dtype=torch.int32, device=backend.device)
    ids = lk.select_blocks(logits.to(backend.device), on, blocks=16)
    got = run_in_blocks(backend, logits, lengths, ids, 40)
    for t, (row, length) in enumerate(zip(logits.tolist(), lengths, strict=True)):
        kept = best_blocks(row, length, 16, 8)
        assert got[t] == best(row, [i for i in range(length) if i // 8 in kept], 40)
    table = torch.arange(32, device=backend.device).flip(0).int()[None]
    positions, slots = lk.select_topk_in_blocks(logits.to(backend.device), on, ids, 40, page_table=table)
    assert slots.tolist() == [[(31 - p // 64) * 64 + p % 64 for p in row] for row in positions.tolist()]


# --- errors and registration ------------------------------------------------------------------------------------------

ROWS, LENGTHS = torch.zeros(2, 9), torch.zeros(2, dtype=torch.int32)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: lk.select_topk(ROWS, LENGTHS, 0), ValueError, "k: 0 given, 1 to 2048"),
        (lambda: lk.select_topk(ROWS, LENGTHS, 2049), ValueError, "k: 2049"),
        (lambda: lk.select_topk(ROWS.double(), LENGTHS, 1), TypeError, "logits: dtype float64"),
        (lambda: lk.select_topk(ROWS[0], LENGTHS, 1), ValueError, "logits: shape"),
        (lambda: lk.select_topk(ROWS.t(), LENGTHS, 1), ValueError, "logits: last stride"),
        (lambda: lk.select_topk(ROWS, LENGTHS[:1], 1), ValueError, "lengths: shape"),
        (lambda: lk.select_topk(torch.empty(2, 2**30 + 1, device="meta"), LENGTHS, 1), ValueError, "at most"),
        (lambda: lk.select_topk(ROWS, LENGTHS.float(), 1), TypeError, "lengths: dtype"),
        (lambda: lk.select_topk(ROWS, LENGTHS, 1, row_to_batch=LENGTHS), ValueError, "without a page_table"),
        (
            lambda: lk.select_topk(ROWS, LENGTHS, 1, page_table=torch.zeros(3, 1).int()),
            ValueError,
            "page_table: 3 rows",
        ),
        (lambda: lk.select_topk(ROWS, LENGTHS, 1, page_table=ROWS), TypeError, "page_table: dtype"),
        (lambda: lk.select_topk(ROWS, LENGTHS, 1, page_table=ROWS.int(), page_size=0), ValueError, "page_size: 0"),
        (lambda: lk.select_blocks(ROWS, LENGTHS, blocks=0), ValueError, "blocks: 0"),
        (lambda: lk.select_blocks(ROWS, LENGTHS, blocks=2, block_size=6), ValueError, "block_size: 6"),
        (lambda: lk.select_topk_in_blocks(ROWS, LENGTHS, ROWS, 1), TypeError, "block_ids: dtype"),
        (lambda: lk.select_topk_in_blocks(ROWS, LENGTHS, ROWS[:1].int(), 1), ValueError, "block_ids: shape"),
        (lambda: lk.select_topk_in_blocks(ROWS, LENGTHS, ROWS.int(), 1, block_size=0), ValueError, "block_size: 0"),
    ],
)
def test_bad_arguments_raise(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_every_op_has_a_true_schema_and_a_fake_that_agrees():
    checks = {"test_utils": ("test_schema", "test_faketensor")}
    ops = torch.ops.latentkv
    logits, lengths, table = torch.randn(2, 100), torch.tensor([100, 9]), torch.zeros(1, 2, dtype=torch.int32)
    rows = torch.tensor([0, 0])
    for pages, batch_of in ((None, None), (table, None), (table, rows)):
        torch.library.opcheck(ops.select_topk, (logits, lengths, 5, pages, batch_of, 64), **checks)
        ids = torch.zeros(2, 3, dtype=torch.int32)
        torch.library.opcheck(ops.select_topk_in_blocks, (logits, lengths, ids, 5, 8, pages, batch_of, 64), **checks)
    torch.library.opcheck(ops.select_blocks, (logits, lengths, 4, 8), **checks)
    torch.library.opcheck(ops.pad_page_table, (table, 9), **checks)
    torch.library.opcheck(ops.decode_schedule, (lengths, 100, 64, 1, torch.zeros(4, 4, dtype=torch.int32)), **checks)
    out = torch.zeros(4, 6, dtype=torch.int32)
    torch.library.opcheck(ops.prefill_schedule, (lengths, rows, 100, 64, out), **checks)
    query, scale = torch.zeros(32, 64, dtype=torch.int8), torch.zeros(32, dtype=torch.int32)
    cache = lk.new_index_key_cache("split8", 2)
    given_arguments = (query, scale, torch.ones(2, 16), cache.payload, cache.scale, table, lengths, None, None, False)
    out = torch.zeros(2, 128)
    torch.library.opcheck(ops.index_logits, (*given_arguments, "packed", "split8", 64, out), **checks)


def test_slots_that_int32_does_not_hold_are_none(backend):
    logits = torch.zeros(1, 65, device=backend.device)
    lengths = torch.tensor([65], device=backend.device)
    ids = torch.tensor([[0, 1]], dtype=torch.int32, device=backend.device)
    for pages, want in (
        ([2**26, 2**26 + 1], [-1, -1]),
        ([2**25, 2**25 - 1], [-1, 2**31 - 64]),
        ([2**25 - 1, -3], [2**31 - 64, -1]),
    ):
        table = torch.tensor([pages], dtype=torch.int32, device=backend.device)
        _, slots = lk.select_topk(logits, lengths, 65, page_table=table)
        assert slots[0, [0, 64]].tolist() == want
        _, slots = lk.select_topk_in_blocks(logits, lengths, ids, 65, block_size=64, page_table=table)
        assert slots[0, [0, 64]].tolist() == want
    for size in (2**31 - 1, 2**30 + 3):  # no powers of two
        table = torch.tensor([[1]], dtype=torch.int32, device=backend.device)
        _, slots = lk.select_topk(logits, lengths, 65, page_table=table, page_size=size)
        fits = [size + n if size + n < 2**31 else -1 for n in range(65)]
        assert slots[0].tolist() == fits
    with pytest.raises(ValueError, match=r"^page_size: 2147483648 given"):
        lk.select_topk(logits, lengths, 2, page_table=table, page_size=2**31)


def test_the_newest_block_alone(backend):
    """One block to keep leaves none to pick, from however many."""
    lengths = torch.tensor([5000, 0, 17, 4999], device=backend.device)
    for size in (1, 2):
        ids = lk.select_blocks(torch.randn(4, 5000, device=backend.device), lengths, blocks=1, block_size=size)
        assert ids.tolist() == [[(int(n) + size - 1) // size - 1] for n in lengths]
