"""Kernels really compiled, each in a process of its own: this one has Triton's interpreter on."""

from __future__ import annotations

import ast
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import latentkv.kernels
from latentkv.ops._library import OPS
from latentkv.targets import TARGETS

HERE = Path(__file__).parent
KERNELS = Path(latentkv.kernels.__file__).parent
STAGES = sorted({op.stage for op in OPS.values() if op.kernel} | {"model"})


def _targets(*arguments: str) -> tuple[int, dict[str, Any]]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", "latentkv", "targets", "--json", "--jobs", "2", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.parametrize("stage", STAGES)
def test_every_variant_fits_every_target(stage):
    code, found = _targets("--stage", stage)
    assert [
        f"{b['kernel']} [{b['label']}] {b['target']}: {b['problems']}" for b in found["builds"] if b["problems"]
    ] == []
    assert code == 0
    assert {b["target"] for b in found["builds"]} == {t["name"] for t in found["targets"]}


@pytest.mark.parametrize("stage", STAGES)
def test_every_kernel_has_a_case(stage):
    source = ast.parse((KERNELS / f"{stage}.py").read_text())
    kernels = {node.name for node in source.body if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")}
    cases = importlib.import_module(f"latentkv.kernels.{stage}").TARGET_CASES
    assert kernels
    assert {case.kernel.__name__ for case in cases} >= kernels
    built = [(c.kernel.__name__, c.label, target) for c in cases for target in c.targets or TARGETS]
    assert len(set(built)) == len(built)  # else two rows of the table look the same


@pytest.fixture(scope="module")
def planted(tmp_path_factory) -> tuple[int, dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("asm")
    targets = ("--target", "sm90", "--target", "gfx942")
    code, found = _targets("--module", "planted_kernels", *targets, "--asm", str(folder))
    return code, found, folder


def _planted(found: dict[str, Any], label: str, target: str) -> dict[str, Any]:
    (build,) = [b for b in found["builds"] if (b["label"], b["target"]) == (label, target)]
    return build


def test_planted_failures_fail_the_command(planted):
    code, found, _ = planted
    assert code == 1
    assert found["failing"] == len([b for b in found["builds"] if b["problems"]]) > 0


def test_planted_good_kernel_passes(planted):
    for target in ("sm90", "gfx942"):
        build = _planted(planted[1], "good", target)
        assert build["problems"] == []
        assert 0 < build["usage"]["registers"] < 32


def test_planted_spill_is_reported(planted):
    build = _planted(planted[1], "spills", "sm90")
    assert build["usage"]["spills"] > 0
    assert build["usage"]["scratch_bytes"] > 0
    assert build["problems"][0].startswith("spills ")


def test_planted_shared_memory_excess_is_reported(planted):
    assert any(p.startswith("shared 262144 B of 65536") for p in _planted(planted[1], "large", "gfx942")["problems"])


def test_case_is_built_for_its_targets_only(planted):
    assert [b["target"] for b in planted[1]["builds"] if b["label"] == "large"] == ["gfx942"]


def test_planted_compile_error_is_reported(planted):
    build = _planted(planted[1], "broken", "gfx942")
    assert build["usage"] is None
    assert "planted" in build["problems"][0]


def test_case_with_wrong_arguments_is_reported(planted):
    assert "m, n missing, or not the kernel's" in _planted(planted[1], "wrong", "sm90")["problems"][0]


def test_assembly_is_written(planted):
    folder = planted[2]
    stem = "planted_kernels-good_kernel-good"
    assert "s_endpgm" in (folder / f"{stem}-gfx942.amdgcn").read_text()
    assert ".target sm_90" in (folder / f"{stem}-sm90.ptx").read_text()
    assert "EXIT" in (folder / f"{stem}-sm90.sass").read_text()
