"""A clock that pretends, cases for it, and a record of a pretended run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from latentkv.bench import Case, Peer, Timing, record_of, run


class Fakes:
    """`takes(us)` builds a call that returns its own time; `Fakes.Clock` believes it."""

    ROOFS: dict[str, Any] = {  # noqa: RUF012
        "copy_gb_per_s": 4000.0,
        "read_gb_per_s": 3500.0,
        "matmul_tflops": 800.0,
        "empty_us": 1.1,
        "errors": {},
    }

    class Clock:
        def __init__(self) -> None:
            self.asked: list[tuple[int, bool]] = []

        def time(self, build: Any, footprint: int, *, graph: bool = True, calls: int | None = None) -> Timing:
            self.asked.append((footprint, graph))
            us = build(torch.device("cpu"), 0)()
            return Timing(us, us * 0.9, us * 1.2, "graph" if graph else "stream", 4, True)

        def roofs(self) -> dict[str, Any]:
            return Fakes.ROOFS

    @staticmethod
    def takes(us: float) -> Any:
        return lambda device, seed: lambda: us

    @staticmethod
    def fails(error: Exception) -> Any:
        def build(device: torch.device, seed: int) -> Any:
            raise error

        return build

    @classmethod
    def case(cls, op: str = "store_kv", variant: str = "v41", size: int = 256, us: Any = 2.0, **more: Any) -> Case:
        build = us if callable(us) else cls.takes(us)
        return Case(op, variant, size, "rows", size * 1000, build, **more)


@pytest.fixture(scope="session")
def fakes() -> type[Fakes]:
    return Fakes


@pytest.fixture
def record(fakes: type[Fakes]) -> dict[str, Any]:
    peers = (
        Peer("eager", fakes.takes(30.0), graph=False),
        Peer("sglang", fakes.fails(ImportError("No module named 'sglang'"))),
    )
    cases = [
        fakes.case(size=256, us=2.0, peers=peers),
        fakes.case(size=65536, us=20.0),
        fakes.case(variant="v41_fp4", us=fakes.fails(RuntimeError("out of memory\nat line 3"))),
        fakes.case(op="load_kv", us=4.0, flops=8_000_000),
    ]
    machine = {"torch": "2.11.0", "triton": "3.6.0", "devices": [{"name": "NVIDIA H200"}], "platform": "Linux"}
    rows = run(cases, fakes.Clock(), fakes.ROOFS)
    return record_of("store", rows, fakes.ROOFS, machine, date="2026-12-01T00:00:00+00:00")
