"""What a benchmark measures and what it records; nothing here touches a device."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from latentkv._text import error_line

SCHEMA = 1

# Makes one set of inputs (`seed` tells sets apart) and returns a call that runs the op on them.
Build = Callable[[Any, int], Callable[[], object]]


@dataclass(frozen=True)
class Peer:
    """Another implementation of a case's op, or the reason why there is none.

    Attributes:
        name: as shown.
        build: like `Case.build`; raises `ImportError` or `NotImplementedError` where the peer is absent.
        graph: whether its calls can be captured in a graph; else they are timed one by one on the stream.
        calls: time so many calls on one set of inputs, for what takes long or is used up; the clock's choice if None.
    """

    name: str
    build: Build
    graph: bool = True
    calls: int | None = None


@dataclass(frozen=True)
class Case:
    """One op at one size.

    Attributes:
        op: the public name.
        variant: a layout, or what else tells cases of an op apart.
        size: how many `unit`s.
        unit: of `size`, such as "rows".
        bytes: that the op must move, counted by hand.
        build: makes inputs and the call.
        flops: that the op must do; 0 where bytes are what counts.
        peers: what it is compared with, the quick ones first.
    """

    op: str
    variant: str
    size: int
    unit: str
    bytes: int
    build: Build
    flops: int = 0
    peers: tuple[Peer, ...] = ()

    @property
    def name(self) -> str:
        """Op, variant and size."""
        return f"{self.op} {self.variant} {self.size}"


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call.

    Attributes:
        us: median over samples.
        p10: tenth percentile.
        p90: ninetieth percentile.
        method: "graph" (replays of a captured graph), "stream" (calls between two events) or "wall".
        sets: input sets that the calls rotate through.
        cold: whether the sets together exceed the last-level cache.
    """

    us: float
    p10: float
    p90: float
    method: str
    sets: int = 1
    cold: bool = False


class Clock(Protocol):
    """What times a case: `latentkv.bench.timing` has one for GPUs and one for the CPU, tests have one that pretends."""

    def time(self, build: Build, footprint: int, *, graph: bool = True, calls: int | None = None) -> Timing:
        """Time the calls that `build` makes; `footprint` is the bytes that one of them touches.

        `calls` asks for so many single calls on one set of inputs, behind one that does not count.
        """

    def roofs(self) -> dict[str, Any]:
        """Measure the machine: `copy_gb_per_s`, `read_gb_per_s`, `matmul_tflops`, `empty_us`; None what it has not."""


@dataclass
class Row:
    """One case's result.

    Attributes:
        op, variant, size, unit, bytes, flops: the case's.
        timing: None if it failed.
        gb_per_s: bytes over the median.
        copy_percent: of the copy bandwidth measured in the same run.
        tflops: flops over the median; None without flops.
        peers: name to `{"us", "ratio", "method"}` (a ratio above 1: the peer is slower) or `{"absent": reason}`.
        error: why there is no timing.
    """

    op: str
    variant: str
    size: int
    unit: str
    bytes: int
    flops: int
    timing: Timing | None = None
    gb_per_s: float | None = None
    copy_percent: float | None = None
    tflops: float | None = None
    peers: dict[str, dict[str, Any]] = field(default_factory=dict)
    error: str | None = None


def run(
    cases: Sequence[Case],
    clock: Clock,
    roofs: dict[str, Any],
    *,
    seconds: float = 600.0,
    progress: Callable[[str], None] | None = None,
    now: Callable[[], float] = time.monotonic,
) -> list[Row]:
    """Time cases, then their peers; a failure stays in its row.

    Args:
        cases: what to time.
        clock: what times them.
        roofs: from `clock.roofs()`.
        seconds: no measurement starts later than this; what is left out says so.
        progress: called with a name before each measurement.
        now: seconds from some start.

    Returns:
        One row a case, in order.
    """
    deadline = now() + seconds
    rows = []
    for case in cases:
        row = Row(case.op, case.variant, case.size, case.unit, case.bytes, case.flops)
        rows.append(row)
        if progress is not None:
            progress(case.name)
        if now() > deadline:
            row.error = f"not measured: {seconds:g} s were over"
            continue
        try:
            _fill(row, clock.time(case.build, case.bytes), roofs)
        except Exception as failure:  # a benchmark reports failures, whatever they are
            row.error = error_line(failure)
    pairs = [(i, case, row) for case, row in zip(cases, rows, strict=True) for i in range(len(case.peers))]
    for i, case, row in sorted(
        pairs, key=lambda pair: pair[0]
    ):  # every case's first peer first: they are the cheap ones
        peer = case.peers[i]
        if progress is not None:
            progress(f"{case.name}: {peer.name}")
        if now() > deadline:
            row.peers[peer.name] = {"absent": f"not measured: {seconds:g} s were over"}
        else:
            row.peers[peer.name] = _time_peer(peer, case, row, clock)
    return rows


def _fill(row: Row, timing: Timing, roofs: dict[str, Any]) -> None:
    row.timing = timing
    row.gb_per_s = row.bytes / timing.us / 1e3
    if roofs.get("copy_gb_per_s"):
        row.copy_percent = 100.0 * row.gb_per_s / roofs["copy_gb_per_s"]
    if row.flops:
        row.tflops = row.flops / timing.us / 1e6


def _time_peer(peer: Peer, case: Case, row: Row, clock: Clock) -> dict[str, Any]:
    try:
        timing = clock.time(peer.build, case.bytes, graph=peer.graph, calls=peer.calls)
    except (ImportError, NotImplementedError) as reason:
        return {"absent": error_line(reason)}
    except Exception as failure:
        return {"absent": f"failed: {error_line(failure)}"}
    ratio = timing.us / row.timing.us if row.timing else None
    return {"us": timing.us, "ratio": ratio, "method": timing.method}


def record_of(
    stage: str, rows: Sequence[Row], roofs: dict[str, Any], environment: dict[str, Any], *, date: str | None = None
) -> dict[str, Any]:
    """A run as plain values: the schema's number, the stage, the date, the machine, its roofs and the rows."""
    return {
        "schema": SCHEMA,
        "stage": stage,
        "date": date or datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": environment,
        "roofs": roofs,
        "rows": [asdict(row) for row in rows],
    }


def load_record(path: Path) -> dict[str, Any]:
    """Read a record.

    Raises:
        ValueError: the file is missing or is no record of this schema.
    """
    try:
        record = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"record: {path} cannot be read ({error_line(error)})") from error
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        raise ValueError(f"record: {path} is no benchmark record of schema {SCHEMA}")
    return record
