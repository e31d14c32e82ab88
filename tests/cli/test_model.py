"""`generate` and `eval` on a small random model."""

import io
import json
import sys

import pytest
from rich.console import Console

from latentkv import cli
from latentkv.model import ModelConfig, save_checkpoint
from latentkv.model.weights import init_weights

TEXT = "".join(f"line {i} of a text\n" for i in range(12))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    config = ModelConfig(
        hidden=64, heads=2, q_rank=32, o_rank=16, index_topk=16, candidate_blocks=6, experts=4, expert_width=16,
        max_positions=512,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("model") / "small.safetensors"
    save_checkpoint(path, config, init_weights(config))
    return str(path)


def test_generate_streams_the_prompt_and_what_follows(command, checkpoint):
    arguments = ("generate", "abc", "--tokens", "6", "--checkpoint", checkpoint, "--device", "cpu")
    shown = command(*arguments)
    told = json.loads(command(*arguments, "--json").out)
    assert shown.code == 0
    assert shown.out == "abc" + told["text"] + "\n"
    assert "4 prompt tokens" in shown.err
    assert told["prompt"] == "abc"
    assert told["prompt_tokens"] == 4
    assert 0 < told["new_tokens"] <= 6
    assert (told["window_layout"], told["row_layout"]) == ("v41", "v41_fp4")


def test_progress_bar_never_erases_the_text(command, checkpoint, monkeypatch):
    screen = io.StringIO()  # a terminal shows both streams
    monkeypatch.setattr(cli, "_stderr", lambda: Console(file=screen, force_terminal=True))
    monkeypatch.setattr(cli, "_write", screen.write)
    assert command("generate", "abc", "--tokens", "3", "--checkpoint", checkpoint, "--device", "cpu").code == 0
    bar, text = screen.getvalue().split("abc", 1)
    assert "prefill" in bar
    assert "\x1b[2K" in bar
    assert "\x1b[2K" not in text


def test_generate_depends_on_its_seed_alone(command, checkpoint):
    def text(*more: str) -> str:
        arguments = ("generate", "abc", "--tokens", "12", "--temperature", "2", "--top-p", "1", "--device", "cpu")
        return json.loads(command(*arguments, "--checkpoint", checkpoint, "--json", *more).out)["text"]

    assert text("--seed", "1") == text("--seed", "1")
    assert text("--seed", "1") != text("--seed", "2")


def test_generate_reads_stdin(command, checkpoint, monkeypatch):
    arguments = ("generate", "-", "--tokens", "1", "--checkpoint", checkpoint, "--device", "cpu", "--json")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("caf\u00e9".encode())))
    assert json.loads(command(*arguments).out)["prompt"] == "caf\u00e9"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff")))
    result = command(*arguments)
    assert result.code == 2
    assert result.err == "latentkv: prompt: stdin is not UTF-8 text (byte 0 does not decode)\n"


def test_generate_refuses_a_prompt_without_room(command, checkpoint):
    result = command("generate", "x" * 600, "--checkpoint", checkpoint, "--device", "cpu")
    assert result.code == 2
    assert "pass the model's 512 positions" in result.err


def test_eval_reports_a_row_a_pair(command, checkpoint, tmp_path):
    (tmp_path / "t.txt").write_text(TEXT)
    arguments = ("eval", "--text", str(tmp_path / "t.txt"), "--context", "96", "--windows", "1", "--device", "cpu")
    pairs = ("--pair", "bf16:bf16", "--pair", "v41:v41_fp4")
    plot = tmp_path / "e.png"
    told = command(*arguments, *pairs, "--checkpoint", checkpoint, "--json", "--plot", str(plot))
    report = json.loads(told.out)
    assert told.code == 0
    assert [(row["window_layout"], row["row_layout"]) for row in report["rows"]] == [
        ("bf16", "bf16"),
        ("v41", "v41_fp4"),
    ]
    assert report["bytes"] == 96
    assert report["rows"][0]["difference"] == 0.0
    assert report["rows"][1]["bytes_per_token"] < report["rows"][0]["bytes_per_token"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    shown = command(*arguments, *pairs, "--checkpoint", checkpoint).out
    assert "v41 + v41_fp4" in shown
    assert f"{report['rows'][0]['bits_per_byte']:.4f}" in shown


def test_eval_defaults_to_held_out_library_sources(command, checkpoint):
    arguments = ("eval", "--context", "16", "--windows", "1", "--pair", "bf16:bf16", "--device", "cpu")
    report = json.loads(command(*arguments, "--checkpoint", checkpoint, "--json").out)
    assert report["source"] == "held-out library sources"
    assert report["bytes"] == 16
