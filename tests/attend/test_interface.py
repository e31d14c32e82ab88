"""What the attend ops refuse, what checked mode adds, tracing and compilation."""

from __future__ import annotations

import math

import pytest
import torch

import latentkv as lk
from tests.attend.cases import Pool, angle_table, queries

CPU = torch.device("cpu")
BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def pool() -> Pool:
    return Pool.random(20, "v41", 16, CPU, seed=1)


def rows_with(pool: Pool, **change: object) -> lk.Rows:
    given = {"cache": pool.cache, "slots": pool.pick(2, 5, 1), "layout": "v41", "page_size": 16} | change
    return lk.Rows(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"cache": torch.zeros(4, 8448)}, TypeError, "cache: dtype float32 given, uint8 accepted"),
        ({"cache": torch.zeros(4, 99, dtype=torch.uint8)}, ValueError, "a page of 16 v41 rows takes 8704"),
        ({"layout": "v40"}, ValueError, "layout: 'v40' is none of v4, v41"),
        ({"page_size": 12}, ValueError, "page_size: 12 given, a power of two needed"),
        ({"slots": torch.zeros(2, 5)}, TypeError, "slots: dtype float32 given, int32 or int64 accepted"),
        ({"slots": torch.zeros(5).int()}, ValueError, r"slots: shape \[5\] given, \[T, K\] needed"),
        ({"slots": torch.zeros(5, 2).int().T}, ValueError, "slots: last stride 2 given, 1 needed"),
        ({"slots": [[1]]}, TypeError, "slots: list given, a tensor is needed"),
        ({"lengths": torch.zeros(3).int()}, ValueError, r"lengths: shape \[3\] given, \[2\] needed"),
        ({"lengths": torch.zeros(2)}, TypeError, "lengths: dtype float32 given"),
        ({"slots": torch.zeros(2, 5).int().to("meta")}, ValueError, "slots: on meta, the other arguments are on cpu"),
    ],
)
def test_rows_that_do_not_fit_are_refused(pool, change, error, message):
    with pytest.raises(error, match=message):
        rows_with(pool, **change)


def test_rows_know_their_layout_and_capacity(pool):
    rows = rows_with(pool)
    assert rows.layout is lk.KVLayout.V41
    assert rows.capacity == 64
    with pytest.raises(AttributeError):
        rows.page_size = 8  # type: ignore[misc]


Q = torch.zeros(2, 3, 512).bfloat16()
TABLE = angle_table(4, CPU)


@pytest.mark.parametrize(
    ("query", "options", "error", "message"),
    [
        (Q.float(), {}, TypeError, "query: dtype float32 given, bfloat16 accepted"),
        (Q[..., :448], {}, ValueError, r"query: shape \[2, 3, 448\] given, \[T, H, 512\] needed"),
        (Q[:, :0], {}, ValueError, "query: 0 heads given, 1 to 128 accepted"),
        (torch.zeros(2, 129, 512).bfloat16(), {}, ValueError, "query: 129 heads given, 1 to 128 accepted"),
        (torch.zeros(2, 512, 3).bfloat16().mT, {}, ValueError, "query: last stride 3 given, 1 needed"),
        (Q[:1], {}, ValueError, "window.slots: 2 queries' slots given, query has 1"),
        (Q, {"sink": torch.zeros(2)}, ValueError, r"sink: shape \[2\] given, \[3\] needed"),
        (Q, {"sink": torch.zeros(3).bfloat16()}, TypeError, "sink: dtype bfloat16 given, float32 accepted"),
        (Q, {"sink": torch.zeros(6)[::2]}, ValueError, "sink: last stride 2 given, 1 needed"),
        (Q, {"inverse_rope": TABLE}, TypeError, r"inverse_rope: Tensor given, a tuple \(freqs, positions\) needed"),
        (Q, {"inverse_rope": (TABLE[:, :32], torch.zeros(2).int())}, ValueError, "freqs: shape"),
        (Q, {"inverse_rope": (TABLE, torch.zeros(3).int())}, ValueError, r"positions: shape \[3\] given, \[2\]"),
        (Q, {"empty_lse": 0.0}, ValueError, "empty_lse: 0.0 given, -inf or inf accepted"),
        (Q, {"empty_lse": math.nan}, ValueError, "empty_lse: nan given, -inf or inf accepted"),
        (Q, {"extra": 3}, TypeError, "extra: int given, latentkv.Rows needed"),
        (Q, {"splits": 0}, ValueError, "splits: 0 given, 1 to 64"),
        (Q, {"splits": 65}, ValueError, "splits: 65 given, 1 to 64"),
    ],
)
def test_bad_arguments_are_refused(pool, query, options, error, message):
    with pytest.raises(error, match=message):
        lk.sparse_mla(query, rows_with(pool), **options)


@pytest.mark.parametrize(
    ("window", "extra", "accepted"),
    [
        ("v41", "v4", "v41, v41_fp4"),
        ("v41", "v41_fp4_interleaved", "v41, v41_fp4"),
        ("v41_interleaved", "v41_fp4", "v41_interleaved, v41_fp4_interleaved"),
        ("bf16", "v41", "bf16"),
        ("v41_mxfp4", "v41_fp4", "v41_mxfp4"),
    ],
)
def test_pairs_of_layouts_that_no_reader_takes_are_refused_by_name(window, extra, accepted):
    slots = torch.zeros(2, 1).int()
    near, far = (lk.Rows(lk.new_kv_cache(n, 1, 16), slots, n, 16) for n in (window, extra))
    message = f"extra: {extra} rows cannot join a window of {window} rows; accepted: {accepted}$"
    with pytest.raises(NotImplementedError, match=message):
        lk.sparse_mla(Q, near, far)


@pytest.mark.parametrize(
    ("outs", "lses", "sink", "error", "message"),
    [
        (torch.zeros(0, 2, 3, 512), torch.zeros(0, 2, 3), None, ValueError, "outs: no partials given"),
        (torch.zeros(2, 3, 512), torch.zeros(2, 3), None, ValueError, r"outs: shape \[2, 3, 512\] given"),
        (torch.zeros(1, 2, 3, 512).half(), torch.zeros(1, 2, 3), None, TypeError, "outs: dtype float16 given"),
        (torch.zeros(1, 2, 3, 512), torch.zeros(1, 3, 2), None, ValueError, r"lses: shape \[1, 3, 2\] given"),
        (torch.zeros(1, 2, 3, 512), torch.zeros(1, 2, 3).double(), None, TypeError, "lses: dtype float64 given"),
        (torch.zeros(1, 2, 3, 512), torch.zeros(1, 2, 3), torch.zeros(1), ValueError, r"sink: shape \[1\] given"),
    ],
)
def test_bad_partials_are_refused(outs, lses, sink, error, message):
    with pytest.raises(error, match=message):
        lk.merge_partials(outs, lses, sink=sink)


def test_checked_mode_refuses_slots_past_the_cache_but_not_past_a_length(pool):
    slots = torch.tensor([[3, -1, 64], [3, 5, -7]]).int()
    lk.sparse_mla(Q, rows_with(pool, slots=slots))
    with lk.checked():
        lk.sparse_mla(Q, rows_with(pool, slots=slots, lengths=torch.tensor([2, 2])))
        lk.sparse_mla(Q, rows_with(pool, slots=slots[:, :0]))
        with pytest.raises(ValueError, match=r"window.slots: 64 is past the cache's 63 \(4 pages of 16\)"):
            lk.sparse_mla(Q, rows_with(pool, slots=slots))
        with pytest.raises(ValueError, match=r"extra.slots: -7 is negative"):
            lk.sparse_mla(
                Q, rows_with(pool, slots=slots[:, :2]), rows_with(pool, slots=slots, lengths=torch.tensor([0, 3]))
            )
        with pytest.raises(ValueError, match=r"positions: 4 is outside the rotation table's 0..3"):
            lk.sparse_mla(Q, rows_with(pool, slots=slots[:, :1]), inverse_rope=(TABLE, torch.tensor([0, 4])))


def call(query, cache, slots, lengths, extra_cache, more, sink, table, positions):
    window = lk.Rows(cache, slots, "v41", 16, lengths)
    extra = lk.Rows(extra_cache, more, "v41_fp4", 16)
    rope = (table, positions)
    out, lse = lk.sparse_mla(query, window, extra, sink=sink, inverse_rope=rope, empty_lse=math.inf)
    outs, lses = torch.stack((out, out)), torch.stack((lse, lse - 1))
    return out, lse, *lk.merge_partials(outs, lses, sink=sink)


@pytest.fixture(scope="module")
def arguments(pool: Pool) -> tuple[torch.Tensor, ...]:
    extra = Pool.random(20, "v41_fp4", 16, CPU, seed=2)
    lengths, positions = torch.tensor([5, 0]), torch.tensor([1, 3])
    rows = (pool.cache, pool.pick(2, 5, 1), lengths, extra.cache, extra.pick(2, 9, 2))
    return queries(2, 3, CPU), *rows, torch.zeros(3), TABLE, positions


def test_a_compiled_function_traces_whole_and_gives_the_same_bits(arguments):
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(*arguments), call(*arguments), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("rope", [False, True])
def test_the_op_records_pass_pytorchs_checks(arguments, rope):
    query, cache, slots, lengths, extra_cache, more, sink, table, positions = arguments
    window, extra = (cache, slots, lengths, "v41", 16), (extra_cache, more, None, "v41_fp4", 16)
    tail = (0.1, sink, table, positions, -math.inf) if rope else (0.1, None, None, None, math.inf)
    torch.library.opcheck(torch.ops.latentkv.sparse_mla.default, (query, *window, *extra, *tail))
    torch.library.opcheck(torch.ops.latentkv.sparse_mla.default, (query, *window, None, None, None, "", 1, *tail))
    outs, lses = torch.randn(2, 3, 4, 512), torch.randn(2, 3, 4)
    torch.library.opcheck(torch.ops.latentkv.merge_partials.default, (outs, lses, torch.zeros(4) if rope else None))


def test_meta_tensors_give_shapes_and_dtypes(pool):
    def meta(x: torch.Tensor) -> torch.Tensor:
        return x.to("meta")

    rows = lk.Rows(meta(pool.cache), meta(pool.pick(2, 5, 1)), "v41", 16)
    out, lse = lk.sparse_mla(meta(Q), rows)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((2, 3, 512), BF16, (2, 3), torch.float32)
    out, lse = lk.merge_partials(torch.empty(4, 2, 3, 512, device="meta"), torch.empty(4, 2, 3, device="meta"))
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((2, 3, 512), BF16, (2, 3), torch.float32)
