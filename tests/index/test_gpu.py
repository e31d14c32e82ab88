"""What only a GPU shows: every value under every exponent, many programs, far addresses, graphs, compiled code."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

import latentkv as lk
from latentkv.ops._library import OPS
from latentkv.reference import index as reference
from tests.gpu import called_behind_a_pause, captured
from tests.index.sweeps import IDENTITY, near_ties, value_sweep

pytestmark = pytest.mark.gpu
LAYOUTS = ["fused", "split64", "split8"]
GIB = 2**30
EPS = 1e-20


def needs_kernels() -> None:
    if OPS["store_index_key"].kernel is None:
        pytest.skip("the reference on a GPU synchronizes")


def tensors_of(cache: lk.IndexKeyCache) -> list[Tensor]:
    return [x.cpu() for x in (cache.payload, cache.scale) if x is not None]


def assert_same(got: list[Tensor] | tuple[Tensor, ...], want: list[Tensor] | tuple[Tensor, ...]) -> None:
    assert len(got) == len(want)
    for x, y in zip(got, want, strict=True):
        assert x.shape == y.shape
        assert torch.equal(x.cpu(), y.cpu())


# --- every value ------------------------------------------------------------------------------------------------------


def assert_packed_like_the_reference(rows: Tensor, oracle=None) -> None:
    query = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % 64)).view(-1, 64, 128)
    positions = torch.zeros(len(query), dtype=torch.int32)
    got = lk.pack_index_query(query.cuda(), IDENTITY.cuda(), positions.cuda(), layout="packed")
    assert_same(got, reference.pack_index_query(query, IDENTITY, positions, "packed"))
    if oracle is not None:
        assert_same(got, oracle.bytes_of(oracle.stage1(query.flatten(0, 1).float().numpy())))


def test_every_value_under_every_exponent_goes_through_both_stages(oracle):
    for first in range(0, 254, 32):
        assert_packed_like_the_reference(value_sweep(range(first, min(254, first + 32))), oracle)
    assert_packed_like_the_reference(value_sweep(range(254, 255)))


def test_every_bf16_value_is_a_groups_largest():
    """All 65536 bit patterns, NaN and infinities too, beside a third of themselves."""
    values = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    groups = torch.zeros(65536, 32, dtype=torch.bfloat16)
    groups[:, 3], groups[:, 17], groups[:, 31] = values, values / 3, -values / 2
    assert_packed_like_the_reference(groups.view(-1, 128))


def plain(rows: Tensor, layout: str, half_even: bool) -> None:
    pages, slots = -(-len(rows) // 64), torch.arange(len(rows))
    far, near = (lk.new_index_key_cache(layout, pages, device=d) for d in ("cuda", "cpu"))
    lk.store_index_key_plain(rows.cuda(), far, slots.cuda(), round_half_even=half_even)
    reference.store_index_key_plain(rows, near.payload, near.scale, slots, half_even, layout, 64)
    assert_same(tensors_of(far), tensors_of(near))


@pytest.mark.parametrize("half_even", [True, False])
def test_the_pack_stage_alone_is_right_for_every_kind_of_value(half_even):
    plain(value_sweep(range(0, 255, 2)), "fused", half_even)
    plain(value_sweep(range(100, 130)).float().half(), "split8", half_even)
    plain(near_ties(range(-40, 120)), "split64", half_even)
    bits = np.random.default_rng(0).integers(0, 2**32, (8192, 128), dtype=np.uint32)
    rows = torch.from_numpy(bits.view(np.float32).copy())
    keep = torch.rand(rows.shape, generator=torch.Generator().manual_seed(1)) < 0.1  # most groups without a NaN
    plain(torch.where(keep, rows, 0.0), "fused", half_even)


# --- many rows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 63, 1024, 1025, 4097, 20001])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_number_of_keys_is_stored_and_read(layout, count, summable, angles):
    pages = -(-(count + 1) // 64)
    rows, weight = summable(count, seed=count), (torch.arange(128) % 7 / 4 - 0.5).bfloat16()
    slots = torch.randperm(pages * 64 - 1, generator=torch.Generator().manual_seed(0))[:count] + 1
    slots[5::11] = 0
    positions = torch.arange(count) % 600 - 3
    near = lk.new_index_key_cache(layout, pages)
    pages_of = near.payload, near.scale
    reference.store_index_key(rows, weight, *pages_of, slots, positions, angles, EPS, 2, layout, 64)
    far = lk.new_index_key_cache(layout, pages, device="cuda")
    on = [x.cuda() for x in (rows, weight, slots, positions, angles)]
    lk.store_index_key(on[0], on[1], far, on[2], on[3], on[4], eps=EPS, ratio=2)
    assert_same(tensors_of(far), tensors_of(near))
    read = lk.load_index_key(far, on[2])
    assert_same(read, reference.load_index_key(*pages_of, slots, layout, 64))
    assert_same([lk.dequantize_index(*read)], [lk.dequantize_index(*(x.cpu() for x in read))])


@pytest.mark.parametrize("tokens", [1, 65, 1536])
@pytest.mark.parametrize(("layout", "heads"), [(n, h) for n in ("packed", "flydsl") for h in (16, 32, 48, 64)])
def test_any_number_of_queries_is_packed(layout, heads, tokens, angles):
    """Far past the 4096 products at which the kernels of engines stop."""
    generator = torch.Generator().manual_seed(tokens)
    query = torch.randn(tokens, heads, 128, generator=generator).bfloat16()
    positions = torch.randint(-5, 520, (tokens,), generator=generator)
    partials = torch.randn(10, tokens, heads, generator=generator)
    dtype = torch.float32 if heads == 64 else torch.bfloat16
    want = reference.pack_index_query_weights(query, angles, positions, partials, 0.0110485, layout, dtype)
    given = [x.cuda() for x in (query, angles, positions, partials)]
    got = lk.pack_index_query_weights(*given, 0.0110485, layout=layout, weights_dtype=dtype)
    assert_same(got, want)
    assert_same(lk.pack_index_query(*given[:3], layout=layout), want[:2])


def test_a_keys_bits_do_not_depend_on_the_batch():
    """Random rows: the norm's sum is the same in every tile."""
    count = 4099
    rows = torch.randn(count, 128, generator=torch.Generator().manual_seed(1)).bfloat16().cuda()
    weight = torch.linspace(-1, 1, 128).cuda()
    table = torch.randn(97, 64, generator=torch.Generator().manual_seed(2)).cuda()
    slots, positions = torch.arange(1, count + 1).cuda(), torch.arange(count).cuda() % 97

    def run(some: Tensor) -> tuple[Tensor, Tensor]:
        cache = lk.new_index_key_cache("fused", count // 64 + 1, device="cuda")
        lk.store_index_key(rows[some], weight, cache, slots[some], positions[some], table, eps=1e-6, ratio=1)
        return lk.load_index_key(cache, slots[some])

    whole = run(torch.arange(count).cuda())
    for size in (1, 37, 1030):
        some = torch.randperm(count, generator=torch.Generator().manual_seed(size))[:size].cuda()
        assert_same(run(some), [x[some] for x in whole])


def test_random_keys_hardly_differ_from_the_references(angles):
    """At most one bf16 step of a normed value, in at most 1 of 10^4 values."""
    count = 8192
    rows = torch.randn(count, 128, generator=torch.Generator().manual_seed(5)).bfloat16()
    weight, slots = torch.ones(128).bfloat16(), torch.arange(count)
    near, far = (lk.new_index_key_cache("fused", count // 64, device=d) for d in ("cpu", "cuda"))
    reference.store_index_key(rows, weight, near.payload, None, slots, slots, angles, 1e-6, 1, "fused", 64)
    on = [x.cuda() for x in (rows, weight, slots, angles)]
    lk.store_index_key(on[0], on[1], far, on[2], on[2], on[3], eps=1e-6, ratio=1)
    differing = (far.payload.cpu() != near.payload).count_nonzero()
    assert differing <= 2e-4 * near.payload.numel()


# --- far addresses ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_slots_past_four_gibibytes_are_written_and_read(layout, dtype, summable, angles):
    pages = 4 * GIB // 4096 + 3
    cache = lk.new_index_key_cache(layout, pages, device="cuda")
    last = cache.capacity - 1
    slots = torch.tensor([last, last - 1, last - 63, last - 64], dtype=dtype, device="cuda")
    rows, weight, table = summable(4).cuda(), torch.ones(128).cuda(), angles.cuda()
    for beyond in ([last + 1, 2**31 - 1, -1, -(2**31)], [0, 0, 0, last + 64]):
        where = torch.tensor(beyond, dtype=dtype, device="cuda")
        lk.store_index_key(rows, weight, cache, where, where, table, eps=EPS, ratio=1)
    assert all(
        int(part.count_nonzero()) == 0 for x in (cache.payload, cache.scale) if x is not None for part in x.split(2**16)
    )
    lk.store_index_key(rows, weight, cache, slots, slots * 0, table, eps=EPS, ratio=1)
    near, at = lk.new_index_key_cache(layout, 2), slots.cpu() - (pages - 2) * 64
    pages_of = near.payload, near.scale
    reference.store_index_key(rows.cpu(), weight.cpu(), *pages_of, at, at * 0, angles, EPS, 1, layout, 64)
    for x, y in zip((cache.payload, cache.scale), (near.payload, near.scale), strict=True):
        if x is not None:
            assert torch.equal(x[-2:].cpu(), y)
            assert all(int(part.count_nonzero()) == 0 for part in x[:-2].split(2**16))
    want = reference.load_index_key(*pages_of, at, layout, 64)
    assert_same(lk.load_index_key(cache, slots), want)
    assert lk.load_index_key(cache, slots + 128)[0].count_nonzero() == 0


def test_strides_past_two_gibibytes_are_followed(summable):
    stride = 2 * GIB + 4096
    slab = torch.zeros(3 * stride, dtype=torch.uint8, device="cuda")
    cache = lk.IndexKeyCache(slab.view(3, stride)[:, :4352], None, lk.IndexKeyLayout.FUSED, 64)
    wide = slab.view(torch.bfloat16)[5000:].as_strided((3, 128), (GIB // 2 + 64, 1))  # between the pages
    rows, slots = summable(3), torch.tensor([191, 128, 64])
    wide.copy_(rows)
    lk.store_index_key_plain(wide, cache, slots.cuda())
    near = lk.new_index_key_cache("fused", 3)
    reference.store_index_key_plain(rows, near.payload, None, slots, True, "fused", 64)
    assert torch.equal(cache.payload.cpu(), near.payload)
    assert torch.equal(wide.cpu(), rows)
    assert_same(
        lk.load_index_key(cache, slots.cuda()), reference.load_index_key(near.payload, None, slots, "fused", 64)
    )


def test_queries_past_four_gibibytes_are_packed(angles):
    tokens, stride = 3, 3 * GIB // 2 + 128  # values
    memory = torch.zeros(2 * stride + 4096, dtype=torch.bfloat16, device="cuda")
    query = torch.randn(tokens, 16, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    far = memory.as_strided((tokens, 16, 128), (stride, 128, 1))
    far.copy_(query)
    positions = torch.tensor([5, 6, 7])
    got = lk.pack_index_query(far, angles.cuda(), positions.cuda(), layout="flydsl")
    assert_same(got, reference.pack_index_query(query, angles, positions, "flydsl"))


# --- graphs, streams, devices, compilation ----------------------------------------------------------------------------


class Call:
    """Every index op once, on tensors that can be changed in place."""

    def __init__(self, device: str | torch.device, layout: str, form: str) -> None:
        self.form = form
        self.values = torch.zeros(6, 128, dtype=torch.bfloat16, device=device)
        self.query = torch.zeros(6, 32, 128, dtype=torch.bfloat16, device=device)
        self.partials = torch.zeros(10, 6, 32, device=device)
        self.slots = torch.zeros(6, dtype=torch.int64, device=device)
        self.positions = torch.zeros(6, dtype=torch.int32, device=device)
        self.weight = torch.linspace(0.5, 2, 128, device=device).bfloat16()
        self.table = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).to(device)
        self.first, self.second = (lk.new_index_key_cache(layout, 2, device=device) for _ in range(2))

    def fill(self, seed: int) -> None:
        """New values in the same tensors; the sums of squares are exact in any order."""
        generator = torch.Generator().manual_seed(seed)
        self.values.copy_(torch.randint(-255, 256, (6, 128), generator=generator) / 64)
        self.query.copy_(torch.randn(6, 32, 128, generator=generator))
        self.partials.copy_(torch.randn(10, 6, 32, generator=generator))
        self.slots.copy_(torch.randperm(134, generator=generator)[:6] - 3)
        self.positions.copy_(torch.randint(-3, 70, (6,), generator=generator))
        for cache in (self.first, self.second):
            for x in (cache.payload, cache.scale):
                if x is not None:
                    x.zero_()

    def __call__(self) -> tuple[Tensor, ...]:
        lk.store_index_key(
            self.values, self.weight, self.first, self.slots, self.positions, self.table, eps=1e-6, ratio=2
        )
        lk.store_index_key_plain(self.values, self.second, self.slots, round_half_even=False)
        read = lk.load_index_key(self.first, self.slots)
        given = self.query, self.table, self.positions
        packed = lk.pack_index_query_weights(*given, self.partials, 0.25, layout=self.form)
        return *read, lk.dequantize_index(*read), *packed, *lk.pack_index_query(*given, layout=self.form)

    def state(self, results: tuple[Tensor, ...]) -> list[Tensor]:
        return [*tensors_of(self.first), *tensors_of(self.second), *(x.cpu() for x in results)]


def on_the_cpu(layout: str, form: str, seed: int) -> list[Tensor]:
    call = Call("cpu", layout, form)
    call.fill(seed)
    return call.state(call())


@pytest.mark.parametrize(("layout", "form"), [("fused", "packed"), ("split64", "flydsl"), ("split8", "flydsl")])
def test_a_captured_graph_follows_its_inputs(layout, form):
    needs_kernels()
    call = Call("cuda", layout, form)
    call.fill(0)
    graph, results = captured(call)
    for seed in (1, 2, 3):
        call.fill(seed)
        for x in results:
            x.view(torch.uint8).fill_(0x77)  # every byte is written each time, absent head tiles too
        graph.replay()
        assert_same(call.state(results), on_the_cpu(layout, form, seed))


def test_work_is_queued_on_the_current_stream():
    call = Call("cuda", "split8", "packed")
    call.fill(0)
    results = called_behind_a_pause(lambda: call.fill(4), call)
    assert_same(call.state(results), on_the_cpu("split8", "packed", 4))


def test_work_runs_on_the_tensors_own_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("one device")
    call = Call("cuda:1", "fused", "flydsl")
    call.fill(5)
    with torch.cuda.device(0):
        results = call()
    assert results[0].device == torch.device("cuda:1")
    assert_same(call.state(results), on_the_cpu("fused", "flydsl", 5))


def compiled_ops(cache, values, weight, slots, positions, table, query, partials):
    lk.store_index_key(values * 2, weight, cache, slots, positions, table, eps=1e-6, ratio=2)
    rows, words = lk.load_index_key(cache, slots)
    packed = lk.pack_index_query_weights(query * 0.5, table, positions, partials, 0.25, layout="flydsl")
    return lk.dequantize_index(rows, words) + 1, *packed


def test_inductor_compiles_the_ops_whole():
    def run(transform: Callable[..., Callable[..., tuple[Tensor, ...]]]) -> list[Tensor]:
        call = Call("cuda", "split64", "flydsl")
        call.fill(6)
        given = call.values, call.weight, call.slots, call.positions, call.table, call.query, call.partials
        return [x.cpu() for x in (*transform(compiled_ops)(call.first, *given), *tensors_of(call.first))]

    assert_same(run(lambda f: torch.compile(f, fullgraph=True)), run(lambda f: f))


def test_repeated_calls_give_the_same_bits():
    rows = torch.randn(3000, 128, generator=torch.Generator().manual_seed(0)).bfloat16().cuda()
    slots, positions = torch.arange(3000).cuda() + 1, torch.arange(3000).cuda() % 64
    table, weight = torch.randn(64, 64).cuda(), torch.ones(128).bfloat16().cuda()
    first = None
    for _ in range(10):
        cache = lk.new_index_key_cache("split64", 47, device="cuda")
        lk.store_index_key(rows, weight, cache, slots, positions, table, eps=1e-6, ratio=1)
        first = cache if first is None else first
        assert_same(tensors_of(cache), tensors_of(first))
