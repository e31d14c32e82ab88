"""What only a GPU shows: far addresses, graphs, streams, devices, compiled code, and every value with every scale."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

import latentkv as lk
from latentkv.ops._library import OPS
from latentkv.reference import store as reference
from tests.gpu import called_behind_a_pause, captured
from tests.store import oracle
from tests.store.cases import (
    LAYOUTS,
    QUANTIZED,
    angle_table,
    finished,
    largest_sweep,
    near_ties,
    random_rows,
    summable_rows,
    value_sweep,
)

pytestmark = pytest.mark.gpu
HALVES = [torch.bfloat16, torch.float16]
IDENTITY = torch.tensor([1.0, 0.0]).repeat(32).unsqueeze(0)
GIB = 2**30


def needs_kernels() -> None:
    if OPS["store_kv"].kernel is None:
        pytest.skip("the reference on a GPU synchronizes")


def stored(rows: Tensor, layout: str, freqs: Tensor | None = None, *, page_size: int = 64) -> tuple[Tensor, Tensor]:
    """A cache filled in order on the GPU and one filled by the reference on the CPU."""
    pages = -(-len(rows) // page_size)
    slots = torch.arange(len(rows))
    far, near = (lk.new_kv_cache(layout, pages, page_size, device=d) for d in ("cuda", "cpu"))
    angles = None if freqs is None else freqs.cuda()
    lk.store_kv(rows.cuda(), far, slots.cuda(), layout=layout, page_size=page_size, freqs=angles)
    reference.store_kv(rows, near, slots, layout, page_size, freqs)
    return far, near


# --- every value ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("layout", QUANTIZED)
def test_every_value_under_every_scale_is_encoded_like_the_reference(layout, dtype):
    rows = value_sweep(layout, dtype)
    for part in rows.split(16384):
        far, near = stored(part.contiguous(), layout)
        assert torch.equal(far.cpu(), near)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("layout", QUANTIZED)
def test_every_largest_value_gives_the_references_scale(layout, dtype):
    far, near = stored(largest_sweep(layout, dtype), layout)
    assert torch.equal(far.cpu(), near)


@pytest.mark.parametrize("layout", QUANTIZED)
def test_fp32_values_around_every_tie_are_encoded_like_the_reference(layout):
    far, near = stored(near_ties(layout), layout)
    assert torch.equal(far.cpu(), near)


@pytest.mark.parametrize("layout", QUANTIZED)
def test_a_million_random_fp32_bits_are_encoded_like_the_reference(layout):
    bits = np.random.default_rng(0).integers(0, 2**32, (4096, 512), dtype=np.uint32)
    rows = torch.from_numpy(bits.view(np.float32).copy())
    keep = torch.rand(rows.shape, generator=torch.Generator().manual_seed(1)) < 0.1  # most groups without a NaN
    far, near = stored(torch.where(keep, rows, 0.0), layout)
    assert torch.equal(far.cpu(), near)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("kind", "layout"), [("index", "v41_mxfp4"), ("latent", "v41_fp4")])
def test_every_value_under_every_scale_is_fake_quantized_like_the_reference(kind, layout, dtype):
    position = torch.zeros(1, dtype=torch.int64)
    for part in value_sweep(layout, dtype).split(16384):
        x = part.unsqueeze(0)
        got = lk.rope_fake_quant(x.cuda(), IDENTITY.cuda(), kind=kind, positions=position.cuda()).cpu()
        want = reference.rope_fake_quant(x, IDENTITY, kind, position, False)
        assert torch.equal(torch.isnan(got), torch.isnan(want))
        same = (got.view(torch.int16) == want.view(torch.int16)) | torch.isnan(want)
        assert bool(same.all())


@pytest.mark.parametrize("count", [1, 2, 1024, 1025, 4096, 4097, 20001])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_number_of_rows_is_stored_and_read(layout, count):
    rows = random_rows(count, torch.bfloat16)
    far, near = stored(rows, layout, angle_table(count))
    assert torch.equal(far.cpu(), near)
    slots = torch.randperm(len(far) * 64, generator=torch.Generator().manual_seed(0))[:count]
    got = lk.load_kv(far, slots.cuda(), layout=layout, page_size=64)
    assert torch.equal(got.cpu(), lk.load_kv(near, slots, layout=layout, page_size=64))
    assert torch.equal(
        lk.load_kv_pages(far, layout=layout, page_size=64).cpu(), lk.load_kv_pages(near, layout=layout, page_size=64)
    )


@pytest.mark.parametrize("count", [1, 1025, 4097, 20001])
@pytest.mark.parametrize("layout", ["v4", "v41", "v41_fp4", "bf16"])
def test_any_number_of_rows_is_normed_and_stored(layout, count):
    rows, table, pages = summable_rows(count, torch.bfloat16), angle_table(97), -(-count // 64)
    weight = torch.linspace(0.5, 2, 512).bfloat16()
    slots, positions = torch.arange(count) - 1, torch.arange(count) % 97
    query = random_rows(2 * count, torch.bfloat16, spread=2).view(count, 2, 512)
    caches, queries = {}, {}
    for d in ("cuda", "cpu"):
        caches[d], queries[d] = lk.new_kv_cache(layout, pages, 64, device=d), query.clone().to(d)
        given = [x.to(d) for x in (slots, positions, table)]
        lk.norm_rope_store_kv(
            rows.to(d), weight.to(d), caches[d], *given, eps=1e-6, layout=layout, page_size=64, query=queries[d]
        )
    assert torch.equal(caches["cuda"].cpu(), caches["cpu"])
    assert torch.equal(queries["cuda"].cpu(), queries["cpu"])


# --- far addresses ----------------------------------------------------------------------------------------------------


def assert_only_these_rows(cache: Tensor, first_page: int, rows: Tensor, slots: list[int], layout: str) -> None:
    """Bytes of the pages from `first_page` on are those of the rows; all before are zero."""
    size = cache.shape[1]
    want = np.zeros((len(cache) - first_page) * size, np.uint8)
    near = [s - first_page * 256 for s in slots]
    oracle.write(want, 0, size, len(cache) - first_page, finished(rows), torch.tensor(near), layout, 256)
    assert np.array_equal(cache[first_page:].flatten().cpu().numpy(), want)
    assert all(int(part.count_nonzero()) == 0 for part in cache[:first_page].split(2048))


@pytest.mark.parametrize("layout", ["v4", "v41", "v41_fp4", "bf16", "v41_interleaved", "v41_fp4_interleaved"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_slots_past_four_gibibytes_are_written_and_read(layout, dtype):
    pages = 4 * GIB // oracle.FORMS[layout].page_bytes(256) + 3
    cache = lk.new_kv_cache(layout, pages, 256, device="cuda")
    last = pages * 256 - 1
    slots, rows = [last, last - 1, last - 255, last - 256], random_rows(4, torch.bfloat16)
    where = torch.tensor(slots, dtype=dtype, device="cuda")
    lk.store_kv(rows.cuda(), cache, where, layout=layout, page_size=256)
    assert_only_these_rows(cache, pages - 2, rows, slots, layout)
    got = lk.load_kv(cache, where, layout=layout, page_size=256)
    want = oracle.decode(*oracle.encode(finished(rows), layout), layout)
    assert np.array_equal(got.float().cpu().numpy(), want)
    beyond = torch.tensor([last + 1, last + 256, 2**31 - 1, -(2**31)], dtype=dtype, device="cuda")
    lk.store_kv(rows.cuda() + 1, cache, beyond, layout=layout, page_size=256)
    assert_only_these_rows(cache, pages - 2, rows, slots, layout)
    assert lk.load_kv(cache, beyond, layout=layout, page_size=256).count_nonzero() == 0


def test_page_strides_past_two_gibibytes_are_followed():
    stride = 2 * GIB + 4096
    slab = torch.zeros(3 * stride, dtype=torch.uint8, device="cuda")
    cache = slab.view(3, stride)[:, : lk.KVLayout.V41_FP4.page_bytes(64)]
    rows, slots = random_rows(3, torch.bfloat16), torch.tensor([191, 128, 64], device="cuda")
    lk.store_kv(rows.cuda(), cache, slots, layout="v41_fp4", page_size=64)
    want = np.zeros(3 * 18432, np.uint8)
    oracle.write(want, 0, 18432, 3, finished(rows), slots.cpu(), "v41_fp4", 64)
    assert np.array_equal(cache.flatten().cpu().numpy(), want)
    assert sum(int(part.count_nonzero()) for part in slab.split(GIB)) == np.count_nonzero(want)
    got = lk.load_kv(cache, slots, layout="v41_fp4", page_size=64)
    assert np.array_equal(
        got.float().cpu().numpy(), oracle.round_to(oracle.fake_quant(finished(rows), "latent"), "bfloat16")
    )


def test_row_strides_past_two_gibibytes_are_followed():
    stride = GIB + 512  # values
    wide = torch.zeros(2 * stride + 512, dtype=torch.bfloat16, device="cuda").as_strided((3, 512), (stride, 1))
    rows, slots = random_rows(3, torch.bfloat16), torch.arange(3)
    wide.copy_(rows)
    far = lk.new_kv_cache("v41", 1, 16, device="cuda")
    lk.store_kv(wide, far, slots.cuda(), layout="v41", page_size=16)
    near = lk.new_kv_cache("v41", 1, 16)
    lk.store_kv(rows, near, slots, layout="v41", page_size=16)
    assert torch.equal(far.cpu(), near)
    lk.load_kv(far, slots.cuda(), layout="v41", page_size=16, out=wide)
    assert torch.equal(wide.cpu(), lk.load_kv(near, slots, layout="v41", page_size=16))


# --- graphs, streams, devices, compilation ----------------------------------------------------------------------------


class Call:
    """Every store op once, on tensors that can be changed in place."""

    def __init__(self, device: str | torch.device, layout: str) -> None:
        self.layout = layout
        self.rows = torch.zeros(5, 512, dtype=torch.bfloat16, device=device)
        self.query = torch.zeros(5, 3, 512, dtype=torch.bfloat16, device=device)
        self.slots = torch.full((5,), -1, dtype=torch.int64, device=device)
        self.positions = torch.zeros(5, dtype=torch.int32, device=device)
        self.weight = torch.linspace(0.5, 2, 512, device=device).bfloat16()
        self.table = angle_table(64).to(device)
        self.first, self.second = (lk.new_kv_cache(layout, 4, 16, device=device) for _ in range(2))

    def fill(self, seed: int) -> None:
        """New values in the same tensors."""
        generator = torch.Generator().manual_seed(seed)
        self.rows.copy_(summable_rows(5, torch.bfloat16, seed=seed))
        self.query.copy_(torch.randn(5, 3, 512, generator=generator))
        self.slots.copy_(torch.randperm(70, generator=generator)[:5] - 3)
        self.positions.copy_(torch.randint(0, 70, (5,), generator=generator))
        self.first.zero_()
        self.second.zero_()

    def __call__(self) -> tuple[Tensor, ...]:
        form = {"layout": self.layout, "page_size": 16}
        lk.store_kv(self.rows, self.first, self.slots, **form)
        lk.norm_rope_store_kv(
            self.rows, self.weight, self.second, self.slots, self.positions, self.table,
            eps=1e-6, query=self.query, **form,
        )  # fmt: skip
        read = lk.load_kv(self.first, self.slots, **form), lk.load_kv_pages(self.second, **form)
        faked = lk.rope_fake_quant(self.rows, self.table, kind="latent", positions=self.positions)
        return *read, faked

    def state(self, results: tuple[Tensor, ...]) -> list[Tensor]:
        return [x.cpu() for x in (self.first, self.second, self.query, *results)]


def on_the_cpu(layout: str, seed: int) -> list[Tensor]:
    call = Call("cpu", layout)
    call.fill(seed)
    return call.state(call())


def assert_same(got: list[Tensor], want: list[Tensor]) -> None:
    for x, y in zip(got, want, strict=True):
        assert x.shape == y.shape
        assert torch.equal(x, y)


@pytest.mark.parametrize("layout", ["v4", "v41", "v41_fp4"])
def test_a_captured_graph_follows_its_inputs(layout):
    needs_kernels()
    call = Call("cuda", layout)
    call.fill(0)
    graph, results = captured(call)
    for seed in (1, 2, 3):
        call.fill(seed)
        graph.replay()
        assert_same(call.state(results), on_the_cpu(layout, seed))


def test_work_is_queued_on_the_current_stream():
    call = Call("cuda", "v41")
    call.fill(0)
    results = called_behind_a_pause(lambda: call.fill(4), call)
    assert_same(call.state(results), on_the_cpu("v41", 4))


def test_work_runs_on_the_tensors_own_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("one device")
    call = Call("cuda:1", "v41_fp4")
    call.fill(5)
    with torch.cuda.device(0):
        results = call()
    assert results[0].device == torch.device("cuda:1")
    assert_same(call.state(results), on_the_cpu("v41_fp4", 5))


def test_tensors_of_two_devices_are_refused():
    cache, slots = lk.new_kv_cache("v41", 1, 16, device="cuda"), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="slots: on cpu, the other arguments are on cuda:0"):
        lk.load_kv(cache, slots, layout="v41", page_size=16)
    with pytest.raises(ValueError, match="cache: on cuda:0, the other arguments are on cpu"):
        lk.store_kv(torch.zeros(1, 512), cache, slots, layout="v41", page_size=16)


def compiled_ops(rows, weight, cache, slots, positions, table, query):
    lk.norm_rope_store_kv(
        rows * 2, weight, cache, slots, positions, table, eps=1e-6, layout="v41", page_size=16, query=query
    )
    return lk.load_kv(cache, slots, layout="v41", page_size=16) + 1, query * 1


def test_inductor_compiles_the_ops_whole():
    def run(transform: Callable[..., Callable[..., tuple[Tensor, Tensor]]]) -> list[Tensor]:
        call = Call("cuda", "v41")
        call.fill(6)
        given = (call.rows, call.weight, call.second, call.slots, call.positions, call.table, call.query)
        return [x.cpu() for x in (*transform(compiled_ops)(*given), call.second, call.query)]

    assert_same(run(lambda f: torch.compile(f, fullgraph=True)), run(lambda f: f))


def test_repeated_calls_give_the_same_bits():
    rows = torch.randn(3000, 512, generator=torch.Generator().manual_seed(0)).bfloat16().cuda()
    slots, positions = torch.arange(3000).cuda(), torch.arange(3000).cuda() % 64
    table, weight = angle_table(64).cuda(), torch.ones(512).bfloat16().cuda()
    first = None
    for _ in range(10):
        cache = lk.new_kv_cache("v41", 47, 64, device="cuda")
        lk.norm_rope_store_kv(rows, weight, cache, slots, positions, table, eps=1e-6, layout="v41", page_size=64)
        first = cache if first is None else first
        assert torch.equal(cache, first)
