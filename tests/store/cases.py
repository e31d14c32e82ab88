"""Shapes, slabs and values shared by the tests of `store` and of the number formats."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import latentkv as lk
from tests.store import oracle

LAYOUTS = [m.name for m in lk.KVLayout.members()]
QUANTIZED = ["v4", "v41", "v41_fp4", "v41_mxfp4"]
FLOATS = [torch.bfloat16, torch.float16, torch.float32]
MIXES = [(n, torch.bfloat16) for n in LAYOUTS]  # every layout, and every dtype with every kind of arithmetic
MIXES += [(n, d) for n in ("v4", "v41", "v41_fp4", "bf16") for d in (torch.float16, torch.float32)]
INTS = [torch.int32, torch.int64]
FILL = 0xA5

# slots that no cache of 64 rows has; the large ones have low words, or low halves, that would be valid
OUTSIDE = [-1, -2, -64, 64, 65, 2**31 - 1, -(2**31), -(2**31) + 3]
OUTSIDE_64 = [2**32 + 3, 2**40, 2**40 + 3, -(2**40) + 3, 2**63 - 1, -(2**63), -(2**63) + 3]


@dataclass
class Slab:
    """Pages `gap` bytes apart in a buffer filled with 0xA5, the first one `start` bytes behind its beginning."""

    layout: str
    page_size: int
    pages: int
    start: int
    stride: int
    buffer: Tensor

    @classmethod
    def new(
        cls, layout: str, page_size: int, device: torch.device, *, pages: int = 3, gap: int = 64, start: int = 128
    ) -> Slab:
        stride = oracle.FORMS[layout].page_bytes(page_size) + gap
        buffer = torch.full((start + pages * stride,), FILL, dtype=torch.uint8, device=device)
        return cls(layout, page_size, pages, start, stride, buffer)

    @property
    def cache(self) -> Tensor:
        size = oracle.FORMS[self.layout].page_bytes(self.page_size)
        return self.buffer[self.start :].unflatten(0, (self.pages, self.stride))[:, :size]

    @property
    def capacity(self) -> int:
        return self.pages * self.page_size

    @property
    def form(self) -> dict[str, object]:
        """Keyword arguments of the ops."""
        return {"layout": self.layout, "page_size": self.page_size}

    def after(self, rows: np.ndarray, slots: Tensor) -> np.ndarray:
        """The whole buffer as it must be once finished fp32 rows are written to a fresh slab."""
        want = np.full(self.buffer.numel(), FILL, np.uint8)
        oracle.write(want, self.start, self.stride, self.pages, rows, slots.cpu(), self.layout, self.page_size)
        return want

    def bytes(self) -> np.ndarray:
        return self.buffer.cpu().numpy()

    def row_bytes(self, slot: int) -> tuple[np.ndarray, np.ndarray]:
        """A slot's data and scale bytes."""
        form = oracle.FORMS[self.layout]
        data, scale = (self.start + at for at in form.addresses(slot, self.page_size, self.stride))
        return self.bytes()[data : data + form.data_bytes], self.bytes()[scale : scale + form.scale_bytes]


def slots_of(count: int, capacity: int, seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Distinct slots in random order, the last one of the cache among them."""
    order = torch.randperm(capacity - 1, generator=torch.Generator().manual_seed(seed))[: count - 1]
    slots = torch.cat((order, torch.tensor([capacity - 1])))
    return slots[torch.randperm(count, generator=torch.Generator().manual_seed(seed))].to(dtype).to(device)


def random_rows(count: int, dtype: torch.dtype, *, seed: int = 0, spread: int = 12) -> Tensor:
    """Normal rows `[count, 512]` whose groups of 16 differ in size by up to 2^(2 * spread), with zeros and -0."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.randint(-spread, spread + 1, (count, 32, 1), generator=generator)
    rows = (torch.randn(count, 32, 16, generator=generator) * torch.exp2(size.float())).flatten(1)
    zero = torch.rand(rows.shape, generator=generator)
    rows = torch.where(zero < 0.04, 0.0, torch.where(zero < 0.08, -0.0, rows))
    return rows.clamp(-60000, 60000).to(dtype)


def summable_rows(count: int, dtype: torch.dtype, *, seed: int = 0) -> Tensor:
    """Rows whose squares sum exactly in any order, so that every device norms them alike."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(-31, 32, (count, 512), generator=generator).float()
    rows = rows * torch.exp2(torch.randint(-3, 4, (count, 1), generator=generator).float())
    rows[::5] *= torch.arange(512) % 7 == 3  # sparse rows have larger normed values
    return rows.to(dtype)


def angle_table(positions: int, *, width: int = 64, theta: float = 10000.0) -> Tensor:
    """fp32 `[positions, width]`, (cos, sin) interleaved."""
    angle = torch.outer(torch.arange(float(positions)), theta ** -(torch.arange(0, width, 2) / width))
    return torch.stack((angle.cos(), angle.sin()), -1).flatten(1)


def as_complex(table: Tensor) -> Tensor:
    """The complex64 view of a table."""
    return torch.view_as_complex(table.unflatten(1, (-1, 2)))


def short(dtype: torch.dtype) -> str:
    """The name that the oracle takes."""
    return str(dtype).removeprefix("torch.")


def finished(rows: Tensor, angles: Tensor | None = None) -> np.ndarray:
    """fp32 rows as `store_kv` quantizes them: the tail rotated and rounded to the rows' dtype."""
    values = rows.float().cpu().numpy()
    if angles is not None:
        tail = oracle.rotate(values[:, 448:], angles.cpu().numpy())
        values = np.concatenate((values[:, :448], oracle.round_to(tail, short(rows.dtype))), 1)
    return values


def normed(rows: Tensor, weight: Tensor, eps: float, angles: Tensor, layout: str, rounded: bool = True) -> np.ndarray:
    """fp32 rows as `norm_rope_store_kv` quantizes them; V4 is not rounded in between."""
    values = oracle.norm(rows.float().numpy(), weight.float().numpy(), eps)
    rounded = rounded and layout != "v4"
    if rounded:
        values = oracle.round_to(values, "bfloat16")
    tail = oracle.rotate(values[:, 448:], angles.numpy())
    return np.concatenate((values[:, :448], oracle.round_to(tail, "bfloat16") if rounded else tail), 1)


# --- every value with every scale -------------------------------------------------------------------------------------


def patterns(dtype: torch.dtype) -> Tensor:
    """All 65536 values of a 16-bit dtype, in the order of their bits."""
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)


def magnitudes(dtype: torch.dtype) -> np.ndarray:
    """The finite magnitudes of a 16-bit dtype as fp32, ascending."""
    values = patterns(dtype)[:32768].float().numpy()
    return values[np.isfinite(values)]


def largest_of_scales(layout: str, dtype: torch.dtype) -> dict[int, float]:
    """Every scale byte that a group of this dtype can get, and the largest magnitude that gives it."""
    values = magnitudes(dtype)
    _, scale = oracle.quantize(np.pad(values[:, None], ((0, 0), (0, oracle.FORMS[layout].group - 1))), layout)
    return dict(zip(scale[:, 0].tolist(), values.tolist(), strict=True))  # ascending, so the largest stays


def value_sweep(layout: str, dtype: torch.dtype, *, binades: int | None = None) -> Tensor:
    """Rows in which every scale meets every value that it can scale, both signs.

    `binades` keeps the values of that many binades below each group's largest; the rest are coded as zero anyway.
    """
    form, values = oracle.FORMS[layout], magnitudes(dtype)
    groups = []
    for largest in largest_of_scales(layout, dtype).values():
        below = values[values <= largest]
        if binades is not None:
            below = below[below >= largest * 2.0**-binades]
        both = np.concatenate((below, -below))
        both = np.pad(both, (0, -len(both) % (form.group - 1))).reshape(-1, form.group - 1)
        groups.append(np.concatenate((np.full((len(both), 1), largest, np.float32), both), 1))
    return rows_of_groups(np.concatenate(groups), form, dtype)


def largest_sweep(layout: str, dtype: torch.dtype) -> Tensor:
    """Rows with one group for every finite magnitude, as its largest value."""
    form, values = oracle.FORMS[layout], magnitudes(dtype)
    groups = np.zeros((len(values), form.group), np.float32)
    groups[:, 0], groups[:, 1], groups[:, -1] = values, values / 3, -values
    return rows_of_groups(groups, form, dtype)


def rows_of_groups(groups: np.ndarray, form: oracle.Form, dtype: torch.dtype) -> Tensor:
    """Rows `[n, 512]` that hold these groups in order; a bf16 tail and the rest are zero."""
    per_row = (512 - form.tail) // form.group
    groups = np.pad(groups, ((0, -len(groups) % per_row), (0, 0)))
    rows = groups.reshape(-1, per_row * form.group)
    return torch.from_numpy(np.pad(rows, ((0, 0), (0, form.tail)))).to(dtype)


def near_ties(layout: str) -> Tensor:
    """fp32 rows with every scale and, for each middle between two codes, the values around it."""
    form = oracle.FORMS[layout]
    codes = oracle.E2M1_VALUES if form.element == "e2m1" else oracle.E4M3_VALUES[:24]
    groups = []
    for byte, largest in largest_of_scales(layout, torch.bfloat16).items():
        scale = oracle.E4M3_VALUES[byte] if layout == "v41_fp4" else 2.0 ** (byte - 127)
        middles = (codes[:-1] + codes[1:]) / 2 * scale
        middles = middles[middles <= largest].astype(np.float32)
        around = np.concatenate(
            (np.nextafter(middles, np.float32(0)), middles, np.nextafter(middles, np.float32(3e38)))
        )
        around = around[around <= largest]
        around = np.concatenate((around, -around))
        around = np.pad(around, (0, -len(around) % (form.group - 1))).reshape(-1, form.group - 1)
        groups.append(np.concatenate((np.full((len(around), 1), largest, np.float32), around), 1))
    return rows_of_groups(np.concatenate(groups), form, torch.float32)
