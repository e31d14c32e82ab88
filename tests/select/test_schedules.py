"""Page-table padding and schedules: worked examples, production sizes, coverage."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import latentkv as lk

PAD = [0, 0, 1, 0]
PREFILL_PAD = [0, 0, 0, 1, 0, 0]


def decode(backend, lengths: list[int], workers: int, max_len: int, **options) -> list[list[int]]:
    given_lengths = torch.tensor(lengths, dtype=torch.int32, device=backend.device)
    return lk.decode_schedule(given_lengths, workers=workers, max_len=max_len, **options).tolist()


def literal_schedule(lengths: list[int], block: int, workers: int, max_len: int, next_n: int) -> list[list[int]]:
    """The published algorithm, slot by slot."""
    ceil = lambda a, b: -(-a // b)  # noqa: E731
    most = max(1, ceil(max_len, block))
    chunks = [ceil(max(x, 0), block) for x in lengths]
    fitting = [s for s in range(1, most + 1) if next_n * sum(ceil(c, s) for c in chunks) <= workers]
    step = fitting[0] if fitting else max([*chunks, 1])
    inclusive, total = [], 0
    for c in chunks:
        total += ceil(c, step)
        inclusive.append(total)
    rows = []
    for slot in range(workers // next_n):
        for n in range(next_n):
            if slot >= total:
                rows.append(PAD)
                continue
            b = sum(end <= slot for end in inclusive)
            start = (slot - (inclusive[b] - ceil(chunks[b], step))) * step
            rows.append([b * next_n + n, start, max(min(step, chunks[b] - start), 0), lengths[b]])
    return rows


# --- worked examples --------------------------------------------------------------------------------------------------


def test_example_a_spreads_single_chunks(backend):
    rows = decode(backend, [1000, 0, 257, 4096], 32, 4096)
    want = [[0, i, 1, 1000] for i in range(4)] + [[2, i, 1, 257] for i in range(2)]
    want += [[3, i, 1, 4096] for i in range(16)] + [PAD] * 10
    assert rows == want


def test_example_b_takes_the_smallest_share_that_fits(backend):
    rows = decode(backend, [4096, 4096, 1, 0], 8, 4096)
    want = [[b, s, c, 4096] for b in (0, 1) for s, c in ((0, 6), (6, 6), (12, 4))]
    assert rows == [*want, [2, 0, 1, 1], PAD]


def test_example_c_is_all_padding_when_every_row_is_empty(backend):
    assert decode(backend, [0, 0, 0], 4, 1024) == [PAD] * 4


def test_example_d_gives_each_row_one_worker(backend):
    assert decode(backend, [4096, 300, 300, 10], 4, 4096) == [
        [0, 0, 16, 4096],
        [1, 0, 2, 300],
        [2, 0, 2, 300],
        [3, 0, 1, 10],
    ]


def test_example_e_falls_back_to_whole_rows_past_max_len(backend):
    assert decode(backend, [4096, 4096], 2, 1024) == [[0, 0, 16, 4096], [1, 0, 16, 4096]]


def test_example_f_gives_drafts_of_a_row_the_same_chunks(backend):
    rows = decode(backend, [600, 100], 8, 1024, next_n=2)
    want = [[n, i, 1, 600] for i in range(3) for n in range(2)] + [[2, 0, 1, 100], [3, 0, 1, 100]]
    assert rows == want


def test_example_g_skips_an_empty_row(backend):
    assert decode(backend, [600, 0, 100], 3, 1024) == [[0, 0, 2, 600], [0, 2, 1, 600], [2, 0, 1, 100]]


def test_example_h_is_the_prefill_form(backend):
    lengths = torch.tensor([0, 300, 700], dtype=torch.int32, device=backend.device)
    rows = lk.prefill_schedule(lengths, workers=4, max_len=1024).tolist()
    assert rows == [[1, 1, 0, 2, 0, 300], [2, 2, 0, 2, 0, 700], [2, 2, 2, 1, 0, 700], PREFILL_PAD]


@pytest.mark.parametrize(
    ("rows", "max_len", "workers", "share"),
    [
        (1, 4096, 16, 1),
        (64, 32768, 1024, 8),
        (256, 131072, 1024, 128),
        (256, 1024, 1024, 1),
        (1536, 131072, 6144, 128),
        (1536, 512, 3072, 1),
    ],
)
def test_production_sizes(backend, rows, max_len, workers, share):
    assert lk.schedule_workers(rows, max_len) == workers
    lengths = torch.full((rows,), max_len, dtype=torch.int32, device=backend.device)
    schedule = lk.decode_schedule(lengths, workers=workers, max_len=max_len).cpu()
    assert schedule[0].tolist() == [0, 0, share, max_len]
    assert int(schedule[schedule[:, 3] > 0, 2].sum()) == rows * max_len // 256
    assert schedule[-1].tolist() == [rows - 1, max_len // 256 - share, share, max_len]


def test_a_ragged_production_batch(backend):
    lengths = torch.tensor([(i * 2654435761) % 131072 for i in range(1536)], dtype=torch.int32, device=backend.device)
    workers = lk.schedule_workers(1536, 131072)
    schedule = lk.decode_schedule(lengths, workers=workers, max_len=131072).cpu()
    assert workers == 6144
    assert schedule[0].tolist() == [1, 0, 74, 96689]
    assert int((schedule[:, 3] > 0).sum()) == 6101
    assert schedule[6101:].unique(dim=0).tolist() == [PAD]


# --- properties -------------------------------------------------------------------------------------------------------


@given(
    lengths=st.lists(st.integers(-5, 3000), min_size=0, max_size=12),
    extra=st.integers(0, 40),
    max_len=st.integers(0, 4000),
    block=st.sampled_from([64, 100, 256]),
    next_n=st.integers(1, 3),
)
def test_decode_schedule_equals_the_literal_algorithm(backend, lengths, extra, max_len, block, next_n):
    workers = (len(lengths) + extra) * next_n
    got = decode(backend, lengths, workers, max_len, block=block, next_n=next_n)
    assert got == literal_schedule(lengths, block, workers, max_len, next_n)


@given(lengths=st.lists(st.integers(-9, 5000), min_size=0, max_size=20), extra=st.integers(0, 50))
def test_each_chunk_of_each_row_is_covered_exactly_once(backend, lengths, extra):
    given_lengths = torch.tensor(lengths, dtype=torch.int64, device=backend.device)
    workers = len(lengths) + extra
    schedule = lk.prefill_schedule(given_lengths, workers=workers, max_len=5000).tolist()
    covered = [(row, c) for row, _, start, count, _, end in schedule if end for c in range(start, start + count)]
    assert sorted(covered) == [(r, c) for r, x in enumerate(lengths) for c in range(-(-max(x, 0) // 256))]
    assert covered == sorted(covered)
    assert all(unit[5] == lengths[unit[0]] and unit[4] == 0 for unit in schedule if unit[5])


@given(lengths=st.lists(st.integers(0, 9000), min_size=1, max_size=20), extra=st.integers(0, 50))
def test_prefill_equals_decode_with_two_more_fields(backend, lengths, extra):
    workers = len(lengths) + extra
    given_lengths = torch.tensor(lengths, dtype=torch.int32, device=backend.device)
    prefill = lk.prefill_schedule(given_lengths, workers=workers, max_len=9000).tolist()
    want = [[b, b, s, c, 0, x] if x else PREFILL_PAD for b, s, c, x in decode(backend, lengths, workers, 9000)]
    assert prefill == want


def test_a_negative_length_counts_as_zero(backend):
    assert decode(backend, [-1, 300, -(2**31)], 4, 1024) == decode(backend, [0, 300, 0], 4, 1024)
    for dtype in (torch.int32, torch.int64):
        lengths = torch.tensor([-(2**31), 5], dtype=dtype, device=backend.device)
        rows = lk.prefill_schedule(lengths, workers=3, max_len=512).tolist()
        assert rows == [[1, 1, 0, 1, 0, 5], PREFILL_PAD, PREFILL_PAD]


def test_no_rows_write_padding_into_a_given_buffer(backend):
    none = torch.zeros(0, dtype=torch.int32, device=backend.device)
    out = torch.full((3, 4), 77, dtype=torch.int32, device=backend.device)
    assert lk.decode_schedule(none, workers=3, max_len=256, out=out) is out
    assert out.tolist() == [PAD] * 3
    six = torch.full((2, 6), 77, dtype=torch.int32, device=backend.device)
    lk.prefill_schedule(none, workers=2, max_len=256, out=six)
    assert six.tolist() == [PREFILL_PAD] * 2
    assert lk.decode_schedule(none, workers=0, max_len=256).shape == (0, 4)


def test_a_reused_buffer_keeps_nothing(backend):
    out = torch.full((40, 4), -9, dtype=torch.int32, device=backend.device)
    lengths = torch.tensor([9000, 50], dtype=torch.int32, device=backend.device)
    lk.decode_schedule(lengths, workers=40, max_len=9000, out=out)
    lk.decode_schedule(torch.zeros_like(lengths), workers=40, max_len=9000, out=out)
    assert out.tolist() == [PAD] * 40


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("max_len", [2**31 - 1, 2**31, 2**40, 2**62])
def test_a_max_len_without_bound(backend, max_len):
    want = literal_schedule([600, 0, 2000], 256, 6, 2048, 1)
    assert decode(backend, [600, 0, 2000], 6, max_len) == want
    lengths = torch.tensor([600, 0, 2000], device=backend.device)
    rows = lk.prefill_schedule(lengths, workers=6, max_len=max_len).tolist()
    assert [[row, start, count, end] for row, _, start, count, _, end in rows if end] == [u for u in want if u[3]]


def test_strided_lengths_and_row_to_batch(backend):
    lengths = torch.tensor([[300, 9], [0, 9], [600, 9]], dtype=torch.int64, device=backend.device)[:, 0]
    batch = torch.tensor([7, 8, 3], device=backend.device)
    rows = lk.prefill_schedule(lengths, workers=8, max_len=1024, row_to_batch=batch).tolist()
    assert rows[:5] == [[0, 7, i, 1, 0, 300] for i in range(2)] + [[2, 3, i, 1, 0, 600] for i in range(3)]


def test_more_rows_than_a_tile_of_any_kernel(backend):
    lengths = [(i * 7919) % 700 for i in range(2500)]
    got = decode(backend, lengths, 4000, 700)
    covered = [(b, c) for b, s, n, x in got if x for c in range(s, s + n)]
    assert covered == [(b, c) for b, x in enumerate(lengths) for c in range(-(-x // 256))]
    assert {u[2] for u in got if u[3]} == {1, 2}


# --- workers and pages ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("next_n", [1, 2, 3])
@pytest.mark.parametrize("rows", [0, 1, 5, 341, 1536, 4097])
@pytest.mark.parametrize("max_len", [0, 1, 256, 257, 1048576])
def test_workers_always_suffice(backend, rows, max_len, next_n):
    workers = lk.schedule_workers(rows, max_len, device=backend.device, next_n=next_n)
    assert workers >= rows * next_n
    assert workers % next_n == 0
    assert workers <= rows * next_n * max(1, -(-max_len // 256))


@pytest.mark.parametrize(
    ("width", "bucket", "padded"),
    [(0, 4, 4), (1, 4, 4), (4, 4, 4), (5, 4, 8), (130, 4, 132), (0, 64, 4), (1, 64, 64), (64, 64, 64), (65, 64, 128),
     (130, 64, 192)],
)  # fmt: skip
def test_padded_widths(backend, width, bucket, padded):
    table = torch.full((2, width), 9, dtype=torch.int32, device=backend.device)
    wide, max_len = lk.pad_page_table(table, bucket=bucket)
    assert wide.shape == (2, padded + 4)
    assert max_len == padded * 64
    assert (wide[:, :width] == 9).all()
    assert wide[:, width:].count_nonzero() == 0


def test_the_worked_page_table(backend):
    table = torch.tensor([[1, 2, 3, 4, 5]], device=backend.device)
    wide, max_len = lk.pad_page_table(table, bucket=4)
    assert wide.dtype == torch.int32
    assert (wide.tolist(), max_len) == ([[1, 2, 3, 4, 5, 0, 0, 0, 0, 0, 0, 0]], 512)


@pytest.mark.parametrize(("pages", "columns"), [(16384, 16388), (1024, 1028)])
def test_fixed_columns_do_not_widen_the_logits(backend, pages, columns):
    table = torch.ones(1, 5, dtype=torch.int32, device=backend.device)
    wide, max_len = lk.pad_page_table(table, columns=columns)
    assert wide.shape == (1, columns)
    assert max_len == 4096
    assert lk.pad_page_table(torch.ones(1, pages, dtype=torch.int32))[0].shape[1] == columns
    assert lk.pad_page_table(table, columns=1)[0].shape == (1, 68)


def test_strided_tables_and_page_size_128(backend):
    table = torch.arange(12, dtype=torch.int64, device=backend.device).view(3, 4).t()
    wide, max_len = lk.pad_page_table(table, bucket=1, page_size=128)
    assert wide[:, :3].tolist() == [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]
    assert max_len == 4 * 128


def test_lengths_and_batches_that_int32_does_not_hold(backend):
    most = 2**31 - 1
    for length in (2**31, 2**32, 2**40, 2**63 - 1):
        lengths = torch.tensor([length, 5], device=backend.device)
        units = lk.decode_schedule(lengths, workers=3, max_len=4096, block=256)
        assert units.tolist() == [[0, 0, 2**23, most], [1, 0, 1, 5], [0, 0, 1, 0]]
        batches = torch.tensor([2**32 + 1, -(2**40)], device=backend.device)
        units = lk.prefill_schedule(lengths, workers=2, max_len=4096, block=256, row_to_batch=batches)
        assert units.tolist() == [[0, -1, 0, 2**23, 0, most], [1, -1, 0, 1, 0, 5]]
    batches = torch.tensor([most, -7], device=backend.device)
    units = lk.prefill_schedule(lengths, workers=2, max_len=4096, block=256, row_to_batch=batches)
    assert units[:, 1].tolist() == [most, -7]


# --- errors -----------------------------------------------------------------------------------------------------------


def lengths_of(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int32)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: lk.decode_schedule(lengths_of(3), workers=2, max_len=1), ValueError, "workers: 2 given, at least one"),
        (
            lambda: lk.decode_schedule(lengths_of(3), workers=5, max_len=1, next_n=2),
            ValueError,
            "a multiple of next_n",
        ),
        (lambda: lk.decode_schedule(lengths_of(3), workers=4, max_len=1, next_n=2), ValueError, "each of 6 rows"),
        (lambda: lk.decode_schedule(lengths_of(3), workers=4, max_len=1, block=0), ValueError, "block: 0"),
        (lambda: lk.decode_schedule(lengths_of(3), workers=4, max_len=1, block=2**31), ValueError, "block: 2147483648"),
        (lambda: lk.decode_schedule(lengths_of(3).float(), workers=4, max_len=1), TypeError, "lengths: dtype float32"),
        (
            lambda: lk.decode_schedule(lengths_of(1), workers=2, max_len=1, out=torch.zeros(2, 6, dtype=torch.int32)),
            ValueError,
            r"out: shape \[2, 6\]",
        ),
        (lambda: lk.prefill_schedule(lengths_of(3), workers=2, max_len=1), ValueError, "workers: 2 given"),
        (
            lambda: lk.prefill_schedule(lengths_of(3), workers=3, max_len=1, row_to_batch=lengths_of(2)),
            ValueError,
            "row_to_batch: shape",
        ),
        (lambda: lk.pad_page_table(torch.zeros(2, 2)), TypeError, "table: dtype float32"),
        (lambda: lk.pad_page_table(lengths_of(3)), ValueError, "table: shape"),
        (lambda: lk.pad_page_table(lengths_of(3)[None], bucket=0), ValueError, "bucket: 0"),
    ],
)
def test_bad_arguments_raise(call, error, text):
    with pytest.raises(error, match=text):
        call()
