"""What only a GPU shows: far addresses, graphs, streams, devices, compiled code, and full-size batches."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import latentkv as lk
from latentkv.ops._library import OPS
from tests.attend.cases import Pool, angle_table, assert_matches, expected, queries
from tests.gpu import called_behind_a_pause, captured

pytestmark = pytest.mark.gpu
GIB = 2**30
KERNEL = SimpleNamespace(is_kernel=True)  # the tolerance of a kernel's path


def needs_kernels() -> None:
    if OPS["sparse_mla"].kernel is None or OPS["merge_partials"].kernel is None:
        pytest.skip("the reference on a GPU synchronizes")


def same_bits(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(x.view(torch.int16), y.view(torch.int16)) for x, y in zip(a, b, strict=True))


# --- far addresses ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["v4", "v41", "v41_fp4", "bf16", "v41_fp4_interleaved"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_slots_past_four_gibibytes_are_read(layout, dtype):
    pages = 4 * GIB // lk.KVLayout.parse(layout).page_bytes(256) + 2
    far, near = (lk.new_kv_cache(layout, n, 256, device="cuda") for n in (pages, 1))
    rows, slots = torch.randn(256, 512, device="cuda").bfloat16(), torch.arange(256, device="cuda")
    first = (pages - 1) * 256
    lk.store_kv(rows, far, slots + first, layout=layout, page_size=256)
    lk.store_kv(rows, near, slots, layout=layout, page_size=256)
    query = queries(2, 16, far.device)
    chosen = torch.stack((slots[::2], slots[1::2]))
    got = lk.sparse_mla(query, lk.Rows(far, (chosen + first).to(dtype), layout, 256))
    assert same_bits(got, lk.sparse_mla(query, lk.Rows(near, chosen.to(dtype), layout, 256)))
    beyond = torch.tensor([[pages * 256, -1, 2**31 - 1]] * 2, dtype=dtype, device="cuda")
    assert lk.sparse_mla(query, lk.Rows(far, beyond, layout, 256))[0].count_nonzero() == 0


def test_page_strides_past_two_gibibytes_are_followed():
    size = lk.KVLayout.V41.page_bytes(64)
    far = torch.zeros(3, 2 * GIB + 4096, dtype=torch.uint8, device="cuda")[:, :size]
    near = lk.new_kv_cache("v41", 3, 64, device="cuda")
    rows, slots = torch.randn(192, 512, device="cuda").bfloat16(), torch.arange(192, device="cuda")
    for cache in (far, near):
        lk.store_kv(rows, cache, slots, layout="v41", page_size=64)
    query = queries(1, 16, far.device)
    got, want = (lk.sparse_mla(query, lk.Rows(c, slots.unsqueeze(0), "v41", 64)) for c in (far, near))
    assert same_bits(got, want)


# --- full size --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 3, 64, 300, 2048])
@pytest.mark.parametrize("heads", [16, 64, 128])
def test_the_models_shapes_match_the_oracle_in_sampled_tokens(tokens, heads):
    device = torch.device("cuda")
    window = Pool.random(500, "v41", 256, device, seed=1, pages=3)
    extra = Pool.random(900, "v41_fp4", 128, device, seed=2, pages=9)
    query, sink = queries(tokens, heads, device), torch.linspace(-3, 8, heads, device=device)
    slots, more = window.pick(tokens, 128, 3, holes=0.1), extra.pick(tokens, 512, 4, holes=0.1)
    table, positions = angle_table(4096, device), torch.arange(tokens, device=device) * 2
    got = lk.sparse_mla(query, window.rows(slots), extra.rows(more), sink=sink, inverse_rope=(table, positions))
    sample = sorted({0, tokens // 2, tokens - 1})
    want = expected(
        query[sample], (window, slots[sample], None), (extra, more[sample], None),
        sink=sink, angles=table[positions[sample]],
    )  # fmt: skip
    assert_matches(KERNEL, (got[0][sample], got[1][sample]), want)
    again = lk.sparse_mla(query, window.rows(slots), extra.rows(more), sink=sink, inverse_rope=(table, positions))
    assert same_bits(got, again)


def test_a_querys_bits_do_not_depend_on_a_full_size_batch():
    device = torch.device("cuda")
    window = Pool.random(500, "v41", 256, device, seed=1, pages=3)
    extra = Pool.random(900, "v41_fp4", 128, device, seed=2, pages=9)
    query, slots, more = queries(700, 64, device), window.pick(700, 128, 3), extra.pick(700, 512, 4)
    lengths = (torch.arange(700) * 37 % 515).int()
    whole = lk.sparse_mla(query, window.rows(slots), extra.rows(more, lengths))
    for part in (slice(0, 1), slice(5, 6), slice(699, 700), slice(100, 133)):
        alone = lk.sparse_mla(query[part], window.rows(slots[part]), extra.rows(more[part], lengths[part]))
        assert same_bits(alone, (whole[0][part], whole[1][part]))


# --- graphs, streams, devices, compilation ----------------------------------------------------------------------------


class Call:
    """Both ops once, on tensors that can be changed in place."""

    def __init__(self, device: str) -> None:
        self.window = Pool.random(40, "v41", 32, torch.device(device), seed=1)
        self.extra = Pool.random(40, "v41_fp4", 16, torch.device(device), seed=2)
        self.query = torch.zeros(3, 5, 512, dtype=torch.bfloat16, device=device)
        self.slots = torch.full((3, 20), -1, dtype=torch.int32, device=device)
        self.more = torch.full((3, 70), -1, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(3, dtype=torch.int32, device=device)
        self.positions = torch.zeros(3, dtype=torch.int64, device=device)
        self.sink = torch.zeros(5, device=device)
        self.table = angle_table(16, torch.device(device))

    def fill(self, seed: int) -> None:
        """New values in the same tensors; one length is 0 and one past the end."""
        generator = torch.Generator().manual_seed(seed)
        self.query.copy_(torch.randn(3, 5, 512, generator=generator) * 3)
        self.slots.copy_(self.window.pick(3, 20, seed))
        self.more.copy_(self.extra.pick(3, 70, seed))
        self.lengths.copy_(torch.tensor([0, 99, 33 + seed]))
        self.positions.copy_(torch.randint(0, 16, (3,), generator=generator))
        self.sink.copy_(torch.randn(5, generator=generator))

    def __call__(self) -> tuple[Tensor, ...]:
        near = lk.Rows(self.window.cache, self.slots, "v41", 32)
        far = lk.Rows(self.extra.cache, self.more, "v41_fp4", 16, self.lengths)
        rope = (self.table, self.positions)
        joint = lk.sparse_mla(self.query, near, far, sink=self.sink, inverse_rope=rope)
        parts = [lk.sparse_mla(self.query, rows) for rows in (near, far)]
        outs, lses = (torch.stack(x) for x in zip(*parts, strict=True))
        return *joint, *lk.merge_partials(outs, lses, sink=self.sink)

    def check(self, got: tuple[Tensor, ...]) -> None:
        """Against the oracle; the merged lse equals the joint one."""
        segments = (self.window, self.slots, None), (self.extra, self.more, self.lengths)
        want = expected(self.query, *segments, sink=self.sink, angles=self.table[self.positions])
        assert_matches(KERNEL, got[:2], want)
        assert torch.allclose(got[3], got[1], atol=1e-4)
        assert torch.allclose(got[2][..., :448].float(), got[0][..., :448].float(), atol=0.05)


def test_a_captured_graph_follows_its_inputs():
    needs_kernels()
    call = Call("cuda")
    call.fill(0)
    graph, results = captured(call)
    for seed in (1, 2, 3):
        call.fill(seed)
        graph.replay()
        call.check(results)
        assert same_bits(results, call())


def test_work_is_queued_on_the_current_stream():
    call = Call("cuda")
    call.fill(0)
    results = called_behind_a_pause(lambda: call.fill(4), call)
    call.check(results)


def test_work_runs_on_the_tensors_own_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("one device")
    call = Call("cuda:1")
    call.fill(5)
    with torch.cuda.device(0):
        results = call()
    assert results[0].device == torch.device("cuda:1")
    call.check(results)


def compiled_ops(query, cache, slots, lengths, sink):
    rows = lk.Rows(cache, slots, "v41", 32, lengths)
    out, lse = lk.sparse_mla(query * 2, rows, sink=sink, empty_lse=math.inf)
    return out * 1, lse + 1, *lk.merge_partials(torch.stack((out, out)), torch.stack((lse, lse)))


def test_inductor_compiles_the_ops_whole():
    call = Call("cuda")
    call.fill(6)
    given = (call.query, call.window.cache, call.slots, call.lengths, call.sink)
    got, want = torch.compile(compiled_ops, fullgraph=True)(*given), compiled_ops(*given)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
