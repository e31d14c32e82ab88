"""The environment report."""

import json
import platform
import subprocess
import sys

import pytest
import torch

from latentkv import doctor
from latentkv.ops._library import OPS, OpRecord


def test_json_has_every_op_and_the_versions(command):
    result = command("doctor", "--json")
    found = json.loads(result.out)
    assert result.code == 0
    assert {op["op"] for op in found["ops"]} == set(OPS)
    assert found["python"] == platform.python_version()
    assert found["torch"] == torch.__version__
    assert len(found["devices"]) == torch.cuda.device_count()


def test_text_shows_every_op(command):
    out = command("doctor").out
    assert all(name in out for name in OPS)
    assert torch.__version__ in out


@pytest.mark.parametrize(
    ("kernel", "triton", "interpreter", "gpu"),
    [
        (None, "3.9.0", False, "reference"),
        (None, None, True, "reference"),
        ("launch", "3.9.0", False, "kernel"),
        ("launch", "3.9.0", True, "kernel, interpreted"),
        ("launch", None, False, "none: Triton is missing"),
    ],
)
def test_path_of_an_op(monkeypatch, kernel, triton, interpreter, gpu):
    monkeypatch.setattr(doctor, "OPS", {"frob": OpRecord("frob", "store", kernel)})
    monkeypatch.setattr(doctor, "triton_version", lambda: triton)
    monkeypatch.setattr(doctor, "interpreter_is_on", lambda: interpreter)
    assert doctor.report()["ops"] == [{"op": "frob", "stage": "store", "cpu": "reference", "gpu": gpu}]


@pytest.mark.parametrize(("value", "is_on"), [("1", True), ("true", True), ("0", False), ("", False), (None, False)])
def test_interpreter_is_read_from_the_environment(monkeypatch, value, is_on):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if value is not None:
        monkeypatch.setenv("TRITON_INTERPRET", value)
    assert doctor.interpreter_is_on() is is_on


def test_missing_triton_is_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)  # makes the import fail
    assert doctor.environment()["triton"] is None


def test_revision_of_a_clone_marks_changes(tmp_path):
    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=t", "-c", "user.email=t@example.invalid")
        done = subprocess.run(["git", *identity, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    assert doctor.revision(tmp_path) is None
    git("init", "-q")
    assert doctor.revision(tmp_path) is None  # no commit yet
    (tmp_path / "file").write_text("a")
    git("add", "file")
    git("commit", "-q", "-m", "one")
    head = git("rev-parse", "HEAD")
    assert doctor.revision(tmp_path) == head[:12]
    (tmp_path / "file").write_text("b")
    assert doctor.revision(tmp_path) == head[:12] + "+"


def test_device_of_a_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert doctor.find_device(None) == torch.device("cuda")
    assert doctor.find_device("cuda:1") == torch.device("cuda", 1)
    assert doctor.find_device("cpu") == torch.device("cpu")
    for name in ("cuda:2", "cuda:-1", "cuda:x", "cpu:0", "mps"):
        with pytest.raises(ValueError, match="device: "):
            doctor.find_device(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert doctor.find_device(None) == torch.device("cpu")
