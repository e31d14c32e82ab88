"""Clocks: graph replay with events on a GPU, wall time on the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from latentkv._text import error_line
from latentkv.bench.records import Build, Timing
from latentkv.doctor import find_device

MAX_SETS = 32
SAMPLES = 50
SAMPLE_US = 400.0  # of a graph or of calls in a row, far above the events' resolution of 0.5 us
MAX_LAUNCHES = 400
MAX_SECONDS = 1.0  # of one measurement's samples
L2_DEFAULT = 64 << 20  # bytes, where the device does not tell
MATMUL_SIZE = 8192


class GraphClock:
    """Times calls on a GPU by replaying a captured graph of them.

    Calls rotate through as many input sets as exceed twice the L2 cache, up to `MAX_SETS`; a small op's sets stay
    cached, as they do behind the matrix product that makes them. The graph holds enough calls to last `SAMPLE_US`.

    Args:
        device: a CUDA or ROCm device.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.l2 = getattr(torch.cuda.get_device_properties(self.device), "L2_cache_size", 0) or L2_DEFAULT

    def time(self, build: Build, footprint: int, *, graph: bool = True, calls: int | None = None) -> Timing:
        """Median over `SAMPLES` replays, or over rows of calls on the stream where `graph` is False.

        With `calls`, over so many single calls on the stream.
        """
        if calls is not None:
            with torch.cuda.device(self.device):
                call = build(self.device, 0)
                call()
                return _timing(self._sample(call, calls), 1, "stream", 1, False)
        sets = set_count(footprint, self.l2)
        with torch.cuda.device(self.device):
            built = [build(self.device, seed) for seed in range(sets)]
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for call in built:  # compiles, and lets libraries allocate their workspaces
                    call()
            stream.synchronize()
            sample = self._sampler(built, sets, stream, graph)
            launches = launch_count(min(self._sample(sample, 3)) / sets, sets)
            if launches > sets:
                sample = self._sampler(built, launches, stream, graph)
            samples = self._sample(sample, SAMPLES)
        return _timing(samples, launches, "graph" if graph else "stream", sets, sets * footprint > self.l2)

    def roofs(self) -> dict[str, Any]:
        """Copy, read and matrix-product rates, and the time of an empty kernel."""
        return measure_roofs(self, _copy_bytes(self.device), MATMUL_SIZE)

    def _sampler(
        self, calls: Sequence[Callable[[], object]], launches: int, stream: torch.cuda.Stream, graph: bool
    ) -> Callable[[], object]:
        """What one sample runs: `launches` calls in turn, captured in a graph or not."""
        in_turn = _in_turn(calls, launches)
        if not graph:
            return in_turn
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, stream=stream):
            in_turn()
        captured.replay()
        return captured.replay

    def _sample(self, call: Callable[[], object], count: int) -> list[float]:
        """Microseconds of each of up to `count` calls."""
        torch.cuda.synchronize()
        marks = []
        started = time.perf_counter()
        for _ in range(count):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            call()
            end.record()
            marks.append((begin, end))
            if len(marks) % 5 == 0:  # bound the queue, and with it the time
                end.synchronize()
                if time.perf_counter() - started > MAX_SECONDS:
                    break
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) * 1e3 for begin, end in marks]


class WallClock:
    """Times calls on the CPU; `graph` is ignored.

    Args:
        device: the CPU.
        seconds: of one measurement.
    """

    def __init__(self, device: torch.device | str = "cpu", *, seconds: float = 0.2) -> None:
        self.device, self.seconds = torch.device(device), seconds

    def time(self, build: Build, footprint: int, *, graph: bool = True, calls: int | None = None) -> Timing:
        """Median over as many calls as the clock's seconds allow, at least three, or over `calls`."""
        call = build(self.device, 0)
        call()
        samples: list[float] = []
        stop = time.perf_counter() + self.seconds
        least, most = (calls, calls) if calls is not None else (3, SAMPLES)
        while len(samples) < least or (len(samples) < most and time.perf_counter() < stop):
            started = time.perf_counter()
            call()
            samples.append((time.perf_counter() - started) * 1e6)
        return _timing(samples, 1, "wall", 1, False)

    def roofs(self) -> dict[str, Any]:
        """Copy, read and matrix-product rates; no empty kernel."""
        return measure_roofs(self, 32 << 20, 512)


def clock_for(device: str | None) -> GraphClock | WallClock:
    """The clock of a device.

    Args:
        device: "cuda", "cuda:1" or "cpu"; the first GPU if None.

    Raises:
        ValueError: no such device here.
    """
    if device is None and not torch.cuda.is_available():
        raise ValueError("bench: PyTorch sees no GPU here; --device cpu times the reference instead")
    kind = find_device(device)
    if kind.type == "cpu":
        return WallClock(kind)
    return GraphClock(kind)


def set_count(footprint: int, cache: int) -> int:
    """Input sets that together exceed twice the cache, 2 to `MAX_SETS`."""
    return max(2, min(MAX_SETS, -(-2 * cache // max(1, footprint)) + 1))


def launch_count(us: float, sets: int) -> int:
    """Calls in a sample: whole turns through the sets that last `SAMPLE_US`, up to `MAX_LAUNCHES` calls."""
    return sets * max(1, min(MAX_LAUNCHES, round(SAMPLE_US / max(us, 0.1))) // sets)


def measure_roofs(clock: GraphClock | WallClock, size: int, matmul: int) -> dict[str, Any]:
    """The machine's own limits, each measured as the ops are; one that fails is None and named in `errors`.

    Args:
        clock: what measures.
        size: bytes copied and read.
        matmul: rows and columns of the matrices.
    """
    roofs: dict[str, Any] = {
        "copy_gb_per_s": None,
        "read_gb_per_s": None,
        "matmul_tflops": None,
        "empty_us": None,
        "errors": {},
    }
    work: dict[str, tuple[Build, int, Callable[[float], float]]] = {
        "copy_gb_per_s": (_copy(size), 2 * size, lambda us: 2 * size / us / 1e3),
        "read_gb_per_s": (_read(size), size, lambda us: size / us / 1e3),
        "matmul_tflops": (_matmul(matmul), 6 * matmul * matmul, lambda us: 2 * matmul**3 / us / 1e6),
    }
    if isinstance(clock, GraphClock):
        work["empty_us"] = (_empty, 1, lambda us: us)
    for name, (build, footprint, rate) in work.items():
        try:
            roofs[name] = rate(clock.time(build, footprint).us)
        except Exception as failure:
            roofs["errors"][name] = error_line(failure)
    return roofs


def _copy(size: int) -> Build:
    def build(device: torch.device, seed: int) -> Callable[[], object]:
        source = torch.rand(size // 4, device=device)
        target = torch.zeros_like(source)
        return lambda: torch.neg(source, out=target)  # a kernel: a captured copy_ is a memory-copy node, a third slower

    return build


def _read(size: int) -> Build:
    def build(device: torch.device, seed: int) -> Callable[[], object]:
        source = torch.zeros(size // 4, dtype=torch.float32, device=device)
        out = torch.zeros((), dtype=torch.float32, device=device)
        return lambda: torch.sum(source, dim=0, out=out)

    return build


def _matmul(size: int) -> Build:
    def build(device: torch.device, seed: int) -> Callable[[], object]:
        # random data: zeros draw less power, and so run faster
        a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
        out = torch.empty_like(a)
        return lambda: torch.matmul(a, b, out=out)

    return build


def _empty(device: torch.device, seed: int) -> Callable[[], object]:
    from latentkv.bench.empty import empty_kernel

    return lambda: empty_kernel[(1,)](num_warps=1)


def _copy_bytes(device: torch.device) -> int:
    return min(1 << 30, torch.cuda.get_device_properties(device).total_memory // 16)


def _in_turn(calls: Sequence[Callable[[], object]], launches: int) -> Callable[[], None]:
    def sample() -> None:
        for i in range(launches):
            calls[i % len(calls)]()

    return sample


def _timing(samples: list[float], launches: int, method: str, sets: int, cold: bool) -> Timing:
    ordered = sorted(us / launches for us in samples)
    at = [ordered[min(len(ordered) - 1, round(q * (len(ordered) - 1)))] for q in (0.5, 0.1, 0.9)]
    return Timing(at[0], at[1], at[2], method, sets, cold)
