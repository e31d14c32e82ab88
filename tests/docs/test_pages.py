"""The documents hold: tables of worked values, C code and names are checked against the library."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import re
import shutil
import subprocess
from dataclasses import fields
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

import latentkv as lk
from latentkv import numerics
from latentkv.layout import INDEX_GROUP, IndexKeyLayout, IndexQueryLayout, KVLayout

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.glob("*.md"), ROOT / "README.md", *(ROOT / "benchmarks").glob("*.md")])


def tables(page: str) -> list[list[dict[str, str]]]:
    """Every table of a page: its rows as dictionaries by column name."""
    found: list[list[dict[str, str]]] = []
    header: list[str] | None = None
    for line in (DOCS / page).read_text().splitlines():
        if not line.startswith("|"):
            header = None
            continue
        cells = [cell.strip().replace("`", "") for cell in line.strip().strip("|").split("|")]
        if header is None:
            header = cells
            found.append([])
        elif not set(line) <= set("|- "):
            found[-1].append(dict(zip(header, cells, strict=True)))
    return found


def rows_with(page: str, *columns: str) -> list[dict[str, str]]:
    """Rows of all tables of a page that have these columns, in this order and no others."""
    rows = [row for table in tables(page) for row in table if list(row) == list(columns)]
    assert rows, f"{page} has no table with columns {columns}"
    return rows


def group(text: str, rest: float, size: int) -> torch.Tensor:
    values = [float(x) for x in text.split(",")]
    return torch.tensor(values + [rest] * (size - len(values)))


@pytest.mark.parametrize("row", rows_with("numerics.md", "layout", "values", "bytes", "scale"), ids=str)
def test_worked_rows(row):
    layout = KVLayout.parse(row["layout"])
    codes, scale = numerics.quantize(group(row["values"], 0.0, layout.group_size), layout)
    stored = numerics.pack_nibbles(codes) if layout.element.bits == 4 else codes
    want = bytes.fromhex(row["bytes"])
    assert bytes(stored[: len(want)].tolist()) == want
    assert scale.item() == int(row["scale"], 16)


@pytest.mark.parametrize("row", rows_with("numerics.md", "values", "rest", "codes", "exponent"), ids=str)
def test_worked_index_groups(row):
    values = group(row["values"], float(row["rest"]), INDEX_GROUP)
    key = torch.cat((values, torch.zeros(128 - INDEX_GROUP)))
    payload, scale = numerics.quantize_index(numerics.fake_quant_index(key))
    codes = numerics.unpack_nibbles(payload.view(torch.uint8))
    want = [int(code) for code in row["codes"].split()]
    assert codes[: len(want)].tolist() == want
    assert scale.item() & 0xFF == int(row["exponent"])


def test_e2m1_tables():
    (values,) = [t for t in tables("numerics.md") if t and t[0].get("code") == "value"]
    (ties,) = [t for t in tables("numerics.md") if t and "tie" in t[0]]
    for code, value in list(values[0].items())[1:]:
        assert numerics.e2m1_decode(torch.tensor([int(code)])).item() == float(value)
        assert numerics.e2m1_encode(torch.tensor([float(value)])).item() == int(code)
    for tie, code in list(ties[0].items())[1:]:
        assert numerics.e2m1_encode(torch.tensor([float(tie)])).item() == int(code)


def test_layout_table():
    columns = ("layout", "row bytes", "data", "data bytes", "scales", "scale bytes", "values a scale", "page unit")
    rows = rows_with("formats.md", *columns)
    assert {row["layout"].lower() for row in rows} == {m.name for m in KVLayout.members() if not m.is_interleaved}
    for row in rows:
        layout = KVLayout.parse(row["layout"])
        assert int(row["row bytes"]) == layout.row_bytes
        assert int(row["data bytes"]) == layout.data_bytes
        assert int(row["scale bytes"]) == layout.scale_bytes
        assert row["values a scale"] in (str(layout.group_size), "-")
        assert int(row["page unit"]) == layout.page_unit_bytes


ADDRESSES = rows_with("formats.md", "layout", "P", "slot", "page_bytes", "data", "scale")


@pytest.mark.parametrize("row", ADDRESSES, ids=str)
def test_worked_row_addresses(row):
    layout, page_size, slot = KVLayout.parse(row["layout"]), int(row["P"]), int(row["slot"])
    assert layout.page_bytes(page_size) == int(row["page_bytes"])
    assert layout.data_offset(slot, page_size) == int(row["data"])
    if row["scale"] != "-":
        assert layout.scale_offset(slot, page_size) == int(row["scale"])


@pytest.mark.parametrize(
    "row", rows_with("formats.md", "layout", "slot", "d", "payload byte", "nibble", "scale byte"), ids=str
)
def test_worked_index_key_addresses(row):
    layout, (page, offset), d = IndexKeyLayout.parse(row["layout"]), divmod(int(row["slot"]), 64), int(row["d"])
    payload_page, scale_page = (4352, 4352) if layout is IndexKeyLayout.FUSED else (4096, 256)
    assert page * payload_page + layout.payload_in_page(offset, d) == int(row["payload byte"])
    assert page * scale_page + layout.scale_in_page(offset, d // 32) == int(row["scale byte"])
    assert row["nibble"] == ("high" if d % 2 else "low")


@pytest.mark.parametrize(
    "row", rows_with("formats.md", "layout", "H", "t", "h", "d", "payload byte", "nibble", "scale byte"), ids=str
)
def test_worked_index_query_addresses(row):
    layout, heads = IndexQueryLayout.parse(row["layout"]), int(row["H"])
    token, head, d = int(row["t"]), int(row["h"]), int(row["d"])
    token_bytes = 256 if layout is IndexQueryLayout.FLYDSL else heads * 4
    assert (token * heads + head) * 64 + d // 2 == int(row["payload byte"])
    assert token * token_bytes + layout.scale_in_token(head, d // 32) == int(row["scale byte"])


def test_bytes_a_token():
    for row in rows_with("formats.md", "selected rows", "bytes a token, index keys included"):
        layout = KVLayout.parse(row["selected rows"].split()[0])
        page = layout.page_bytes(64) / 64
        assert float(row["bytes a token, index keys included"]) == 2.5 * (page + 68)


@pytest.mark.parametrize("row", rows_with("formats.md", "lengths", "units", "decode records"), ids=str)
def test_worked_schedules(row):
    lengths = torch.tensor([int(x) for x in row["lengths"].split(",")])
    schedule = lk.decode_schedule(lengths, workers=int(row["units"]), max_len=2048)
    assert schedule.tolist() == [[int(x) for x in record.split()] for record in row["decode records"].split(";")]


def test_public_names_exist():
    named = re.findall(r"lk\.([a-z]\w*)", (DOCS / "names.md").read_text())
    assert len(named) > 20
    assert set(named) <= set(lk.__all__)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_a_page_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target


# --- the C of the pages -----------------------------------------------------------------------------------------------


class Layout(ctypes.Structure):
    _fields_ = [("data", ctypes.c_int64), ("scale", ctypes.c_int64), ("unit", ctypes.c_int64), ("inter", ctypes.c_int)]


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> ctypes.CDLL:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("c")
    blocks = [re.findall(r"```c\n(.*?)```", (DOCS / page).read_text(), re.S) for page in ("formats.md", "numerics.md")]
    assert all(blocks)
    source = folder / "pages.c"
    source.write_text("\n".join(block for page in blocks for block in page))
    warnings = ("-std=c99", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror")
    subprocess.run([compiler, *warnings, "-shared", "-fPIC", "-o", folder / "pages.so", source, "-lm"], check=True)
    loaded = ctypes.CDLL(str(folder / "pages.so"))
    for name, extra in (("kv_page_bytes", 1), ("kv_data", 3), ("kv_scale", 3)):
        getattr(loaded, name).argtypes = [Layout] + [ctypes.c_int64] * extra
        getattr(loaded, name).restype = ctypes.c_int64
    loaded.e4m3_encode.argtypes = [ctypes.c_float]
    loaded.e4m3_encode.restype = ctypes.c_uint8
    loaded.exp_nonpositive.argtypes = [ctypes.c_float]
    loaded.exp_nonpositive.restype = ctypes.c_float
    return loaded


@pytest.mark.parametrize("layout", KVLayout.members(), ids=str)
def test_addresses_in_c_are_the_library_s(library, layout):
    c = Layout(layout.data_bytes, layout.scale_bytes, layout.page_unit_bytes, layout.is_interleaved)
    for page_size in (1, 64, 256):
        assert library.kv_page_bytes(c, page_size) == layout.page_bytes(page_size)
        for slot in (0, 1, page_size - 1, page_size, 40_000_000):  # the last lies past 2^32 bytes
            for stride in (layout.page_bytes(page_size), layout.page_bytes(page_size) + 4096):
                assert library.kv_data(c, page_size, stride, slot) == layout.data_offset(slot, page_size, stride)
                assert library.kv_scale(c, page_size, stride, slot) == layout.scale_offset(slot, page_size, stride)


def test_e4m3_in_c_rounds_like_ml_dtypes(library):
    grid = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    grid = np.unique(grid[np.isfinite(grid)])
    middles = (grid[1:] + grid[:-1]) / 2
    values = np.concatenate((grid, middles, np.nextafter(middles, np.inf), np.nextafter(middles, -np.inf)))
    want = values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    got = np.array([library.e4m3_encode(float(x)) for x in values], dtype=np.uint8)
    nonzero = values != 0
    assert np.array_equal(got[nonzero], want[nonzero])
    assert [library.e4m3_encode(x) for x in (0.0, -0.0, 1e9, -1e9, float("inf"), float("-inf"))] == [
        0,
        0x80,
        0x7E,
        0xFE,
        0x7E,
        0xFE,
    ]
    assert library.e4m3_encode(float("nan")) == 0x7F


def test_exp_in_c_has_the_bits_of_the_library_s(library):
    x = torch.cat(
        (-torch.rand(4000, generator=torch.Generator().manual_seed(0)) * 90, torch.tensor([0.0, -0.0, -87.0]))
    )
    ours = torch.tensor([library.exp_nonpositive(value) for value in x.tolist()])
    assert torch.equal(ours, numerics.exp_nonpositive(x))
    assert library.exp_nonpositive(float("-inf")) == 0.0
    assert library.exp_nonpositive(float("nan")) != library.exp_nonpositive(float("nan"))


# --- the Python of the pages ------------------------------------------------------------------------------------------


def python_of(page: Path) -> str:
    """All Python of a page as one program; its lines keep their numbers, so that a traceback points into the page."""
    lines, inside = [], False
    for line in page.read_text().splitlines():
        fence = line.startswith("```")
        inside = line == "```python" if fence else inside
        lines.append(line if inside and not fence else "")
    return "\n".join(lines)


EXECUTED = [page for page in PAGES if "```python" in page.read_text()]


@pytest.mark.parametrize("page", EXECUTED, ids=lambda page: page.name)
def test_python_of_a_page_runs(page):
    exec(compile(python_of(page), str(page), "exec"), {"__name__": "page"})


def test_the_guide_and_the_readme_have_python():
    assert {page.name for page in EXECUTED} >= {"integration.md", "README.md"}


# --- measurements -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def readme():
    spec = importlib.util.spec_from_file_location("readme_table", ROOT / "benchmarks" / "_readme.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_measurements_of_the_readme_are_those_of_the_records(readme):
    page = (ROOT / "README.md").read_text()
    assert page == readme.updated(page), "run `python -P benchmarks/_readme.py`"


def record(stage: str, rows: list[dict], **more) -> dict:
    environment = {"torch": "2", "triton": "3", "driver": "580", "revision": "abc", "devices": [{"name": "card"}]}
    return {"stage": stage, "date": "2026-12-01T00:00:00", "environment": environment, "rows": rows, **more}


def row(variant: str, size: int, peers: dict | None = None, tflops: float | None = None) -> dict:
    return {
        "op": "frob", "variant": variant, "size": size, "unit": "rows", "timing": {"us": 2.0}, "gb_per_s": 1234.4,
        "copy_percent": 50.4, "tflops": tflops, "peers": peers or {},
    }  # fmt: skip


def test_the_table_shows_two_sizes_of_an_op_and_what_is_faster(readme):
    faster = {"eager": {"us": 1.0, "ratio": 0.5}, "other": {"absent": "no such module"}}
    rows = [row("v41", 7, faster), *(row("v41_fp4", n, {"eager": {"ratio": 12.34}}) for n in (1, 64, 250, 1000, 9000))]
    lines = readme.measured([record("store", [*rows, row("v4", 9999)])]).splitlines()
    assert lines[0] == "**store**, 2026-12-01, card, PyTorch 2, Triton 3, driver 580, revision abc"
    assert lines[4:] == [
        "| `frob` v41 | 7 rows | 2.00 | 1234 GB/s | 50 % | eager 0.50 |",
        "| `frob` v41_fp4 | 250 rows | 2.00 | 1234 GB/s | 50 % | eager 12.3 |",
        "| `frob` v41_fp4 | 9,000 rows | 2.00 | 1234 GB/s | 50 % | eager 12.3 |",
    ]
    assert readme.measured([record("attend", [row("x", 1, tflops=321.0)])]).splitlines()[-1] == (
        "| `frob` x | 1 rows | 2.00 | 321 TFLOP/s |  |  |"
    )


def test_the_table_shows_steps_of_the_model_last(readme):
    stages = {name: {"us": 1.0, "share": share} for name, share in (("store", 0.1), ("attend", 0.5), ("rest", 0.4))}
    steps = [
        {
            "requests": 64, "rows": 1, "us": 500.0, "tokens_per_second": 128000.0, "eager_over_step": 123.4,
            "with_host_tokens_per_second": None, "stages": stages,
        }
    ]  # fmt: skip
    text = readme.measured([record("model", [row("x", 64)], steps=steps), record("store", [row("v4", 1)])])
    assert text.index("**store**") < text.index("**model**")
    assert text.splitlines()[-1] == "| 64 x 1 | 500 | 128,000 |  | 123 | attend 50 %, rest 40 %, store 10 % |"


def test_keys_of_the_records_are_explained():
    from latentkv.bench import Row, Timing

    page = (DOCS / "benchmarks.md").read_text()
    explained = set(re.findall(r"`(\w+)`", page))
    records = [json.loads(path.read_text()) for path in (ROOT / "benchmarks" / "results").glob("*.json")]
    keys = {key for r in records for part in (r, r["roofs"], *r.get("steps", ())) for key in part}
    keys |= {f.name for c in (Row, Timing) for f in fields(c)}
    assert keys <= explained
