"""Arguments across the ops: what is refused before any byte changes, and that no op records a gradient."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

import latentkv as lk

LAYOUT = lk.KVLayout.V41_FP4
TABLE = torch.zeros(8, 64)
AT = torch.tensor([1, 2, 3])


def cache() -> torch.Tensor:
    return lk.new_kv_cache(LAYOUT, 2, 16)


def numbers() -> list[tuple[str, Callable[[object], object]]]:
    """Every integer argument by its name, as a call of its op."""
    logits, lengths, rows = torch.zeros(2, 8), torch.tensor([8, 8]), torch.zeros(3, 1024)
    keys = lk.new_index_key_cache("fused", 1)
    query, attended = torch.zeros(1, 4, 512).bfloat16(), lk.Rows(cache(), torch.tensor([[1]]), LAYOUT, 16)
    table = torch.zeros(2, 1, dtype=torch.int32)

    def pairs(**options: object) -> object:
        state = torch.zeros(8, 1024)
        form = {"eps": 1e-6, "layout": LAYOUT, "page_size": 16, **options}
        return lk.compress2(rows, state, torch.ones(512), cache(), AT, AT, AT, TABLE, **form)  # type: ignore[arg-type]

    def pool(**options: object) -> object:
        parts = torch.zeros(3, 512), torch.zeros(3, 512), AT, AT, AT, AT, torch.zeros(8, 512), torch.zeros(8, 512)
        return lk.pool_pairs(*parts, **{"pad_row": 0, **options})  # type: ignore[arg-type]

    return [
        ("num_pages", lambda n: lk.new_kv_cache(LAYOUT, n, 16)),  # type: ignore[arg-type]
        ("page_size", lambda n: lk.new_kv_cache(LAYOUT, 1, n)),  # type: ignore[arg-type]
        ("page_size", lambda n: lk.load_kv(cache(), AT, layout=LAYOUT, page_size=n)),  # type: ignore[arg-type]
        ("num_pages", lambda n: lk.new_index_key_cache("fused", n)),  # type: ignore[arg-type]
        (
            "ratio",
            lambda n: lk.store_index_key(torch.zeros(3, 128), torch.ones(128), keys, AT, AT, TABLE, eps=1e-6, ratio=n),
        ),  # type: ignore[arg-type]
        ("ring", lambda n: pairs(ring=n)),
        ("draft_len", lambda n: pairs(draft_len=n)),
        ("pad_row", lambda n: pool(pad_row=n)),
        ("ring", lambda n: pool(ring=n)),
        ("bucket", lambda n: lk.pad_page_table(table, bucket=n)),  # type: ignore[arg-type]
        ("page_size", lambda n: lk.pad_page_table(table, page_size=n)),  # type: ignore[arg-type]
        ("columns", lambda n: lk.pad_page_table(table, columns=n)),  # type: ignore[arg-type]
        ("rows", lambda n: lk.schedule_workers(n, 8)),  # type: ignore[arg-type]
        ("max_len", lambda n: lk.schedule_workers(1, n)),  # type: ignore[arg-type]
        ("next_n", lambda n: lk.schedule_workers(1, 8, next_n=n)),  # type: ignore[arg-type]
        ("workers", lambda n: lk.decode_schedule(lengths, workers=n, max_len=8)),  # type: ignore[arg-type]
        ("max_len", lambda n: lk.decode_schedule(lengths, workers=8, max_len=n)),  # type: ignore[arg-type]
        ("block", lambda n: lk.prefill_schedule(lengths, workers=8, max_len=8, block=n)),  # type: ignore[arg-type]
        ("k", lambda n: lk.select_topk(logits, lengths, n)),  # type: ignore[arg-type]
        ("blocks", lambda n: lk.select_blocks(logits, lengths, blocks=n)),  # type: ignore[arg-type]
        ("block_size", lambda n: lk.select_blocks(logits, lengths, blocks=2, block_size=n)),  # type: ignore[arg-type]
        ("splits", lambda n: lk.sparse_mla(query, attended, splits=n)),  # type: ignore[arg-type]
        ("k", lambda n: lk.route_topk(logits, k=n)),  # type: ignore[arg-type]
        ("num_shared", lambda n: lk.route_topk(logits, k=2, num_shared=n)),  # type: ignore[arg-type]
    ]


CALLS = numbers()
IDS = [f"{n}-{name}" for n, (name, _) in enumerate(CALLS)]


@pytest.mark.parametrize(("name", "call"), CALLS, ids=IDS)
def test_integers_are_checked_by_name(name, call):
    for wrong in (2.0, "2", True, torch.tensor(2), [2]):
        with pytest.raises(TypeError, match=f"^{name}: {type(wrong).__name__} given, an integer needed$"):
            call(wrong)
    with pytest.raises(ValueError, match=f"^{name}: -1 given"):
        call(-1)


@pytest.mark.parametrize(("name", "call"), CALLS, ids=IDS)
def test_integers_of_numpy_are_integers(name, call):
    fits = {"workers": 8, "page_size": 16, "ring": 2, "draft_len": 1, "num_pages": 1, "block": 8}.get(name, 1)
    call(np.int64(fits))


@pytest.mark.parametrize("wrong", [float("inf"), float("nan"), 1e300])
def test_factors_are_finite_in_fp32(wrong):
    x = torch.ones(1, 512).bfloat16()
    index = torch.zeros(1, 1, 128).bfloat16(), TABLE, AT[:1], torch.zeros(1, 1, 1)
    calls: list[Callable[[], object]] = [
        lambda: lk.head_weights(x, x, wrong),
        lambda: lk.route_topk(torch.zeros(1, 4), k=1, scale=wrong),
        lambda: lk.pack_index_query_weights(*index, wrong, layout="packed"),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"^scale: .* given, a finite number needed$"):
            call()
    for kind in ("a", None, [1.0], torch.tensor(1.0)):
        with pytest.raises(TypeError, match=r"^scale: .* given, a number needed$"):
            lk.head_weights(x, x, kind)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"^eps: .* given, a number needed$"):
            lk.store_index_key(
                torch.zeros(1, 128), torch.ones(128), lk.new_index_key_cache("fused", 1), AT[:1], AT[:1], TABLE,
                eps=kind, ratio=1,  # type: ignore[arg-type]
            )  # fmt: skip


def test_outputs_whose_elements_overlap_are_refused_before_anything_is_written():
    rows, weight, pages = torch.randn(3, 512).bfloat16(), torch.ones(512), cache()
    form = {"eps": 1e-6, "layout": LAYOUT, "page_size": 16}
    one, _wide = torch.zeros(1, 512).bfloat16(), rows[:, None].expand(3, 4, 512)
    pairs, state = torch.randn(3, 1024), torch.zeros(8, 1024)
    calls: list[Callable[[], object]] = [
        lambda: lk.load_kv(pages, AT, layout=LAYOUT, page_size=16, out=one.expand(3, 512)),
        lambda: lk.compress1(rows, weight, pages, AT, AT, TABLE, out=one.expand(3, 512), **form),
        lambda: lk.norm_rope_store_kv(
            rows, weight, pages, AT, AT, TABLE, query=rows[:, None].expand(3, 4, 512), **form
        ),
        lambda: lk.compress2(pairs, state, weight, pages, AT, AT, AT, TABLE, out=one.expand(3, 512), **form),
        lambda: lk.compress2(pairs, state[:1].expand(8, 1024), weight, pages, AT, AT, AT, TABLE, **form),
        lambda: lk.route_topk(torch.zeros(32).as_strided((3, 8), (4, 1)), k=2, partials=torch.randn(2, 3, 8)),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="elements overlap"):
            call()
    assert not pages.any()
    assert not state.any()
    # rows apart from each other are fine, in any order of dimensions, and so are rows of no elements
    heads = torch.zeros(4, 3, 512).bfloat16().transpose(0, 1)
    lk.norm_rope_store_kv(rows, weight, pages, AT, AT, TABLE, query=heads, **form)
    lk.load_kv(pages, AT[:0], layout=LAYOUT, page_size=16, out=one[:0])


def test_logits_may_not_lie_in_the_partials_whose_sum_they_receive():
    memory = torch.randn(4, 3, 8)
    for inside in (memory[0], memory[1], memory.flatten()[5:29].view(3, 8)):
        with pytest.raises(ValueError, match=r"^logits: overlaps partials"):
            lk.route_topk(inside, k=2, partials=memory[:2])
    want = memory[0] + memory[1]
    lk.route_topk(memory[2], k=2, partials=memory[:2])
    assert torch.equal(memory[2], want)


def test_no_op_records_a_gradient():
    x, w = torch.randn(2, 512).bfloat16().requires_grad_(), torch.randn(4, 512, requires_grad=True)
    for op in (lk.linear_fp32, lk.router_logits, lk.router_partials, lambda x, w: lk.head_weights(x, w, 0.1)):
        assert not op(x, w).requires_grad
    weights, _ = lk.route_topk(lk.router_logits(x, w).requires_grad_(), k=2)
    assert not weights.requires_grad
    assert not lk.rope_fake_quant(x, TABLE, kind="latent", positions=AT[:2]).requires_grad
    pages = cache()
    query = torch.randn(2, 4, 512).bfloat16().requires_grad_()
    form = {"eps": 1e-6, "layout": LAYOUT, "page_size": 16}
    lk.norm_rope_store_kv(x, w[0], pages, AT[:2], AT[:2], TABLE, query=query, **form)
    assert pages.any()
    assert query.is_leaf
    assert not lk.compress1(x, w[0], pages, AT[:2], AT[:2], TABLE, **form).requires_grad
    out, lse = lk.sparse_mla(query, lk.Rows(pages, AT[:2, None], LAYOUT, 16))
    assert not out.requires_grad
    assert not lse.requires_grad


def test_checked_mode_finds_pairs_without_a_state():
    rows, state = torch.randn(3, 1024), torch.zeros(8, 1024)
    call = (rows, state, torch.ones(512), cache(), torch.tensor([0, 2, 3]), AT, torch.tensor([99, 1, 4]), TABLE)
    form = {"eps": 1e-6, "layout": LAYOUT, "page_size": 16}
    with lk.checked(), pytest.raises(ValueError, match=r"^requests: 4 has no rows in a state of 8 \(ring 2\)$"):
        lk.compress2(*call, **form)
    assert not state.any()
    lk.compress2(*call, **form)
    with lk.checked():  # the first row is padded, so its request may be anything
        lk.compress2(*call[:6], torch.tensor([99, 1, 3]), TABLE, **form)


def test_pages_that_int32_does_not_hold_are_no_pages():
    table, _ = lk.pad_page_table(torch.tensor([[2**33, 5, -(2**40), 2**31 - 1]]), bucket=3)
    assert table[0, :5].tolist() == [-1, 5, -1, 2**31 - 1, 0]
    with pytest.raises(ValueError, match=r"^device: cuda:99 given"):
        lk.schedule_workers(1, 8, device="cuda:99")
    with pytest.raises(ValueError, match=r"^device: 'nowhere' given"):
        lk.schedule_workers(1, 8, device="nowhere")


@pytest.mark.parametrize("block_size", [16, 2**40])
def test_blocks_larger_than_the_row_are_one_block(block_size):
    logits, lengths = torch.randn(2, 11), torch.tensor([11, 3])
    ids = lk.select_blocks(logits, lengths, blocks=2, block_size=block_size)
    assert ids.tolist() == [[0, -1], [0, -1]]
    got = lk.select_topk_in_blocks(logits, lengths, ids, 4, block_size=block_size)
    assert torch.equal(got[0], lk.select_topk(logits, lengths, 4)[0])


def test_packed_queries_are_told_apart_by_their_scales():
    cached = lk.new_index_key_cache("fused", 1)
    rest = cached, torch.zeros(1, 1, dtype=torch.int32), torch.tensor([1])
    payload = torch.zeros(1, 20, 64, dtype=torch.int8)
    with pytest.raises(TypeError, match=r"^query scale: dtype float32 given"):
        lk.index_logits((payload, torch.zeros(20)), torch.zeros(1, 20), *rest)
    scale = torch.zeros(1, 1, 4, 16, 4, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"^weights: 20 heads given, a multiple of 16 up to 64 accepted$"):
        lk.index_logits((payload, scale), torch.zeros(1, 20), *rest)


def test_outputs_may_not_lie_in_what_is_still_read():
    numbers = torch.zeros(64, dtype=torch.int32)
    numbers[:2] = torch.tensor([300, 600])
    with pytest.raises(ValueError, match=r"^out: overlaps lengths"):
        lk.decode_schedule(numbers[:2], workers=4, max_len=1024, out=numbers[:16].view(4, 4))
    with pytest.raises(ValueError, match=r"^out: overlaps row_to_batch"):
        lk.prefill_schedule(
            torch.ones(2).int(), workers=2, max_len=8, row_to_batch=numbers[5:7], out=numbers[:12].view(2, 6)
        )
    assert numbers[:3].tolist() == [300, 600, 0]
    weights = torch.ones(2, 16)
    query = torch.zeros(32, 64, dtype=torch.int8), torch.zeros(32, dtype=torch.int32)
    rest = lk.new_index_key_cache("fused", 1), torch.zeros(2, 1, dtype=torch.int32), torch.tensor([1, 1])
    with pytest.raises(ValueError, match=r"^out: overlaps weights"):
        lk.index_logits(query, weights, *rest, max_len=16, out=weights)
    assert weights.all()
    rows, pages = torch.ones(3, 4, 512).bfloat16(), cache()
    form = {"eps": 1e-6, "layout": LAYOUT, "page_size": 16}
    with pytest.raises(ValueError, match=r"^query: overlaps rows"):
        lk.norm_rope_store_kv(rows[:, 0], torch.ones(512), pages, AT, AT, TABLE, query=rows, **form)
    with pytest.raises(ValueError, match=r"^out: overlaps rows"):
        lk.compress1(rows[:, 0], torch.ones(512), pages, AT, AT, TABLE, out=rows[:, 0], **form)
    inside = pages.flatten()[:3072].view(torch.bfloat16).view(3, 512)
    with pytest.raises(ValueError, match=r"^out: overlaps cache"):
        lk.load_kv(pages, AT, layout=LAYOUT, page_size=16, out=inside)
    assert not pages.any()


def test_flags_are_true_or_false():
    for wrong in ("no", None, 1, torch.tensor(True)):
        with pytest.raises(TypeError, match=r"^renormalize: .* given, True or False needed$"):
            lk.route_topk(torch.zeros(1, 4), k=1, renormalize=wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"^inverse: .* given, True or False needed$"):
            lk.rope_fake_quant(torch.zeros(2, 64), TABLE, kind="latent", positions=AT[:2], inverse=wrong)  # type: ignore[arg-type]


def test_a_query_whose_heads_and_tokens_are_exchanged_is_refused():
    rest = (
        torch.ones(2, 16),
        lk.new_index_key_cache("fused", 1),
        torch.zeros(2, 1, dtype=torch.int32),
        torch.ones(2).int(),
    )
    payload, scale = torch.zeros(16, 2, 64, dtype=torch.int8), torch.zeros(16, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^query payload: shape \[16, 2, 64\] given"):
        lk.index_logits((payload, scale), *rest)
    lk.index_logits((payload.view(2, 16, 64), scale.view(2, 16)), *rest)


def test_a_conjugated_rotation_table_is_one():
    table = torch.polar(torch.ones(8, 32), torch.rand(8, 32))
    x = torch.randn(3, 64)
    want = lk.rope_fake_quant(x, table.conj().resolve_conj(), kind="latent", positions=AT)
    assert torch.equal(lk.rope_fake_quant(x, table.conj(), kind="latent", positions=AT), want)


@pytest.mark.parametrize("wrong", [1e39, 2**2000, float("nan")])
def test_the_scale_of_scores_is_finite_in_fp32(wrong):
    rows = lk.Rows(cache(), torch.tensor([[1]]), LAYOUT, 16)
    with pytest.raises(ValueError, match=r"^scale: "):
        lk.sparse_mla(torch.zeros(1, 4, 512).bfloat16(), rows, scale=wrong)


def test_columns_of_one_buffer_are_apart():
    """A projection's query and latent, and a state's values and scores, are usually columns of one tensor."""
    wide = torch.randn(3, 4 * 512 + 512 + 64).bfloat16()
    query, rows = wide[:, :2048].view(3, 4, 512), wide[:, 2048:2560]
    form = {"eps": 1e-6, "layout": LAYOUT, "page_size": 16}
    want, pages, expected = query.clone(), cache(), cache()
    lk.norm_rope_store_kv(rows.clone(), torch.ones(512), expected, AT, AT, TABLE, query=want, **form)
    lk.norm_rope_store_kv(rows, torch.ones(512), pages, AT, AT, TABLE, query=query, **form)
    assert torch.equal(query, want)
    assert torch.equal(pages, expected)
    with pytest.raises(ValueError, match=r"^query: overlaps rows"):
        lk.norm_rope_store_kv(wide[:, 2040:2552], torch.ones(512), pages, AT, AT, TABLE, query=query, **form)
    with pytest.raises(ValueError, match=r"^query: overlaps rows"):
        lk.norm_rope_store_kv(
            wide.as_strided((3, 512), (512, 1), 2048), torch.ones(512), pages, AT, AT, TABLE, query=query, **form
        )
    state = torch.zeros(8, 1024)
    x = torch.randn(3, 512)
    lk.pool_pairs(x, x, AT, AT, AT, AT, state[:, :512], state[:, 512:], 7)
    assert state.any()
    for kv, a, b in ((x, state[:, :512], state[:, :512]), (state[:3, :512], state[:, :512], state[:, 512:])):
        with pytest.raises(ValueError, match=r"^state_kv: overlaps (state_score|kv)"):
            lk.pool_pairs(kv, x, AT, AT, AT, AT, a, b, 7)


def test_sizes_that_no_kernel_can_hold_are_refused_by_name():
    x, state = torch.zeros(1, 512), torch.zeros(8, 512)
    for huge in (2**31, 2**63, 2**80):
        with pytest.raises(ValueError, match=rf"^ring: {huge} given, a power of two up to {2**30} accepted$"):
            lk.pool_pairs(x, x, AT[:1], AT[:1], AT[:1], AT[:1], state, state.clone(), 7, ring=huge)
        with pytest.raises(ValueError, match=rf"^ratio: {huge} given"):
            lk.store_index_key(
                x[:, :128], torch.ones(128), lk.new_index_key_cache("fused", 1), AT[:1], AT[:1], TABLE,
                eps=1e-6, ratio=huge,
            )  # fmt: skip
    for wrong in (np.array(1.5), np.array([1, 2])):
        with pytest.raises(TypeError, match=r"^k: ndarray given, an integer needed$"):
            lk.route_topk(torch.zeros(1, 4), k=wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^scale: ndarray given, a number needed$"):
        lk.route_topk(torch.zeros(1, 4), k=1, scale=np.array([1.0, 2.0]))  # type: ignore[arg-type]
    for eps in (1e39, -1e-6, float("inf")):
        with pytest.raises(ValueError, match=r"^eps: .* given, a finite number"):
            lk.norm_rope_store_kv(
                x, torch.ones(512), cache(), AT[:1], AT[:1], TABLE, eps=eps, layout=LAYOUT, page_size=16
            )
    with pytest.raises(TypeError, match=r"^page_size: float given, an integer needed$"):
        lk.IndexKeyCache(torch.zeros(1, 64 * 68, dtype=torch.uint8), None, "fused", 64.0)  # type: ignore[arg-type]


def test_checked_positions_are_those_that_rotate():
    """A token past the table whose group's first is in it reads the right row."""
    keys = lk.new_index_key_cache("fused", 1)
    rows = TABLE.shape[0]
    with lk.checked():

        def store(position: int) -> None:
            lk.store_index_key(
                torch.ones(1, 128), torch.ones(128), keys, AT[:1], torch.tensor([position]), TABLE, eps=1e-6, ratio=4
            )

        first = (rows - 1) & -4
        store(first + 3)
        with pytest.raises(ValueError, match=rf"^positions: {first + 4} is outside"):
            store(first + 4)
        with pytest.raises(ValueError, match=r"^positions: -1 is outside"):
            store(-1)
