"""What the kernels promise beyond the ops: equal bits of the exponential, order of programs, alignment, forms."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

import latentkv as lk
from latentkv import numerics
from latentkv.kernels import device as dev
from latentkv.reference import compress as reference
from tests.compress.streams import (
    EPS,
    PAGE,
    TABLE,
    WEIGHT,
    Requests,
    assert_equal,
    exact_tokens,
    latents,
    random_tokens,
)
from tests.store.cases import Slab, summable_rows

LAYOUTS = ["v4", "v41", "v41_fp4", "v41_mxfp4", "bf16"]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal bits, any NaN for a NaN."""
    both_nan = torch.isnan(a) & torch.isnan(b)
    return bool(((a.view(torch.int32) == b.view(torch.int32)) | both_nan).all())


# --- the exponential --------------------------------------------------------------------------------------------------


@triton.jit
def exp_kernel(x, out, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, dev.exp_nonpositive(tl.load(x + at)))


def exponential(x: Tensor) -> Tensor:
    """The kernels' exponential, compiled where there is a GPU, else interpreted."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    given = torch.nn.functional.pad(x, (0, -len(x) % 4096)).to(device)
    out = torch.empty_like(given)
    exp_kernel[(len(given) // 4096,)](given, out, BLOCK=4096, enable_fp_fusion=False)
    return out[: len(x)].cpu()


def test_the_exponential_has_the_references_bits_all_over_its_range():
    bits = torch.arange(0, 0x42B00000, 0x42B00000 // 400_000, dtype=torch.int32)  # 0 .. 88
    x = -bits.view(torch.float32)
    assert same_bits(exponential(x), numerics.exp_nonpositive(x))


def test_the_exponential_has_the_references_bits_where_its_reduction_changes():
    halves = -(torch.arange(0.0, 127.0) + 0.5) * math.log(2)
    ends = torch.tensor([-87.0, -126 * math.log(2), -0.0, 0.0, -1e-45, -1e-38])
    middle = torch.cat((halves, ends)).view(torch.int32)
    x = (middle[:, None] + torch.arange(-40, 41, dtype=torch.int32)).flatten().view(torch.float32)
    x = torch.cat((x[x <= 0], torch.tensor([-math.inf, -3e38, math.nan, -0.0])))
    assert same_bits(exponential(x), numerics.exp_nonpositive(x))


# --- pooling ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spread", [0.0, 1e-3, 3.0, 60.0])
def test_pooled_pairs_have_the_references_bits(backend, spread):
    count, special = 6, [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-42, 3e38]
    rows, held = random_tokens(count, 0, spread), random_tokens(2 * count, 1, spread)
    for n, value in enumerate(special):
        rows[1, n], held[2, n] = value, special[(n + 3) % len(special)]
        rows[3, 512 + n], held[6, 512 + n] = value, special[(n + 3) % len(special)]
    numbers = [torch.arange(1, 2 * count, 2), torch.arange(count) + 1, torch.arange(count), torch.arange(count)]
    results = []
    for device, op in ((backend.device, lk.pool_pairs), ("cpu", reference.pool_pairs)):
        kv, score, state_kv, state_score = (
            x.contiguous().to(device) for x in (rows[:, :512], rows[:, 512:], held[:, :512], held[:, 512:])
        )
        pooled, *_ = op(kv, score, *(x.to(device) for x in numbers), state_kv, state_score, 0, ring=2)
        results.append(pooled.cpu())
    assert same_bits(*results)


# --- order ------------------------------------------------------------------------------------------------------------


def from_last_to_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the interpreter run a launch's programs in descending order."""
    from triton.runtime.interpreter import interpreter_builder as builder

    ascending = builder.set_grid_idx
    monkeypatch.setattr(builder, "set_grid_idx", lambda x, y, z: ascending(builder.grid_dim[0] - 1 - x, y, z))


@pytest.mark.parametrize("draft_len", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("padded", [False, True])
def test_programs_of_a_verification_may_run_in_either_order(backend, monkeypatch, draft_len, padded):
    """No state row is read by one program and written by another: the smallest ring, both parities, two steps."""
    if backend.name == "gpu":
        pytest.skip("a GPU chooses the order")
    if backend.is_kernel:
        from_last_to_first(monkeypatch)
    ring = 1 << draft_len.bit_length()
    got, want = (Requests("bf16", ring, [4, 7], d) for d in (backend.device, "cpu"))
    for step in range(2):
        where, rows = got.block(draft_len), exact_tokens(2 * draft_len, step)
        if padded:
            where[0][1 :: draft_len + 1] = 0  # a padded row inside a block, its successor turns to the state
        outs = latents(2 * draft_len, backend.device), latents(2 * draft_len)
        got.decode(rows, where, outs[0], draft_len)
        want.reference_decode(rows, where, outs[1], draft_len)
        assert torch.equal(outs[0].cpu(), outs[1])
        assert_equal(got, want)


# --- forms of the same stream -----------------------------------------------------------------------------------------


def stream(backend, form: str, lengths: list[int], layout: str = "v41") -> tuple[Requests, Tensor]:
    """Nine tokens of two requests, in pieces of these lengths."""
    requests, found = Requests(layout, 4, [0, 0], backend.device), []
    tokens = [exact_tokens(9, r) for r in range(2)]
    done = 0
    for length in lengths:
        rows = torch.cat([t[done : done + length] for t in tokens])
        where, out = requests.block(length), latents(2 * length, backend.device)
        if form == "prefill":
            requests.prefill(rows, where, [length, length], out)
        else:
            requests.decode(rows, where, out, length)
        found.append(out.cpu().view(2, length, 512))
        done += length
    return requests, torch.cat(found, 1)


def test_decoding_verifying_and_chunks_of_any_parity_write_the_same(backend):
    decoded, latent = stream(backend, "decode", [1] * 9)
    for form, lengths in (("verify", [3, 3, 3]), ("prefill", [9]), ("prefill", [1, 2, 3, 3]), ("prefill", [4, 1, 4])):
        other, same = stream(backend, form, lengths)
        assert torch.equal(other.cache, decoded.cache)
        assert torch.equal(same, latent)
        assert torch.equal(other.state.view(2, 4, 1024)[:, 0], decoded.state.view(2, 4, 1024)[:, 0])  # position 8 waits
    assert (latent[:, 0::2] == 9).all()
    assert (latent[:, 1::2] != 9).any(-1).all()


# --- alignment --------------------------------------------------------------------------------------------------------


def shifted(x: Tensor, by: int) -> Tensor:
    """The same values with rows `by` elements apart from where they would be, the first one `by` elements late."""
    wide = torch.zeros(x.shape[0] * (x.shape[1] + 2 * by + 1) + by, dtype=x.dtype, device=x.device)
    view = wide[by:].as_strided(x.shape, (x.shape[1] + by, 1))
    return view.copy_(x)


@pytest.mark.parametrize("layout", ["v41", "v41_fp4"])
def test_rows_states_and_latents_may_start_at_any_element(backend, layout):
    where, rows = Requests(layout, 2, [1, 4, 7]).block(1), exact_tokens(3, 3)
    plain, odd = (Requests(layout, 2, [1, 4, 7], backend.device) for _ in range(2))
    odd.state = shifted(odd.state, 1)
    outs = latents(3, backend.device), shifted(latents(3, backend.device), 3)
    plain.decode(rows, where, outs[0])
    odd.decode(shifted(rows.to(backend.device), 5), where, outs[1])
    assert torch.equal(plain.cache, odd.cache)
    assert torch.equal(plain.state, odd.state)
    assert torch.equal(*outs)


# --- one token a latent -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_latents_are_returned_for_padded_rows_and_written_for_the_others(backend, layout):
    rows, positions = summable_rows(5, torch.bfloat16), torch.tensor([0, 1, 99, 5, 6])
    slots = torch.tensor([0, 3, 63, -1, 64])
    got, want = (Slab.new(layout, PAGE, d, pages=4) for d in (backend.device, torch.device("cpu")))
    outs = latents(5, backend.device), latents(5)
    given = [x.to(backend.device) for x in (slots, positions, TABLE)]
    lk.compress1(
        rows.to(backend.device), WEIGHT.to(backend.device), got.cache, *given, eps=EPS, out=outs[0], **got.form
    )
    reference.compress1(rows, WEIGHT, want.cache, slots, positions, TABLE, EPS, layout, PAGE, outs[1])
    assert torch.equal(outs[0].cpu(), outs[1])
    assert torch.equal(got.buffer.cpu(), want.buffer)
    written = {s for s in range(64) if any((x != 0xA5).any() for x in got.row_bytes(s) if x.size)}
    assert written == {3, 63}


def weights_of(values: list[float]) -> Tensor:
    """fp32 weights that rows of ones turn into latents as they are."""
    return torch.tensor(values + [0.0] * (512 - len(values)))


@pytest.mark.parametrize("layout", ["v4", "v41"])
def test_pages_of_fp8_hold_fp4_numerics(backend, layout):
    """Ties to even, saturation, both zeros, values under the smallest scale, an infinity and a NaN, per 16."""
    values = [6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.1, -0.0, 0.0, 0.26, -0.24, 4.99, -6]
    values += [1e-3, -1e-3, 5e-4, -4e-4] + [0.0] * 12
    values += [3e4, -3e4, 500, 100, -0.0, -1e-30] + [0.0] * 10
    values += [math.inf, 1, -2] + [0.0] * 13 + [math.nan, 1, -2] + [0.0] * 13 + [1.0, -2.0]
    rows, slots = torch.ones(1, 512).bfloat16(), torch.tensor([1])
    got, want = (Slab.new(layout, PAGE, d) for d in (backend.device, torch.device("cpu")))
    weight, positions = weights_of(values), torch.tensor([0])
    given = [x.to(backend.device) for x in (slots, positions, TABLE)]
    lk.compress1(rows.to(backend.device), weight.to(backend.device), got.cache, *given, eps=0, **got.form)
    reference.compress1(rows, weight, want.cache, slots, positions, TABLE, 0, layout, PAGE, latents(1))
    assert torch.equal(got.buffer.cpu(), want.buffer)
    if layout == "v41":
        read = lk.load_kv(want.cache, slots, layout=layout, page_size=PAGE)[0, :16].float()
        grid = torch.tensor([6, 0, 1, 1, 2, 2, 4, 4, -0.0, -0.0, 0, 0, 0.5, -0.0, 4, -6])
        assert torch.equal(read.view(torch.int32), grid.view(torch.int32))
