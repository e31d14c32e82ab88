"""Writes the README's table of measurements from `benchmarks/results/*.json`: `python -P benchmarks/_readme.py`.

Of every op it shows the packed FP4 rows where there are such, else the first variant, at the size nearest to 256 and at
the largest, and every row in which a peer is faster. Nothing in the table is typed by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from latentkv.bench import load_record

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
ORDER = ("store", "compress", "index", "select", "attend", "route", "model")
NEAR = 256


def measured(records: Sequence[dict[str, Any]]) -> str:
    """Markdown of some records: a table an environment, and one of decoding steps."""
    parts = []
    for record in sorted(records, key=lambda record: ORDER.index(record["stage"])):
        parts.append(_steps(record) if record.get("steps") else _rows(record))
    return "\n\n".join(parts)


def _rows(record: dict[str, Any]) -> str:
    lines = [
        _heading(record),
        "",
        "| operation | size | us | GB/s or TFLOP/s | of copy | peers, times slower |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in _chosen(record["rows"]):
        rate = f"{row['gb_per_s']:.0f} GB/s" if row["tflops"] is None else f"{row['tflops']:.0f} TFLOP/s"
        share = "" if row["tflops"] is not None or row["copy_percent"] is None else f"{row['copy_percent']:.0f} %"
        peers = ", ".join(f"{n} {_times(p['ratio'])}" for n, p in row["peers"].items() if p.get("ratio"))
        lines.append(
            f"| `{row['op']}` {row['variant']} | {row['size']:,} {row['unit']} | {row['timing']['us']:.2f} | {rate} "
            f"| {share} | {peers} |"
        )
    return "\n".join(lines)


def _steps(record: dict[str, Any]) -> str:
    lines = [
        _heading(record),
        "",
        "| requests x rows | us a step | tokens a second | with the host | eager, times slower | largest shares |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for step in record["steps"]:
        host, eager = step["with_host_tokens_per_second"], step["eager_over_step"]
        largest = sorted(step["stages"].items(), key=lambda item: -item[1]["share"])[:4]
        shares = ", ".join(f"{name} {100 * stage['share']:.0f} %" for name, stage in largest)
        lines.append(
            f"| {step['requests']} x {step['rows']} | {step['us']:.0f} | {step['tokens_per_second']:,.0f} "
            f"| {'' if host is None else f'{host:,.0f}'} | {'' if eager is None else _times(eager)} "
            f"| {shares} |"
        )
    return "\n".join(lines)


def _times(ratio: float) -> str:
    return f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.1f}" if ratio >= 10 else f"{ratio:.2f}"


def _heading(record: dict[str, Any]) -> str:
    environment = record["environment"]
    devices = environment.get("devices") or [{"name": environment.get("platform")}]
    versions = f"PyTorch {environment['torch']}, Triton {environment['triton']}, driver {environment['driver']}"
    return (
        f"**{record['stage']}**, {record['date'][:10]}, {devices[0]['name']}, {versions}, revision "
        f"{environment['revision']}"
    )


def _chosen(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    chosen = []
    timed = [row for row in rows if row["timing"] is not None]
    for op in dict.fromkeys(row["op"] for row in timed):
        of_op = [row for row in timed if row["op"] == op]
        variant = next((row["variant"] for row in of_op if "v41_fp4" in row["variant"]), of_op[0]["variant"])
        sizes = sorted({row["size"] for row in of_op if row["variant"] == variant})
        shown = {min(sizes, key=lambda size: abs(size - NEAR)), sizes[-1]}
        chosen += [r for r in of_op if (r["variant"] == variant and r["size"] in shown) or _is_beaten(r)]
    return chosen


def _is_beaten(row: dict[str, Any]) -> bool:
    return any((peer.get("ratio") or 1.0) < 1.0 for peer in row["peers"].values())


def updated(readme: str, folder: Path = ROOT / "benchmarks" / "results") -> str:
    """The README with the table of the records in a folder."""
    before, rest = readme.split(BEGIN)
    _, after = rest.split(END)
    records = [load_record(path) for path in sorted(folder.glob("*.json"))]
    return f"{before}{BEGIN}\n\n{measured(records)}\n\n{END}{after}"


if __name__ == "__main__":
    page = ROOT / "README.md"
    page.write_text(updated(page.read_text()))
