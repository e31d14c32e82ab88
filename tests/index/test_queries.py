"""Packed index queries and head weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import latentkv as lk
from latentkv.reference import index as reference

SHAPES = [(layout, heads) for layout in ("packed", "flydsl") for heads in (16, 32, 48, 64)] + [
    ("packed", 1),
    ("packed", 5),
]


def random_query(tokens: int, heads: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(tokens, heads, 128, generator=generator)
    return (query * 2.0 ** torch.randint(-16, 16, (tokens, heads, 1), generator=generator)).bfloat16()


def expected(oracle, query: Tensor, angles: Tensor, positions: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    rows = angles.numpy()[np.where((positions >= 0) & (positions < 512), positions, 0)][:, None]
    payload, words = oracle.bytes_of(oracle.stage1(oracle.rope(query.float().numpy(), rows)))
    if layout == "packed":
        return payload.flatten(0, 1), words.flatten()
    return payload, oracle.flydsl_scale(words)


@pytest.mark.parametrize(("layout", "heads"), SHAPES)
@pytest.mark.parametrize("tokens", [1, 7])
def test_queries_equal_the_oracle_byte_by_byte(backend, oracle, angles, layout, heads, tokens):
    query, positions = random_query(tokens, heads), torch.arange(tokens) * 37
    payload, scale = lk.pack_index_query(
        query.to(backend.device), angles.to(backend.device), positions.to(backend.device), layout=layout
    )
    want_payload, want_scale = expected(oracle, query, angles, positions, layout)
    assert torch.equal(payload.cpu(), want_payload)
    assert torch.equal(scale.cpu(), want_scale)


@pytest.mark.parametrize(
    ("token", "head", "dim", "heads", "payload_at", "flydsl_at", "packed_at"),
    [(2, 37, 100, 64, 10610, 726, 663), (1, 17, 64, 32, 3168, 389, 198)],
)
def test_worked_query_addresses(backend, token, head, dim, heads, payload_at, flydsl_at, packed_at):
    query = torch.zeros(3, heads, 128, dtype=torch.bfloat16, device=backend.device)
    query[token, head, dim] = 6.0 * 2.0**30
    identity = torch.tensor([1.0, 0.0], device=backend.device).repeat(32).unsqueeze(0)
    positions = torch.zeros(3, dtype=torch.int32, device=backend.device)
    for layout, scale_at in (("flydsl", flydsl_at), ("packed", packed_at)):
        payload, scale = lk.pack_index_query(query, identity, positions, layout=layout)
        assert payload.flatten().nonzero().flatten().tolist() == [payload_at]
        assert payload.flatten()[payload_at] == 7  # an even value: the low nibble
        exponents = scale.view(torch.uint8).flatten()
        assert (exponents == 157).nonzero().flatten().tolist() == [scale_at]


def test_absent_head_tiles_have_zero_bytes(backend, angles):
    query = random_query(3, 16).to(backend.device)
    positions = torch.zeros(3, dtype=torch.int64, device=backend.device)
    _, scale = lk.pack_index_query(query, angles.to(backend.device), positions, layout="flydsl")
    assert scale.shape == (3, 1, 4, 16, 4)
    assert (scale[..., 0] != 0).all()
    assert scale[..., 1:].count_nonzero() == 0


@pytest.mark.parametrize("layout", ["packed", "flydsl"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_flat_and_strided_queries_give_the_same_bytes(backend, angles, layout, dtype):
    query, table = random_query(3, 32).to(backend.device), angles.to(backend.device)
    positions = torch.arange(3, dtype=dtype, device=backend.device) * 5
    wide = torch.zeros(3, 32 * 128 + 64, dtype=torch.bfloat16, device=backend.device)
    wide[:, 8 : 8 + 32 * 128] = query.flatten(1)
    heads_apart = torch.zeros(3, 32, 192, dtype=torch.bfloat16, device=backend.device)
    heads_apart[..., :128] = query
    positions_apart = torch.stack((positions, positions + 1), 1)[:, 0]
    want = lk.pack_index_query(query, table, positions, layout=layout)
    for other in (query.flatten(1), wide[:, 8 : 8 + 32 * 128], heads_apart[..., :128]):
        got = lk.pack_index_query(other, table, positions_apart, layout=layout)
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[1], want[1])


def test_a_query_position_outside_the_table_reads_row_0(backend, oracle, angles):
    query = random_query(1, 16).expand(4, 16, 128).contiguous()
    table = angles[3:].contiguous()  # row 0 is no identity
    positions = torch.tensor([0, -1, 509, 2**31 - 1], dtype=torch.int32)
    payload, _ = lk.pack_index_query(
        query.to(backend.device), table.to(backend.device), positions.to(backend.device), layout="flydsl"
    )
    want, _ = expected(oracle, query[:1], table, torch.tensor([0]), "flydsl")
    assert torch.equal(payload.cpu(), want.expand(4, 16, 64))


@pytest.mark.parametrize("layout", ["packed", "flydsl"])
def test_no_tokens_give_empty_tensors(backend, angles, layout):
    query = torch.zeros(0, 16, 128, dtype=torch.bfloat16, device=backend.device)
    none = torch.zeros(0, dtype=torch.int64, device=backend.device)
    partials = torch.zeros(2, 0, 16, device=backend.device)
    payload, scale, weights = lk.pack_index_query_weights(
        query, angles.to(backend.device), none, partials, 0.5, layout=layout
    )
    assert payload.shape == ((0, 64) if layout == "packed" else (0, 16, 64))
    assert scale.shape == ((0,) if layout == "packed" else (0, 1, 4, 16, 4))
    assert weights.shape == (0, 16)


def test_a_nan_poisons_one_group_of_one_head(backend, angles):
    query = random_query(2, 16)
    clean, _ = reference.pack_index_query(query, angles, torch.tensor([1, 2]), "packed")
    query[1, 3, 10] = torch.nan
    payload, scale = lk.pack_index_query(
        query.to(backend.device),
        angles.to(backend.device),
        torch.tensor([1, 2], device=backend.device),
        layout="packed",
    )
    values = lk.dequantize_index(payload, scale).cpu().unflatten(1, (4, 32))
    bad = values.isnan().all(-1)
    assert bad.nonzero().tolist() == [[16 + 3, 0]]
    assert values.isnan().sum() == 32
    same = (payload.cpu() == clean).unflatten(1, (4, 16)).all(-1)
    assert bool((same | bad).all())
    assert payload[19, :16].count_nonzero() == 0


# --- head weights -----------------------------------------------------------------------------------------------------


def pack_weights(backend, angles: Tensor, partials: Tensor, scale: float, **options) -> Tensor:
    tokens, heads = partials.shape[1:]
    query = torch.zeros(tokens, heads, 128, dtype=torch.bfloat16, device=backend.device)
    positions = torch.zeros(tokens, dtype=torch.int64, device=backend.device)
    return lk.pack_index_query_weights(
        query, angles.to(backend.device), positions, partials.to(backend.device), scale, layout="packed", **options
    )[2].cpu()


def test_partials_are_added_left_to_right(backend, angles):
    """2^24 + 1 is a tie that drops the 1; another order keeps 2 of them."""
    partials = torch.tensor([2.0**24, 1.0, 1.0, -(2.0**24)]).view(4, 1, 1).expand(4, 1, 16).contiguous()
    assert (pack_weights(backend, angles, partials, 1.0) == 0).all()
    other = torch.tensor([1.0, 1.0, 2.0**24, -(2.0**24)]).view(4, 1, 1).expand(4, 1, 16).contiguous()
    assert (pack_weights(backend, angles, other, 1.0) == 2).all()


def test_the_sum_is_rounded_before_the_factor(backend, angles):
    """1 + 2^-8 is a bf16 tie and becomes 1; times 3 is 3. Rounding once would give 3.015625."""
    partials = torch.tensor([1.0, 2.0**-8]).view(2, 1, 1).expand(2, 2, 16).contiguous()
    assert (pack_weights(backend, angles, partials, 3.0) == 3.0).all()


@pytest.mark.parametrize(("heads", "factor"), [(32, 2.0**-6), (64, 0.011048543266952038)])
@pytest.mark.parametrize("splits", [1, 10])
def test_weights_of_the_model_equal_a_loop(backend, angles, heads, factor, splits):
    assert np.float32(128**-0.5 * heads**-0.5) == np.float32(factor)
    partials = torch.randn(splits, 5, heads, generator=torch.Generator().manual_seed(splits))
    total = partials[0].numpy().copy()
    for partial in partials[1:].numpy():
        total += partial
    want = (torch.from_numpy(total).bfloat16().float() * torch.tensor(factor, dtype=torch.float32)).bfloat16()
    got = pack_weights(backend, angles, partials, 128**-0.5 * heads**-0.5)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, want)
    wide = pack_weights(backend, angles, partials, factor, weights_dtype=torch.float32)
    assert wide.dtype == torch.float32
    assert torch.equal(wide, want.float())


def test_strided_partials_give_the_same_weights(backend, angles):
    partials = torch.randn(3, 4, 16, generator=torch.Generator().manual_seed(2)).to(backend.device)
    spread = torch.zeros(3, 9, 40, device=backend.device)
    spread[:, 1:9:2, 8:24] = partials
    want = pack_weights(backend, angles, partials, 0.25)
    assert torch.equal(pack_weights(backend, angles, spread[:, 1:9:2, 8:24], 0.25), want)


@pytest.mark.parametrize("layout", ["packed", "flydsl"])
def test_weights_leave_the_query_bytes_alone(backend, angles, layout):
    query, positions = random_query(9, 48).to(backend.device), torch.arange(9, device=backend.device)
    table = angles.to(backend.device)
    partials = torch.randn(2, 9, 48, device=backend.device)
    payload, scale, _ = lk.pack_index_query_weights(query, table, positions, partials, 1.0, layout=layout)
    want = lk.pack_index_query(query, table, positions, layout=layout)
    assert torch.equal(payload, want[0])
    assert torch.equal(scale, want[1])


def test_a_nan_weight_stays_in_its_place(backend, angles):
    partials = torch.ones(2, 3, 16)
    partials[1, 1, 7] = torch.nan
    partials[0, 2, 8] = torch.inf
    weights = pack_weights(backend, angles, partials, 0.5)
    assert weights.isnan().nonzero().tolist() == [[1, 7]]
    assert weights.isinf().nonzero().tolist() == [[2, 8]]
    assert (weights[0] == 1).all()


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "layout", "error", "text"),
    [
        (
            torch.zeros(2, 8, 128, dtype=torch.bfloat16),
            "flydsl",
            ValueError,
            "8 heads given, a multiple of 16",
        ),
        (torch.zeros(2, 80, 128, dtype=torch.bfloat16), "flydsl", ValueError, "80 heads given"),
        (torch.zeros(2, 65, 128, dtype=torch.bfloat16), "packed", ValueError, "65 heads given, 1 up to 64"),
        (torch.zeros(2, 0, 128, dtype=torch.bfloat16), "packed", ValueError, "0 heads given"),
        (torch.zeros(2, 100, dtype=torch.bfloat16), "packed", ValueError, r"query: shape \[2, 100\]"),
        (torch.zeros(2, 16, 128), "packed", TypeError, "query: dtype float32"),
        (torch.zeros(2, 16, 256, dtype=torch.bfloat16)[..., ::2], "packed", ValueError, "query: last stride 2"),
        (torch.zeros(3, 16, 128, dtype=torch.bfloat16), "packed", ValueError, "positions: shape"),
        (torch.zeros(2, 16, 128, dtype=torch.bfloat16), "fused", ValueError, "'fused' is none of packed, flydsl"),
    ],
)
def test_bad_queries_raise(angles, query, layout, error, text):
    with pytest.raises(error, match=text):
        lk.pack_index_query(query, angles, torch.tensor([0, 1]), layout=layout)


@pytest.mark.parametrize(
    ("partials", "dtype", "error", "text"),
    [
        (torch.zeros(0, 2, 16), torch.bfloat16, ValueError, "no partial sums"),
        (torch.zeros(2, 16), torch.bfloat16, ValueError, "partials: shape"),
        (torch.zeros(1, 2, 16, dtype=torch.bfloat16), torch.bfloat16, TypeError, "partials: dtype bfloat16"),
        (torch.zeros(1, 2, 16), torch.float16, TypeError, "weights_dtype: torch.float16"),
    ],
)
def test_bad_partials_raise(angles, partials, dtype, error, text):
    query = torch.zeros(2, 16, 128, dtype=torch.bfloat16)
    with pytest.raises(error, match=text):
        lk.pack_index_query_weights(
            query, angles, torch.tensor([0, 1]), partials, 1.0, layout="packed", weights_dtype=dtype
        )


def test_every_op_has_a_true_schema_and_a_fake_that_agrees(angles):
    """What torch.compile and graph capture rely on."""
    checks = {"test_utils": ("test_schema", "test_faketensor")}
    query, positions = random_query(3, 16), torch.arange(3)
    partials = torch.zeros(2, 3, 16)
    for layout in ("packed", "flydsl"):
        torch.library.opcheck(torch.ops.latentkv.pack_index_query, (query, angles, positions, layout), **checks)
        for dtype in (torch.bfloat16, torch.float32):
            given = (query, angles, positions, partials, 0.5, layout, dtype)
            torch.library.opcheck(torch.ops.latentkv.pack_index_query_weights, given, **checks)
    rows, weight, slots = torch.ones(3, 128), torch.ones(128), torch.tensor([1, 2, -1])
    for layout in ("fused", "split64"):
        cache = lk.new_index_key_cache(layout, 2)
        pages, form = (cache.payload, cache.scale), (layout, 64)
        given = (rows, weight, *pages, slots, positions, angles, 1e-20, 2, *form)
        torch.library.opcheck(torch.ops.latentkv.store_index_key, given, **checks)
        torch.library.opcheck(torch.ops.latentkv.store_index_key_plain, (rows, *pages, slots, True, *form), **checks)
        torch.library.opcheck(torch.ops.latentkv.load_index_key, (*pages, slots, *form), **checks)
    packed = lk.load_index_key(cache, slots)
    torch.library.opcheck(torch.ops.latentkv.dequantize_index, packed, **checks)
