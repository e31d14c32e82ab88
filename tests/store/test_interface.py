"""What the store ops refuse before a byte changes, what checked mode adds, tracing and compilation."""

from __future__ import annotations

import math

import pytest
import torch

import latentkv as lk
from tests.store.cases import LAYOUTS, angle_table, as_complex, random_rows

F32, BF16, U8 = torch.float32, torch.bfloat16, torch.uint8
FORM = {"layout": "v41", "page_size": 16}
TABLE = angle_table(8)


@pytest.fixture
def arguments() -> dict[str, object]:
    """A valid call of every op draws from these."""
    return {
        "rows": random_rows(3, BF16),
        "weight": torch.ones(512, dtype=BF16),
        "cache": torch.full((2, 8704), 0xA5, dtype=U8),
        "slots": torch.tensor([0, 17, 31]),
        "positions": torch.tensor([0, 7, 3]),
        "freqs": TABLE,
        "eps": 1e-6,
        "query": random_rows(6, BF16).view(3, 2, 512),
        **FORM,
    }


NAMES = {
    "store_kv": ("rows", "cache", "slots"),
    "norm_rope_store_kv": ("rows", "weight", "cache", "slots", "positions", "freqs"),
    "load_kv": ("cache", "slots"),
    "load_kv_pages": ("cache",),
}
OPTIONS = {
    "store_kv": ("layout", "page_size"),
    "norm_rope_store_kv": ("layout", "page_size", "eps", "query"),
    "load_kv": ("layout", "page_size"),
    "load_kv_pages": ("layout", "page_size"),
}


def call(op: str, arguments: dict[str, object], **more: object) -> object:
    given = [arguments[n] for n in NAMES[op]]
    return getattr(lk, op)(*given, **{n: arguments[n] for n in OPTIONS[op]}, **more)


def assert_refused(op: str, arguments: dict[str, object], error: type, message: str, **more: object) -> None:
    tensors = [x for x in arguments.values() if isinstance(x, torch.Tensor) and x.device.type == "cpu"]
    before = [x.clone() for x in tensors]
    with pytest.raises(error, match=message):
        call(op, arguments, **more)
    for x, y in zip(tensors, before, strict=True):
        assert torch.equal(
            torch.view_as_real(x) if x.is_complex() else x, torch.view_as_real(y) if y.is_complex() else y
        )


BAD = [
    ("rows", torch.zeros(3, 448), ValueError, r"rows: shape \[3, 448\] given, \[n, 512\] needed"),
    ("rows", torch.zeros(3, 1, 512), ValueError, r"rows: shape \[3, 1, 512\] given, \[n, 512\] needed"),
    ("rows", torch.zeros(512, 3).T, ValueError, r"rows: last stride 3 given, 1 needed"),
    ("rows", torch.zeros(3, 512).double(), TypeError, r"rows: dtype float64 given, bfloat16 or float16 or float32"),
    ("rows", [[0.0]], TypeError, r"rows: list given, a tensor is needed"),
    ("rows", torch.zeros(4, 512), ValueError, r"slots: shape \[3\] given, \[4\] needed"),
    ("weight", torch.ones(64), ValueError, r"weight: shape \[64\] given, \[512\] needed"),
    ("weight", torch.ones(512).half(), TypeError, r"weight: dtype float16 given, bfloat16 or float32 accepted"),
    ("weight", torch.ones(1024)[::2], ValueError, r"weight: last stride 2 given, 1 needed"),
    ("cache", torch.zeros(2, 8704), TypeError, r"cache: dtype float32 given, uint8 accepted"),
    (
        "cache",
        torch.zeros(2, 8703, dtype=U8),
        ValueError,
        r"cache: pages of 8703 bytes at a stride of 8703 given, a page",
    ),
    (
        "cache",
        torch.zeros(17408, dtype=U8),
        ValueError,
        r"cache: shape \[17408\] given, \[num_pages, page_stride\] needed",
    ),
    ("cache", torch.zeros(8704, 2, dtype=U8).T, ValueError, r"cache: last stride 2 given, 1 needed"),
    ("cache", torch.zeros(1, 8704, dtype=U8).expand(2, 8704), ValueError, r"at a stride of 0 given"),
    ("cache", torch.zeros(2, 8704, dtype=U8, device="meta"), ValueError, r"on (meta|cpu), the other arguments are on"),
    ("slots", torch.zeros(3), TypeError, r"slots: dtype float32 given, int32 or int64 accepted"),
    ("slots", torch.zeros(3, 1).int(), ValueError, r"slots: shape \[3, 1\] given"),
    ("slots", torch.zeros(3).short(), TypeError, r"slots: dtype int16 given"),
    ("positions", torch.zeros(2).int(), ValueError, r"positions: shape \[2\] given, \[3\] needed"),
    ("positions", torch.zeros(3), TypeError, r"positions: dtype float32 given"),
    ("freqs", TABLE[:, :32], ValueError, r"freqs: shape \[8, 32\] given, \[positions, 64\] needed"),
    ("freqs", TABLE[:0], ValueError, r"freqs: the table is empty"),
    ("freqs", TABLE.bfloat16(), TypeError, r"freqs: dtype bfloat16 given, float32 accepted"),
    ("freqs", as_complex(TABLE)[:, :16], ValueError, r"freqs: shape \[8, 16\] given, \[positions, 32\] needed"),
    ("eps", -1e-6, ValueError, r"eps: -1e-06 given, a finite number >= 0 needed"),
    ("eps", math.nan, ValueError, r"eps: nan given"),
    ("eps", math.inf, ValueError, r"eps: inf given"),
    ("query", torch.zeros(3, 2, 512), TypeError, r"query: dtype float32 given, bfloat16 accepted"),
    (
        "query",
        torch.zeros(2, 2, 512).bfloat16(),
        ValueError,
        r"query: shape \[2, 2, 512\] given, \[3, heads, 512\] needed",
    ),
    ("query", torch.zeros(3, 1024).bfloat16(), ValueError, r"query: shape \[3, 1024\] given"),
    ("layout", "v42", ValueError, r"layout: 'v42' is none of v4, v41"),
    ("layout", "bf16", ValueError, r"a page of 16 bf16 rows takes 16384"),
    ("page_size", 24, ValueError, r"page_size: 24 given, a power of two needed"),
    ("page_size", 0, ValueError, r"page_size: 0 given"),
    ("page_size", 16.0, TypeError, r"page_size: float given"),
]


def bad_calls() -> list[tuple[object, ...]]:
    """Every bad argument with every op that takes it."""
    calls = [(op, *bad) for op in NAMES for bad in BAD if bad[0] in NAMES[op] + OPTIONS[op]]
    # a whole-page reader has nothing beside its cache that could be elsewhere
    return [c for c in calls if c[0] != "load_kv_pages" or "meta" not in c[4]]


@pytest.mark.parametrize(("op", "name", "value", "error", "message"), bad_calls())
def test_bad_arguments_are_refused_before_a_byte_changes(arguments, op, name, value, error, message):
    assert_refused(op, arguments | {name: value}, error, message)


@pytest.mark.parametrize("op", list(NAMES))
def test_the_same_arguments_unchanged_are_accepted(arguments, op):
    call(op, arguments)


@pytest.mark.parametrize(
    ("freqs", "message"),
    [(TABLE, r"freqs: 8 rows given, one for each of 3 rows needed"), (TABLE[:0], r"freqs: 0 rows given")],
)
def test_store_needs_one_row_of_angles_a_row(arguments, freqs, message):
    assert_refused("store_kv", arguments, ValueError, message, freqs=freqs)


@pytest.mark.parametrize(
    ("out", "error", "message"),
    [
        (torch.zeros(2, 512).bfloat16(), ValueError, r"out: shape \[2, 512\] given, \[3, 512\] needed"),
        (torch.zeros(3, 512), TypeError, r"out: dtype float32 given, bfloat16 accepted"),
        (torch.zeros(512, 3).bfloat16().T, ValueError, r"out: last stride 3 given, 1 needed"),
        (torch.zeros(3, 512, device="meta").bfloat16(), ValueError, r"out: on meta, the other arguments are on cpu"),
    ],
)
def test_outputs_that_do_not_fit_are_refused(arguments, out, error, message):
    assert_refused("load_kv", arguments, error, message, out=out)


X = torch.zeros(3, 2, 128)


@pytest.mark.parametrize(
    ("x", "freqs", "options", "error", "message"),
    [
        (X, TABLE[:3], {"kind": "fp8"}, ValueError, r"kind: 'fp8' given, 'index' or 'latent' accepted"),
        (X.double(), TABLE[:3], {"kind": "index"}, TypeError, r"x: torch.float64 given"),
        ([1.0], TABLE[:3], {"kind": "index"}, TypeError, r"x: list given"),
        (X[..., :80], TABLE[:3], {"kind": "index"}, ValueError, r"\[T, ..., D\] with D a multiple of 32 needed"),
        (X[..., :72], TABLE[:3], {"kind": "latent"}, ValueError, r"\[T, ..., D\] with D a multiple of 16 needed"),
        (X[0, 0], TABLE[:3], {"kind": "latent"}, ValueError, r"\[T, ..., D\]"),
        (X, TABLE[:2], {"kind": "index"}, ValueError, r"freqs: 2 rows given, one for each of 3 rows needed"),
        (
            X,
            TABLE[:3, :63],
            {"kind": "index"},
            ValueError,
            r"freqs: a rotated width of 63 given, an even width up to 128",
        ),
        (
            X[..., :32],
            TABLE[:3],
            {"kind": "index"},
            ValueError,
            r"freqs: a rotated width of 64 given, an even width up to 32",
        ),
        (X, TABLE[0], {"kind": "index"}, ValueError, r"freqs: shape \[64\] given, \[rows, width\] needed"),
        (X, None, {"kind": "index"}, TypeError, r"freqs: NoneType given"),
        (X, TABLE[:0], {"kind": "index", "positions": torch.zeros(3).int()}, ValueError, r"freqs: the table is empty"),
        (X, TABLE, {"kind": "index", "positions": torch.zeros(2).int()}, ValueError, r"positions: shape \[2\] given"),
        (X, TABLE, {"kind": "index", "positions": torch.zeros(3)}, TypeError, r"positions: dtype float32 given"),
    ],
)
def test_fake_quantization_refuses_bad_arguments(x, freqs, options, error, message):
    with pytest.raises(error, match=message):
        lk.rope_fake_quant(x, freqs, **options)


def test_new_caches_are_zero_and_have_the_layouts_pages():
    for name in LAYOUTS:
        cache = lk.new_kv_cache(name, 3, 4)
        assert cache.shape == (3, lk.KVLayout.parse(name).page_bytes(4))
        assert cache.dtype == U8
        assert cache.count_nonzero() == 0
    assert lk.new_kv_cache(lk.KVLayout.V41, 0, 256).shape == (0, 135168)
    assert lk.new_kv_cache("v41", 1, 16, device="meta").device.type == "meta"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("v42", 1, 16), "layout: 'v42' is none of"),
        (("v41", -1, 16), "num_pages: -1 given, at least 0 needed"),
        (("v41", 1, 12), "page_size: 12 given, a power of two needed"),
    ],
)
def test_caches_that_cannot_be_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        lk.new_kv_cache(*arguments)


# --- checked mode -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["store_kv", "norm_rope_store_kv", "load_kv"])
@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([0, 32, 1], r"slots: 32 is past the cache's 31 \(2 pages of 16\)"),
        ([0, 2**40, 1], r"slots: 1099511627776 is past the cache's 31"),
        ([0, -2, 1], r"slots: -2 is negative; only -1 marks a row without a slot"),
    ],
)
def test_checked_mode_refuses_slots_outside_the_cache(arguments, op, slots, message):
    call(op, arguments | {"slots": torch.tensor(slots)})
    arguments["cache"].fill_(0xA5)
    with lk.checked():
        assert_refused(op, arguments | {"slots": torch.tensor(slots)}, ValueError, message)
        call(op, arguments | {"slots": torch.tensor([-1, 31, 0])})
        with lk.checked(False):
            call(op, arguments | {"slots": torch.tensor(slots)})
        assert_refused(op, arguments | {"slots": torch.tensor(slots)}, ValueError, message)
    call(op, arguments | {"slots": torch.tensor(slots)})


@pytest.mark.parametrize(("position", "shown"), [(8, "8"), (-1, "-1"), (2**40, "1099511627776")])
def test_checked_mode_refuses_positions_outside_the_table(arguments, position, shown):
    positions = torch.tensor([0, position, 3])
    call("norm_rope_store_kv", arguments | {"positions": positions})
    message = rf"positions: {shown} is outside the rotation table's 0..7"
    with lk.checked():
        assert_refused("norm_rope_store_kv", arguments | {"positions": positions}, ValueError, message)
        call("norm_rope_store_kv", arguments)
        with pytest.raises(ValueError, match=message):
            lk.rope_fake_quant(X, TABLE, kind="index", positions=positions)


def test_checked_mode_accepts_no_rows(arguments):
    none = torch.zeros(0, dtype=torch.int64)
    with lk.checked():
        call("store_kv", arguments | {"rows": arguments["rows"][:0], "slots": none})
        call("load_kv", arguments | {"slots": none})


def test_checked_mode_ends_with_an_error(arguments):
    slots = {"slots": torch.tensor([0, 99, 1])}
    with pytest.raises(ValueError, match="99 is past"), lk.checked():
        call("store_kv", arguments | slots)
    call("store_kv", arguments | slots)


# --- tracing ----------------------------------------------------------------------------------------------------------


def everything(rows, weight, cache, slots, positions, freqs, query):
    out = torch.zeros(3, 512, dtype=BF16)
    lk.store_kv(rows, cache, slots, **FORM, freqs=freqs[:3])
    first = lk.load_kv(cache, slots, **FORM)
    lk.norm_rope_store_kv(rows, weight, cache, slots, positions, freqs, eps=1e-6, **FORM, query=query)
    lk.load_kv(cache, slots, **FORM, out=out)
    pages = lk.load_kv_pages(cache, **FORM)
    return first, out, pages, lk.rope_fake_quant(rows, freqs, kind="latent", positions=positions), query + 0, cache + 0


def test_a_compiled_function_traces_whole_and_gives_the_same_bytes(arguments):
    given = [arguments[n] for n in ("rows", "weight", "cache", "slots", "positions", "freqs", "query")]
    copies = [x.clone() for x in given]
    before = arguments["query"].clone()
    want = everything(*given)
    got = torch.compile(everything, fullgraph=True, backend="aot_eager")(*copies)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert torch.equal(copies[2], given[2])  # the inputs are mutated as well
    assert torch.equal(copies[6], given[6])
    assert not torch.equal(copies[6], before)


def test_a_slab_view_can_be_written_under_compilation():
    slab = torch.full((2, 9000), 0xA5, dtype=U8)
    rows, slots = random_rows(2, BF16), torch.tensor([3, 31])

    def write(slab, rows, slots):
        lk.store_kv(rows, slab[:, 100:8804], slots, **FORM)
        return slab

    want = write(slab.clone(), rows, slots)
    assert torch.equal(torch.compile(write, fullgraph=True, backend="aot_eager")(slab, rows, slots), want)


@pytest.mark.parametrize("layout", ["v4", "v41_fp4"])
@pytest.mark.parametrize("optional", [False, True])
def test_the_op_records_pass_pytorchs_checks(arguments, layout, optional):
    ops, query = torch.ops.latentkv, arguments["query"] if optional else None
    cache = lk.new_kv_cache(layout, 2, 16)
    rows, weight, slots, positions = (arguments[n] for n in ("rows", "weight", "slots", "positions"))
    end = (layout, 16)
    check = torch.library.opcheck
    check(ops.store_kv.default, (rows, cache, slots, *end, TABLE[:3].clone() if optional else None))
    check(ops.norm_rope_store_kv.default, (rows, weight, cache, slots, positions, TABLE, 1e-6, *end, query))
    check(ops.load_kv.default, (cache, slots, *end, torch.zeros(3, 512, dtype=BF16)))
    check(ops.load_kv_pages.default, (cache, *end))
    where = positions if optional else None
    check(ops.rope_fake_quant.default, (X, TABLE if optional else TABLE[:3].clone(), "index", where, optional))


def test_meta_tensors_give_shapes_and_dtypes(arguments):
    meta = {n: x.to("meta") if isinstance(x, torch.Tensor) else x for n, x in arguments.items()}
    assert call("store_kv", meta) is None
    assert call("norm_rope_store_kv", meta) is None
    rows = call("load_kv", meta)
    assert (rows.shape, rows.dtype, rows.device.type) == ((3, 512), BF16, "meta")
    pages = call("load_kv_pages", meta)
    assert (pages.shape, pages.dtype) == ((2, 16, 512), BF16)
    x = lk.rope_fake_quant(X.half().to("meta"), meta["freqs"], kind="index", positions=meta["positions"])
    assert (x.shape, x.dtype) == (X.shape, torch.float16)
