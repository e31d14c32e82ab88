"""What only a GPU shows: long rows, many programs, far addresses, graphs, streams, compiled code."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import latentkv as lk
from latentkv.reference import select as reference
from tests.gpu import called_behind_a_pause, captured
from tests.select.test_logits import scene

pytestmark = pytest.mark.gpu
GIB = 2**30


def assert_same(got: tuple[Tensor, ...] | list[Tensor], want: tuple[Tensor, ...] | list[Tensor]) -> None:
    assert len(got) == len(want)
    for x, y in zip(got, want, strict=True):
        assert x.shape == y.shape
        assert torch.equal(x.cpu().contiguous().view(torch.int32), y.cpu().contiguous().view(torch.int32))


def scores(rows: int, width: int, seed: int, kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator)
    if kind == "ties":  # a handful of values, so that the split falls among thousands of equals
        return (x * 2).round() / 2
    if kind == "narrow":  # neighbouring fp32 values
        return (torch.randint(0, 5000, x.shape, generator=generator) + 0x3F800000).int().view(torch.float32)
    if kind == "bits":
        return torch.randint(-(2**31), 2**31, x.shape, generator=generator).int().view(torch.float32)
    return x


# --- long rows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["normal", "ties", "narrow", "bits"])
@pytest.mark.parametrize(("width", "k"), [(8192, 512), (8193, 64), (65536, 512), (65535, 2048), (300_000, 1)])
def test_topk_of_long_rows(width, k, kind):
    rows = 5
    logits = scores(rows, width, width + k, kind)
    lengths = torch.tensor([width, width - 1, width // 2, k, 3])
    table = torch.randperm(rows * -(-width // 64), generator=torch.Generator().manual_seed(0)).view(rows, -1).int()
    got = lk.select_topk(logits.cuda(), lengths.cuda(), k, page_table=table.cuda(), page_size=64)
    assert_same(got, reference.select_topk(logits, lengths, k, table, None, 64))


def test_topk_of_a_million():
    logits = scores(2, 1 << 20, 3, "ties")
    lengths = torch.tensor([1 << 20, 777_777])
    got = lk.select_topk(logits.cuda(), lengths.cuda(), 2048)
    assert_same(got, reference.select_topk(logits, lengths, 2048, None, None, 64))


@pytest.mark.parametrize("kind", ["normal", "ties", "bits"])
@pytest.mark.parametrize("width", [4096, 65536, 100_001])
def test_two_levels_of_long_rows(width, kind):
    logits, lengths = scores(3, width, width, kind), torch.tensor([width, width - 7, 900])
    ids = lk.select_blocks(logits.cuda(), lengths.cuda(), blocks=256, block_size=8)
    assert_same([ids], [reference.select_blocks(logits, lengths, 256, 8)])
    got = lk.select_topk_in_blocks(logits.cuda(), lengths.cuda(), ids, 512, block_size=8)
    assert_same(got, reference.select_topk_in_blocks(logits, lengths, ids.cpu(), 512, 8, None, None, 64))


@pytest.mark.parametrize("rows", [1, 64, 1536, 4096])
@pytest.mark.parametrize("next_n", [1, 6])
def test_schedules_of_many_rows(rows, next_n):
    longest = 131072
    lengths = torch.randint(0, longest + 1, (rows,), generator=torch.Generator().manual_seed(rows)).int()
    workers = lk.schedule_workers(rows, longest, device="cuda", next_n=next_n)
    got = lk.decode_schedule(lengths.cuda(), workers=workers, max_len=longest, next_n=next_n)
    assert_same([got], [lk.decode_schedule(lengths, workers=workers, max_len=longest, next_n=next_n)])
    batch = torch.arange(rows) // 3
    workers = lk.schedule_workers(rows, longest, device="cuda")
    got = lk.prefill_schedule(lengths.cuda(), workers=workers, max_len=longest, row_to_batch=batch.cuda())
    assert_same([got], [lk.prefill_schedule(lengths, workers=workers, max_len=longest, row_to_batch=batch)])


@pytest.mark.parametrize("layout", ["fused", "split64", "split8"])
@pytest.mark.parametrize("heads", [16, 32, 48, 64])
def test_logits_of_many_rows_and_keys(layout, heads):
    """Narrow and wide queries beside one another, so that both forms of the product are taken."""
    for spread in (2, 10):
        s = scene(torch.device("cpu"), batches=3, pages=40, rows=33, heads=heads, form=(layout, 64), spread=spread)
        lengths = torch.randint(0, 40 * 64 + 1, (33,), generator=torch.Generator().manual_seed(heads))
        want = lk.index_logits(s.query, s.weights, s.cache, s.table, lengths)
        assert_same([on_gpu(s, lengths)], [want])


def test_more_rows_than_a_grid_axis_holds():
    s = scene(torch.device("cuda"), batches=1, pages=1, rows=1, heads=16)
    rows = 70_000
    query = tuple(x.expand(rows, *x.shape).flatten(0, 1).contiguous() for x in s.query)
    lengths = torch.arange(rows, device="cuda") % 65
    got = lk.index_logits(query, s.weights.expand(rows, -1).contiguous(), s.cache, s.table, lengths)
    one = lk.index_logits(s.query, s.weights, s.cache, s.table, torch.tensor([64], device="cuda"))
    assert torch.equal(got, torch.where(torch.arange(64, device="cuda") < lengths[:, None], one, -torch.inf))


def on_gpu(s, lengths: Tensor, cache: lk.IndexKeyCache | None = None, table: Tensor | None = None) -> Tensor:
    query = tuple(x.cuda() for x in s.query)
    return lk.index_logits(
        query,
        s.weights.cuda(),
        moved(s.cache) if cache is None else cache,
        (s.table if table is None else table).cuda(),
        lengths.cuda(),
    )


def moved(cache: lk.IndexKeyCache) -> lk.IndexKeyCache:
    scale = cache.scale.cuda() if cache.scale is not None else None
    return lk.IndexKeyCache(cache.payload.cuda(), scale, cache.layout, cache.page_size)


def test_pages_that_are_not_aligned_to_words_give_the_same_logits():
    s = scene(torch.device("cpu"), rows=4)
    lengths = torch.tensor([128, 100, 128, 7])
    pages, size = s.cache.payload.shape
    slab = torch.zeros(pages * (size + 3) + 1, dtype=torch.uint8, device="cuda")
    odd = slab[1:].view(pages, size + 3)[:, :size]
    odd.copy_(s.cache.payload)
    cache = lk.IndexKeyCache(odd, None, s.cache.layout, 64)
    assert_same([on_gpu(s, lengths, cache)], [on_gpu(s, lengths)])


@pytest.mark.parametrize("layout", ["fused", "split64", "split8"])
def test_pages_past_four_gibibytes_are_scored(layout):
    s = scene(torch.device("cpu"), form=(layout, 64), rows=4)
    pages = 4 * GIB // 4096 + 8
    far = lk.new_index_key_cache(layout, pages, device="cuda")
    near, first = moved(s.cache), pages - s.cache.payload.shape[0]
    far.payload[first:] = near.payload
    if near.scale is not None:
        far.scale[first:] = near.scale
    lengths = torch.tensor([128, 100, 128, 7])
    assert_same([on_gpu(s, lengths, far, s.table + first)], [on_gpu(s, lengths)])


# --- graphs, streams, compilation -------------------------------------------------------------------------------------


class Call:
    """Schedule, score, select once, on tensors that can be changed in place."""

    def __init__(self, device: str) -> None:
        self.scene = scene(torch.device(device), batches=2, pages=3, rows=4, heads=32)
        self.lengths = torch.zeros(4, dtype=torch.int32, device=device)

    def fill(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.lengths.copy_(torch.randint(0, 193, (4,), generator=generator))
        self.scene.weights.copy_(torch.randn(4, 32, generator=generator))

    def __call__(self) -> tuple[Tensor, ...]:
        s, k = self.scene, 48
        plan = lk.prefill_schedule(self.lengths, workers=64, max_len=192)
        logits = lk.index_logits(s.query, s.weights, s.cache, s.table, self.lengths, schedule=plan)
        ids = lk.select_blocks(logits, self.lengths, blocks=8)
        pages = {"page_table": s.table.repeat_interleave(2, 0), "page_size": 64}
        picked = lk.select_topk(logits, self.lengths, k, **pages)
        return plan, logits, ids, *picked, *lk.select_topk_in_blocks(logits, self.lengths, ids, k, **pages)


def on_the_cpu(seed: int) -> tuple[Tensor, ...]:
    call = Call("cpu")
    call.fill(seed)
    return call()


def test_a_captured_graph_follows_its_inputs():
    call = Call("cuda")
    call.fill(0)
    graph, results = captured(call)
    for seed in (1, 2, 3):
        call.fill(seed)
        for x in results:
            x.fill_(77)
        graph.replay()
        assert_same(results, on_the_cpu(seed))


def test_work_is_queued_on_the_current_stream():
    call = Call("cuda")
    call.fill(0)
    results = called_behind_a_pause(lambda: call.fill(4), call)
    assert_same(results, on_the_cpu(4))


def test_inductor_compiles_the_ops_whole():
    call = Call("cuda")
    call.fill(5)

    def steps(weights: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        s = call.scene
        logits = lk.index_logits(s.query, weights * 2, s.cache, s.table, lengths)
        ids = lk.select_blocks(logits, lengths, blocks=8)
        return logits, ids, *lk.select_topk_in_blocks(logits, lengths, ids, 32), *lk.select_topk(logits, lengths, 32)

    def run(transform: Callable[..., Callable[..., tuple[Tensor, ...]]]) -> tuple[Tensor, ...]:
        return transform(steps)(call.scene.weights, call.lengths)

    assert_same(run(lambda f: torch.compile(f, fullgraph=True)), run(lambda f: f))


def test_repeated_calls_give_the_same_bits():
    logits, lengths = scores(64, 65536, 0, "ties").cuda(), torch.full((64,), 65536).cuda()
    first = lk.select_topk(logits, lengths, 512)
    for _ in range(5):
        assert_same(lk.select_topk(logits, lengths, 512), first)
