"""Tables, notes and plots of a record."""

import builtins

import pytest
from rich.console import Console

from latentkv.bench import report


def _lines(record) -> list[str]:
    console = Console(width=180, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(report.table(record))
    return console.export_text().splitlines()


def test_table_shows_time_rate_share_and_peers(record):
    lines = _lines(record)
    (line,) = [x for x in lines if "store_kv" in x and " 256 " in x and "v41 " in x]
    for cell in ("2.00", "1.80 - 2.40", "128", "3 %", "30.00 (15.00x)", "absent"):
        assert cell in line
    (line,) = [x for x in lines if "65,536" in x]
    assert "3277" in line
    assert "82 %" in line
    (line,) = [x for x in lines if "load_kv" in x]
    assert "2.0" in line  # TFLOP/s
    assert any("copy 4000 GB/s, read 3500 GB/s, bf16 matmul 800 TFLOP/s, empty kernel 1.10 us" in x for x in lines)
    assert "NVIDIA H200, torch 2.11.0, Triton 3.6.0" in "\n".join(lines)


def test_failed_row_says_so_in_table_and_notes(record):
    assert any("v41_fp4" in line and "failed" in line for line in _lines(record))
    assert "store_kv v41_fp4 256: RuntimeError: out of memory at line 3" in report.notes(record)


def test_notes_name_each_absence_once(record):
    record["rows"].append(record["rows"][0])
    record["roofs"] = {**record["roofs"], "errors": {"read_gb_per_s": "RuntimeError: no"}}
    found = report.notes(record)
    assert found.count("sglang is absent: ImportError: No module named 'sglang'") == 1
    assert "read_gb_per_s: RuntimeError: no" in found


def test_machine_without_gpu_or_roofs_has_a_table(record):
    record["environment"]["devices"] = []
    record["roofs"] = {"errors": {}}
    text = "\n".join(_lines(record))
    assert "Linux" in text
    assert "no roofs were measured" in text


def test_plot_is_an_image_with_a_panel_an_op(record, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "p.png"
    report.plot([record], path)
    assert path.read_bytes().startswith(b"\x89PNG")
    curves = report._curves([record])
    assert list(curves) == ["store_kv", "load_kv"]
    points, roof, unit = curves["store_kv"]
    assert list(points) == ["v41"]  # the failed variant has no point
    assert points["v41"] == [(256, pytest.approx(128.0)), (65536, pytest.approx(3276.8))]
    assert (roof, unit) == (4000.0, "rows")


def test_plot_of_nothing_is_an_error(record, tmp_path):
    record["rows"] = [row for row in record["rows"] if row["timing"] is None]
    with pytest.raises(ValueError, match="no row of these records has a timing"):
        report.plot([record], tmp_path / "p.png")


def test_plot_without_matplotlib_raises(record, tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name: str, *rest: object, **more: object) -> object:
        if name.split(".")[0] == "matplotlib":
            raise ModuleNotFoundError("No module named 'matplotlib'")
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ModuleNotFoundError, match="matplotlib"):
        report.plot([record], tmp_path / "p.png")
