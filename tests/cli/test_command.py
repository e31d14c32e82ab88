"""The command line's frame: help, errors in one line, exit codes."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from latentkv import cli

COMMANDS = ("generate", "eval", "doctor", "bench", "targets")


def test_help_names_every_command(command):
    result = command("--help")
    assert result.code == 0
    assert all(name in result.out for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_prints_json_on_request(command, name):
    assert "--json" in command(name, "--help").out


def test_help_loads_no_kernels_no_model_and_no_plotting():
    code = (
        "import sys\n"
        "from latentkv.cli import main\n"
        "assert main(['--help']) == 0\n"
        "loaded = {'triton', 'matplotlib', 'safetensors', 'latentkv.model', 'latentkv.kernels'} & set(sys.modules)\n"
        "sys.exit(f'loaded {loaded}' if loaded else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_module_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "latentkv", "targets", "--target", "sm10"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("latentkv: ")


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, tmp_path / "foreign.safetensors")
    (tmp_path / "noise.safetensors").write_bytes(b"\x00" * 40)
    (tmp_path / "binary.txt").write_bytes(b"\x7fELF\x00\xff\xfe")
    (tmp_path / "latin.txt").write_bytes("caf\u00e9".encode("latin-1"))
    (tmp_path / "empty.txt").write_bytes(b"")
    return {"dir": str(tmp_path), **{file.name: str(file) for file in tmp_path.iterdir()}}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["frobnicate"], "frobnicate"),
        (["generate"], "prompt"),
        (["generate", "x", "--tokens", "many"], "--tokens"),
        (["generate", "x", "--tokens", "0"], "max_tokens: 0 is below 1"),
        (["generate", "x", "--temperature", "-1"], "temperature: -1.0 is negative"),
        (["generate", "x", "--row-layout", "v9"], "layout: 'v9' is none of v4, v41,"),
        (["generate", "x", "--row-layout", "v4"], "v4 rows cannot be read together with v41"),
        (["generate", "x", "--device", "tpu"], "device: 'tpu' is none of cpu, cuda, cuda:N"),
        (["generate", "x", "--device", "cuda:99"], "device: cuda:99 given"),
        (["generate", "x", "--checkpoint", "{foreign.safetensors}"], "foreign.safetensors is no latentkv-model-1 file"),
        (["generate", "x", "--checkpoint", "{noise.safetensors}"], "noise.safetensors is not a safetensors file"),
        (["generate", "x", "--checkpoint", "{dir}/missing"], "missing is not a file"),
        (["eval", "--text", "{binary.txt}"], "is not UTF-8 text"),
        (["eval", "--text", "{latin.txt}"], "is not UTF-8 text (byte 3"),
        (["eval", "--text", "{empty.txt}"], "is empty"),
        (["eval", "--text", "{dir}"], "cannot be read"),
        (["eval", "--corpus", "{dir}"], "has no *.py files"),
        (["eval", "--pair", "v41"], "pair: 'v41' given, WINDOW:ROWS needed"),
        (["eval", "--pair", "v41:v9"], "layout: 'v9' is none of"),
        (["eval", "--context", "0"], "context: 0 is below 1"),
        (["targets", "--target", "sm70"], "target: 'sm70' is none of gfx950, gfx942, gfx1201, sm80, sm90"),
        (["bench", "frob", "--device", "cpu"], "stage: 'frob' is none of"),
        (["bench", "store", "--device", "mps"], "device: 'mps' is none of cpu, cuda, cuda:N"),
        (["bench", "store", "--device", "cuda:64"], "device: cuda:64 given, PyTorch sees"),
        (["bench", "store", "--device", "cpu", "--size", "0"], "--size"),
    ],
)
def test_bad_input_is_one_line_and_code_2(command, files, monkeypatch, arguments, said):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for name, path in files.items():
        arguments = [a.replace("{" + name + "}", path) for a in arguments]
    result = command(*arguments)
    assert result.code == 2
    assert result.out == ""
    assert result.err.startswith("latentkv: ")
    assert result.err.count("\n") == 1
    assert said in result.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to time")
def test_bench_without_a_gpu_says_so(command):
    result = command("bench", "store")
    assert result.code == 2
    assert result.err == "latentkv: bench: PyTorch sees no GPU here; --device cpu times the reference instead\n"


def test_targets_refuses_the_interpreter(command, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    result = command("targets")
    assert result.code == 2
    assert "TRITON_INTERPRET is set" in result.err


def test_plot_without_matplotlib_names_the_extra(command, monkeypatch):
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None)
    for arguments in (["eval", "--plot", "x.png"], ["bench", "store", "--plot", "x.png"]):
        result = command(*arguments)
        assert result.code == 2
        assert "pip install '.[plot]'" in result.err


def test_traceback_option_raises_what_was_caught(command):
    with pytest.raises(ValueError, match="WINDOW:ROWS"):
        command("--traceback", "eval", "--pair", "v41")
    assert command("eval", "--pair", "v41").code == 2  # the option lasts for one command


def test_an_error_that_no_input_caused_is_not_hidden(command, monkeypatch):
    def fail() -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("latentkv.doctor.report", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        command("doctor")


def test_interruption_has_its_own_code(command, monkeypatch):
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("latentkv.doctor.report", interrupt)
    assert command("doctor").code == 130


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "store", "--out", "."], "out: . is a folder, a file needed"),
        (["bench", "--out", "taken"], "out: taken is a file, a folder needed"),
        (["bench", "store", "--out", "taken/x.json"], "out: taken is a file, a folder needed"),
        (["bench", "store", "--plot", "p.xyz"], "plot: p.xyz given, a file name that ends in one of "),
        (["eval", "--plot", "p"], "plot: p given, a file name that ends in one of "),
        (["eval", "--plot", "."], "plot: . given, a file name that ends in one of "),
    ],
    ids=["folder", "file", "below a file", "image of a kind", "image of no kind", "folder for an image"],
)
def test_places_for_results_are_checked_before_the_work(command, arguments, message, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").touch()

    def work(*args: object, **kwargs: object) -> None:
        raise AssertionError("the work has begun")

    monkeypatch.setattr("latentkv.bench.run", work)
    monkeypatch.setattr("latentkv.model.evaluation.evaluate", work)
    result = command(*arguments)
    assert result.code == 2
    assert message in " ".join(result.err.split())
