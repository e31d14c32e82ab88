"""Tokens whose pooling and norm are exact, and requests that decode them step by step."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

import latentkv as lk
from latentkv.reference import compress as reference
from tests.store.cases import angle_table

PAGE = 16
EPS = 1e-6
WEIGHT = torch.linspace(0.5, 2, 512).bfloat16()
TABLE = angle_table(97)


def exact_tokens(count: int, seed: int) -> Tensor:
    """Rows `| kv | score |` whose exponentials are 1 or 0 and whose pooled squares sum exactly in any order."""
    generator = torch.Generator().manual_seed(seed)
    kv = 2.0 * torch.randint(-15, 16, (count, 512), generator=generator)
    score = torch.tensor([0.0, 0.0, 200.0, -200.0])[torch.randint(0, 4, (count, 512), generator=generator)]
    return torch.cat((kv, score), 1)


def random_tokens(count: int, seed: int, spread: float = 3.0) -> Tensor:
    """Normal rows; scores differ by a few times `spread`."""
    rows = torch.randn(count, 1024, generator=torch.Generator().manual_seed(seed))
    rows[:, 512:] *= spread
    return rows


@dataclass
class Requests:
    """Requests with their own pages and pair state; `first[r]` is the next position of request r."""

    layout: str
    ring: int
    first: list[int]
    device: torch.device | str = "cpu"
    room: int = 128  # tokens of a request
    cache: Tensor = field(init=False)
    state: Tensor = field(init=False)
    position: Tensor = field(init=False)

    def __post_init__(self) -> None:
        pages = len(self.first) * self.room // 2 // PAGE + 1
        self.cache = lk.new_kv_cache(self.layout, pages, PAGE, device=self.device)
        self.state = torch.full((len(self.first) * self.ring, 1024), 8.0, device=self.device)
        self.state[:, 512:] = 0.0  # what a row reads that was never parked pools exactly, too
        self.position = torch.tensor(self.first)

    def block(self, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """raw_slots, positions and requests of the next `length` tokens of every request; advances."""
        positions = (self.position[:, None] + torch.arange(length)).flatten()
        requests = torch.arange(len(self.first)).repeat_interleave(length)
        self.position = self.position + length
        return requests * self.room + positions + 2, positions, requests

    def decode(self, rows: Tensor, where: tuple[Tensor, ...], out: Tensor, draft_len: int = 1) -> None:
        """`lk.compress2` on the device."""
        given = [x.to(self.device) for x in where]
        lk.compress2(
            rows.to(self.device), self.state, WEIGHT.to(self.device), self.cache, *given, TABLE.to(self.device),
            eps=EPS, layout=self.layout, page_size=PAGE, ring=self.ring, draft_len=draft_len, out=out,
        )  # fmt: skip

    def prefill(self, rows: Tensor, where: tuple[Tensor, ...], lengths: list[int], out: Tensor) -> None:
        """`lk.compress2_prefill` of chunks of these lengths."""
        count = torch.tensor(lengths, dtype=torch.int32)
        given = [x.to(self.device) for x in where]
        chunks = [x.to(self.device, torch.int32) for x in (count.cumsum(0) - count, count)]
        weight, table = WEIGHT.to(self.device), TABLE.to(self.device)
        lk.compress2_prefill(
            rows.to(self.device), self.state, weight, self.cache, *given, table, *chunks,
            eps=EPS, layout=self.layout, page_size=PAGE, ring=self.ring, out=out,
        )  # fmt: skip

    def reference_decode(self, rows: Tensor, where: tuple[Tensor, ...], out: Tensor, draft_len: int = 1) -> None:
        """The reference, on the CPU."""
        reference.compress2(
            rows, self.state, WEIGHT, self.cache, *where, TABLE, EPS, self.layout, PAGE, self.ring, draft_len, out
        )

    def reference_prefill(self, rows: Tensor, where: tuple[Tensor, ...], lengths: list[int], out: Tensor) -> None:
        """The reference, on the CPU."""
        count = torch.tensor(lengths, dtype=torch.int32)
        reference.compress2_prefill(
            rows, self.state, WEIGHT, self.cache, *where, TABLE, (count.cumsum(0) - count).int(), count, EPS,
            self.layout, PAGE, self.ring, out,
        )  # fmt: skip


def latents(count: int, device: torch.device | str = "cpu") -> Tensor:
    """An output that shows which rows were left alone."""
    return torch.full((count, 512), 9.0, dtype=torch.bfloat16, device=device)


def assert_equal(got: Requests, want: Requests) -> None:
    """Every byte of the caches and every bit of the states."""
    assert torch.equal(got.state.cpu(), want.state)
    assert torch.equal(got.cache.cpu(), want.cache)
