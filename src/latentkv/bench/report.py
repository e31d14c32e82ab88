"""A benchmark record as a table and as a plot."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.table import Table


def table(record: dict[str, Any]) -> Table:
    """The rows of a record; a peer's column has its time and how many times slower it is."""
    rows = record["rows"]
    peers = list(dict.fromkeys(name for row in rows for name in row["peers"]))
    has_flops = any(row["tflops"] is not None for row in rows)
    out = Table(title=f"{record['stage']}: {_machine(record)}", caption=_roofs(record["roofs"]))
    for name in ("op", "variant"):
        out.add_column(name, no_wrap=True)
    for name in ("size", "us", "p10 - p90", "GB/s", "of copy", *(["TFLOP/s"] if has_flops else []), *peers):
        out.add_column(name, justify="right", no_wrap=name not in peers)
    for row in rows:
        if row["timing"] is None:
            measured = ["failed", "", "", "", *([""] if has_flops else [])]
        else:
            timing = row["timing"]
            measured = [
                f"{timing['us']:.2f}",
                f"{timing['p10']:.2f} - {timing['p90']:.2f}",
                f"{row['gb_per_s']:.{0 if row['gb_per_s'] >= 10 else 2}f}",
                "" if row["copy_percent"] is None else f"{row['copy_percent']:.0f} %",
                *(["" if row["tflops"] is None else f"{row['tflops']:.1f}"] if has_flops else []),
            ]
        compared = [_peer(row["peers"][name]) if name in row["peers"] else "" for name in peers]
        out.add_row(row["op"], row["variant"], f"{row['size']:,}", *measured, *compared)
    return out


def steps_table(record: dict[str, Any]) -> Table:
    """Tokens a second of each step of a record, and the share of it that each stage takes."""
    steps = record["steps"]
    names = list(dict.fromkeys(name for step in steps for name in step["stages"]))
    out = Table(caption="share of the step; rest: norms, hyper-connection, gated experts, addresses, likeliest token")
    for name in ("requests", "rows", "us", "tokens/s", "with host", "eager", *names):
        out.add_column(name, justify="right")
    for step in steps:
        host, eager = step["with_host_tokens_per_second"], step["eager_over_step"]
        measured = [
            f"{step['us']:.1f}",
            f"{step['tokens_per_second']:,.0f}",
            "" if host is None else f"{host:,.0f}",
            "" if eager is None else f"{eager:.1f}x",
        ]
        shares = [f"{100 * step['stages'][n]['share']:.1f} %" if n in step["stages"] else "" for n in names]
        out.add_row(str(step["requests"]), str(step["rows"]), *measured, *shares)
    return out


def notes(record: dict[str, Any]) -> list[str]:
    """What failed or is absent, and why, each once."""
    found: dict[str, None] = {}
    for name, reason in record["roofs"].get("errors", {}).items():
        found[f"{name}: {reason}"] = None
    for row in record["rows"]:
        if row["error"]:
            found[f"{row['op']} {row['variant']} {row['size']}: {row['error']}"] = None
        for name, peer in row["peers"].items():
            if "absent" in peer:
                found[f"{name} is absent: {peer['absent']}"] = None
    return list(found)


def plot(records: Iterable[dict[str, Any]], path: Path) -> None:
    """Draw bandwidth over size, one panel an op, one line a variant, with the copy bandwidth of the run.

    Raises:
        ValueError: no row has a timing.
        ModuleNotFoundError: matplotlib is missing; the `plot` extra brings it.
    """
    curves = _curves(records)
    if not curves:
        raise ValueError("plot: no row of these records has a timing")
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, len(curves), figsize=(4.6 * len(curves), 4.0), layout="constrained", squeeze=False, sharey=True
    )
    for axis, (op, (variants, roof, unit)) in zip(axes[0], curves.items(), strict=True):
        for variant, points in variants.items():
            sizes, rates = zip(*sorted(points), strict=True)
            axis.plot(sizes, rates, marker="o", markersize=4, label=variant)
        if roof:
            axis.axhline(roof, color="0.5", linestyle="--", linewidth=1, label="copy")
        axis.set_xscale("log", base=2)
        axis.set_title(op)
        axis.set_xlabel(unit)
        axis.legend(frameon=False)
    axes[0][0].set_ylabel("GB/s")
    axes[0][0].set_ylim(bottom=0)
    figure.savefig(path, dpi=140)
    plt.close(figure)


_Curves = dict[str, tuple[dict[str, list[tuple[int, float]]], float | None, str]]


def _curves(records: Iterable[dict[str, Any]]) -> _Curves:
    """By op: points by variant, the copy bandwidth, the unit of the sizes."""
    curves: _Curves = {}
    for record in records:
        for row in record["rows"]:
            if row["gb_per_s"] is None:
                continue
            variants, _, _ = curves.setdefault(row["op"], ({}, record["roofs"].get("copy_gb_per_s"), row["unit"]))
            variants.setdefault(row["variant"], []).append((row["size"], row["gb_per_s"]))
    return curves


def _peer(result: dict[str, Any]) -> str:
    if "absent" in result:
        return "absent"
    return f"{result['us']:.2f}" + ("" if result["ratio"] is None else f" ({result['ratio']:.2f}x)")


def _machine(record: dict[str, Any]) -> str:
    environment = record["environment"]
    devices = environment.get("devices") or []
    name = devices[0]["name"] if devices else environment.get("platform", "")
    return f"{name}, torch {environment.get('torch')}, Triton {environment.get('triton')}, {record['date']}"


def _roofs(roofs: dict[str, Any]) -> str:
    parts = [
        text.format(roofs[name])
        for name, text in (
            ("copy_gb_per_s", "copy {:.0f} GB/s"),
            ("read_gb_per_s", "read {:.0f} GB/s"),
            ("matmul_tflops", "bf16 matmul {:.0f} TFLOP/s"),
            ("empty_us", "empty kernel {:.2f} us"),
        )
        if roofs.get(name) is not None
    ]
    return "measured in this run: " + ", ".join(parts) if parts else "no roofs were measured"
