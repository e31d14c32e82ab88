"""The benchmark modules: found in a clone and in an installed package, and what they list."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import latentkv as lk
from latentkv.bench import Case, find_stages, load_stage, stages

ROOT = Path(__file__).parents[2]


def test_stages_come_from_the_first_folder_that_has_any(tmp_path):
    empty, clone = tmp_path / "package", tmp_path / "clone"
    clone.mkdir()
    (clone / "frob.py").write_text("X = 1\n")
    (clone / "_shared.py").write_text("")
    (clone / "README.md").write_text("")
    assert find_stages((empty, clone)) == {"frob": clone / "frob.py"}
    assert load_stage("frob", (empty, clone)).X == 1


def test_no_folder_and_no_stage_are_errors(tmp_path):
    with pytest.raises(ValueError, match="no benchmark modules in"):
        find_stages((tmp_path,))
    with pytest.raises(ValueError, match="stage: 'frob' is none of "):
        load_stage("frob")


def test_this_clone_has_its_own_modules():
    assert find_stages()["store"] == ROOT / "benchmarks" / "store.py"


def test_wheel_carries_benchmarks_and_checkpoint_but_no_results(tmp_path):
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "latentkv/benchmarks/store.py" in names
    assert "latentkv/model/checkpoints/stdlib-5m.safetensors" in names
    assert not [name for name in names if "results" in name]
    installed = stages.FOLDERS[0].relative_to(stages.PACKAGE.parent) / "store.py"
    assert installed.as_posix() in names  # where an installed package looks


@pytest.mark.parametrize("stage", sorted(find_stages()))
def test_cases_of_a_stage_are_distinct_and_count_bytes(stage):
    cases = load_stage(stage).cases()
    assert cases
    assert all(isinstance(case, Case) for case in cases)
    assert len({(case.op, case.variant, case.size) for case in cases}) == len(cases)
    assert all(case.bytes > 0 or case.flops > 0 for case in cases)
    assert {case.op for case in cases} <= {*lk.__all__, "decode_step"}  # which is all stages together


@pytest.mark.parametrize("stage", sorted(find_stages()))
def test_cases_of_a_stage_run_on_a_cpu(stage):
    for case in load_stage(stage).cases([2]):
        case.build(torch.device("cpu"), 0)()


def test_store_counts_the_bytes_of_its_docstring():
    by_name = {case.name: case for case in load_stage("store").cases()}
    assert by_name["store_kv v41 256"].bytes == 256 * (1024 + 8 + 528)
    assert by_name["store_kv v4 65536"].bytes == 65536 * (1024 + 8 + 584)
    assert by_name["norm_rope_store_kv v41_fp4 1"].bytes == 1024 + 8 + 8 + 256 + 288 + 1024
    assert by_name["load_kv v4 65536"].bytes == 65536 * (583 + 8 + 1024)


def test_compress_counts_the_bytes_of_its_docstring():
    by_name = {case.name: case for case in load_stage("compress").cases()}
    assert by_name["compress1 v41 256"].bytes == 256 * (1024 + 16 + 256 + 1024 + 528) + 1024
    pair = 256 + 1024 + 288
    assert by_name["compress2 v41_fp4 decode 1"].bytes == 2 * 4096 + 24 + pair + 1024
    assert by_name["compress2 v41_fp4 decode 64"].bytes == 64 * (4096 + 24) + 32 * 2 * 4096 + 32 * pair + 1024
    assert by_name["compress2 v41_fp4 verify 1536"].bytes == 1536 * 4120 + (768 + 128) * 4096 + 768 * pair + 1024
    assert by_name["compress2_prefill v41_fp4 prefill 8192"].bytes == 8192 * 4120 + 16 * 4096 + 4096 * pair + 1024


def test_store_measures_the_main_layouts_at_every_size_and_the_others_once():
    cases = load_stage("store").cases()
    sizes = [case.size for case in cases if case.op == "load_kv" and case.variant == "v41"]
    assert sizes == [1, 16, 64, 256, 1536, 8192, 65536]
    assert [case.size for case in cases if case.op == "load_kv" and case.variant == "bf16"] == [65536]


def test_store_peers_run_or_say_why_not():
    case = next(c for c in load_stage("store").cases() if c.name == "store_kv v41 256")
    assert [peer.name for peer in case.peers] == ["eager", "sglang"]
    case.peers[0].build(torch.device("cpu"), 0)()
    with pytest.raises(NotImplementedError, match="sglang has no kernel for v41 here"):
        case.peers[1].build(torch.device("cpu"), 0)


def test_command_times_the_reference_on_a_cpu(tmp_path, capsys, monkeypatch):
    from latentkv import cli
    from latentkv.bench import timing

    monkeypatch.setattr(timing, "clock_for", lambda device: timing.WallClock(device, seconds=0.0))
    out, plot = tmp_path / "new" / "store.json", tmp_path / "store.png"
    arguments = [
        "bench",
        "store",
        "--device",
        "cpu",
        "--size",
        "1",
        "--size",
        "3",
        "--out",
        str(out),
        "--revision",
        "r1",
    ]
    assert cli.main([*arguments, "--plot", str(plot), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record == json.loads(out.read_text())
    assert record["environment"]["revision"] == "r1"
    assert {row["size"] for row in record["rows"]} == {1, 3}
    assert all(row["timing"]["method"] == "wall" for row in record["rows"])
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert cli.main(["bench", "--device", "cpu", "--size", "1", "--out", str(tmp_path / "all")]) == 0
    assert "norm_rope_store_kv" in capsys.readouterr().out
    assert {file.stem for file in (tmp_path / "all").iterdir()} == set(find_stages())


def test_command_fails_when_a_row_fails(capsys, monkeypatch):
    from latentkv import cli

    def fail(*args: object, **more: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(lk, "store_kv", fail)
    assert cli.main(["bench", "store", "--device", "cpu", "--size", "1"]) == 1
    assert "store_kv v41 1: RuntimeError: planted" in capsys.readouterr().out
