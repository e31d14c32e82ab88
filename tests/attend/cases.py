"""Pools full of garbage with a few valid rows, and comparisons with the oracle, for the tests of `attend`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import latentkv as lk
from latentkv.reference import store
from tests.attend import oracle

HEADS = [1, 3, 16, 17, 64, 128]
PAIRS = [
    ("v41", "v41_fp4"),
    ("v41_fp4", "v41"),
    ("v41", "v41"),
    ("v4", "v4"),
    ("v41_fp4", "v41_fp4"),
    ("v41_mxfp4", "v41_mxfp4"),
    ("bf16", "bf16"),
    ("v41_interleaved", "v41_fp4_interleaved"),
    ("v41_fp4_interleaved", "v41_fp4_interleaved"),
]


@dataclass
class Pool:
    """A cache in which `filled` slots hold rows and every other byte is 0xFF, which decodes to NaN."""

    cache: Tensor
    layout: lk.KVLayout
    page_size: int
    filled: Tensor  # int64, on the CPU

    @classmethod
    def of(
        cls, rows: Tensor, layout: str, page_size: int, device: torch.device, *, pages: int = 4, gap: int = 64
    ) -> Pool:
        """Rows `[n, 512]` at shuffled slots, the last slot among them, of pages that lie `gap` bytes apart."""
        kind = lk.KVLayout.parse(layout)
        need = kind.page_bytes(page_size)
        slab = torch.full((pages * (need + gap) + gap,), 0xFF, dtype=torch.uint8)
        capacity = pages * page_size
        order = torch.randperm(capacity - 1, generator=torch.Generator().manual_seed(len(rows)))
        filled = torch.cat((torch.tensor([capacity - 1]), order))[: len(rows)]
        store.store_kv(rows, cls._pages(slab, pages, need, gap), filled, kind.name, page_size, None)
        return cls(cls._pages(slab.to(device), pages, need, gap), kind, page_size, filled)

    @classmethod
    def random(cls, count: int, layout: str, page_size: int, device: torch.device, *, seed: int, **sizes: int) -> Pool:
        """A pool of `count` normal rows."""
        rows = torch.randn(count, 512, generator=torch.Generator().manual_seed(seed)).bfloat16()
        return cls.of(rows, layout, page_size, device, **sizes)

    @staticmethod
    def _pages(slab: Tensor, pages: int, need: int, gap: int) -> Tensor:
        return slab[gap:].unflatten(0, (pages, need + gap))[:, :need]

    @property
    def capacity(self) -> int:
        return self.cache.shape[0] * self.page_size

    def table(self) -> np.ndarray:
        """Every slot's row in fp64; NaN where nothing was stored."""
        pages = store.load_kv_pages(self.cache.cpu(), self.layout.name, self.page_size)
        return pages.flatten(0, 1).double().numpy()

    def rows(self, slots: Tensor, lengths: Tensor | None = None) -> lk.Rows:
        """The op's argument."""
        device = self.cache.device
        lengths = None if lengths is None else lengths.to(device)
        return lk.Rows(self.cache, slots.to(device), self.layout, self.page_size, lengths)

    def pick(self, tokens: int, width: int, seed: int, *, holes: float = 0.3) -> Tensor:
        """int32 slots `[tokens, width]` of filled rows, a share of them replaced by -1."""
        generator = torch.Generator().manual_seed(seed)
        which = torch.randint(0, len(self.filled), (tokens, width), generator=generator)
        skip = torch.rand(tokens, width, generator=generator) < holes
        return torch.where(skip, -1, self.filled[which]).int()


def queries(tokens: int, heads: int, device: torch.device, *, seed: int = 0, size: float = 3.0) -> Tensor:
    """bf16 queries `[tokens, heads, 512]` whose softmax is neither flat nor one-hot."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(tokens, heads, 512, generator=generator) * size).bfloat16().to(device)


def angle_table(positions: int, device: torch.device) -> Tensor:
    """fp32 `[positions, 64]`, (cos, sin) interleaved."""
    angle = torch.outer(torch.arange(float(positions)), 10000.0 ** -(torch.arange(0, 64, 2) / 64))
    return torch.stack((angle.cos(), angle.sin()), -1).flatten(1).to(device)


def expected(query: Tensor, *segments: tuple[Pool, Tensor, Tensor | None], **options: object) -> oracle.Result:
    """The oracle's result for a call's arguments."""
    parts = [(p.table(), s.cpu().numpy(), None if n is None else n.cpu().numpy()) for p, s, n in segments]
    arrays = {k: v.cpu().double().numpy() if isinstance(v, Tensor) else v for k, v in options.items()}
    return oracle.sparse_mla(query.cpu().double().numpy(), parts, **arrays)  # type: ignore[arg-type]


def assert_matches(backend, got: tuple[Tensor, Tensor], want: oracle.Result) -> None:
    """Out within a bf16 rounding, and, on a kernel's path, within bf16 rounding of the probabilities."""
    out, lse = got[0].cpu().double().numpy(), got[1].cpu().double().numpy()
    loss = (1.1 * 2.0**-8 if backend.is_kernel else 2.0**-18) + 2 * want.blur[..., None]
    bound = 2.0**-8 * np.abs(want.out) + loss * want.mass + 1e-38
    worst = np.max(np.abs(out - want.out) / bound, initial=0.0)
    assert worst <= 1.0, f"out is off by {worst:.2f} of what is allowed"
    assert np.array_equal(np.isneginf(lse), np.isneginf(want.lse))
    some = np.isfinite(want.lse)
    assert np.all(np.abs(lse[some] - want.lse[some]) <= want.blur[some] + 1e-5 + 1e-6 * np.abs(want.lse[some]))
