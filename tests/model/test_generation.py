"""Generation and evaluation on a small random model."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from latentkv.model import evaluation, generation
from latentkv.model.cache import ModelCache
from latentkv.model.config import PAD_TOKEN, START_TOKEN, ModelConfig
from latentkv.model.evaluation import agreement, evaluate, held_out_windows, plot, text_windows
from latentkv.model.generation import Sampling, draw, generate
from latentkv.model.paged import PagedModel, Picks
from latentkv.model.weights import Weights


@pytest.fixture(scope="module")
def model(config: ModelConfig, weights: Weights) -> PagedModel:
    return PagedModel(config, weights)


def test_greedy_text_is_what_stepping_by_hand_gives(model: PagedModel):
    events = list(generate(model, "def f(x):", max_tokens=12, sampling=Sampling(temperature=0), chunk=4))
    cache = ModelCache(model.config, max_tokens=128)
    request = cache.open()
    logits = model.step(cache, [(request, [START_TOKEN, *b"def f(x):"])])[0]
    expected = bytearray()
    for _ in range(12):
        token = int(logits[:PAD_TOKEN].argmax())
        if token == START_TOKEN:
            break
        expected.append(token)
        logits = model.step(cache, [(request, [token])])[0]
    assert events[-1].summary.text == expected.decode("utf-8", "replace")
    assert "".join(e.text for e in events) == events[-1].summary.text


def test_events_count_the_prompt_then_the_new_bytes(model: PagedModel):
    events = list(generate(model, b"x" * 9, max_tokens=5, chunk=4))
    assert [(e.done, e.total) for e in events if e.phase == "prefill"] == [(4, 10), (8, 10), (10, 10)]
    decoded = [e.done for e in events if e.phase == "decode"]
    assert decoded == list(range(1, len(decoded) + 1))
    summary = events[-1].summary
    assert summary.prompt_tokens == 10
    assert summary.new_tokens == len(decoded)
    assert summary.kv_bytes_per_token == 1.5 * (288 + 68)
    assert summary.window_bytes == 7 * 128 * 528
    assert (summary.window_layout, summary.row_layout) == ("v41", "v41_fp4")
    assert json.loads(json.dumps(summary.to_dict()))["tokens_per_second"] > 0


def test_same_seed_gives_the_same_text(model: PagedModel):
    texts = [
        list(generate(model, "a", max_tokens=10, sampling=Sampling(1.0, 1.0, seed=s)))[-1].summary.text
        for s in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_end_of_document_stops(model: PagedModel, monkeypatch: pytest.MonkeyPatch):
    answers = iter([ord("a"), START_TOKEN])
    monkeypatch.setattr(generation, "draw", lambda *args: next(answers))
    last = list(generate(model, "x", max_tokens=10))[-1]
    assert (last.summary.text, last.summary.new_tokens, last.summary.stopped) == ("a", 1, "end")


def test_bytes_of_one_character_are_printed_together(model: PagedModel, monkeypatch: pytest.MonkeyPatch):
    answers = iter([*"é".encode(), 0xC3])
    monkeypatch.setattr(generation, "draw", lambda *args: next(answers))
    events = list(generate(model, "x", max_tokens=3))
    assert [e.text for e in events if e.phase != "prefill"] == ["", "é", "", "\ufffd"]


def test_draw_takes_the_likeliest_at_zero_and_never_a_spare_token():
    logits = torch.zeros(260)
    logits[65], logits[PAD_TOKEN:] = 3.0, 50.0
    generator = torch.Generator().manual_seed(0)
    assert draw(logits, Sampling(0.0), generator) == 65
    drawn = {draw(logits, Sampling(1.0, 1.0), generator) for _ in range(200)}
    assert max(drawn) < PAD_TOKEN
    assert len(drawn) > 50
    assert {draw(logits, Sampling(1.0, 0.05), generator) for _ in range(20)} == {65}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_tokens": 0}, "max_tokens: 0"),
        ({"max_tokens": 1024}, "pass the model's 1024 positions"),
        ({"window_layout": "v5"}, "v5"),
        ({"window_layout": "v41_fp4", "row_layout": "v4"}, "cannot be read together"),
    ],
)
def test_bad_generation_is_refused_before_it_starts(model: PagedModel, change: dict, message: str):
    with pytest.raises(ValueError, match=message):
        generate(model, "x", **change)


@pytest.mark.parametrize(("options", "message"), [((-1.0,), "temperature"), ((1.0, 0.0), "top_p")])
def test_bad_sampling_is_refused(options: tuple, message: str):
    with pytest.raises(ValueError, match=message):
        Sampling(*options)


# --- evaluation -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def windows(tokens: torch.Tensor) -> list[torch.Tensor]:
    start = torch.tensor([START_TOKEN])
    return [torch.cat((start, tokens[:70])), torch.cat((start, tokens[70:160])), torch.cat((start, tokens[160:175]))]


@pytest.fixture(scope="module")
def report(model: PagedModel, windows: list[torch.Tensor]) -> evaluation.Report:
    return evaluate(model, windows, source="noise", chunk=32, requests=2)


def test_bits_per_byte_are_those_of_single_runs(
    model: PagedModel, windows: list[torch.Tensor], report: evaluation.Report
):
    total = 0.0
    for window in windows:
        cache = ModelCache(model.config, max_tokens=128, chunk=100)
        logits = model.step(cache, [(cache.open(), window[:-1])], all_logits=True)
        total += float(F.cross_entropy(logits, window[1:], reduction="sum")) / math.log(2)
    row = report.rows[-1]
    assert (row.window_layout, row.row_layout) == ("v41", "v41_fp4")
    assert row.bits_per_byte == pytest.approx(total / (70 + 90 + 15), rel=1e-5)
    assert report.bytes == 70 + 90 + 15
    assert report.context == 90


def test_report_compares_with_the_first_pair(report: evaluation.Report):
    first, *others = report.rows
    assert (first.difference, first.agreement) == (0.0, 1.0)
    assert all(r.difference == r.bits_per_byte - first.bits_per_byte for r in others)
    assert all(0.5 < r.agreement < 1.0 for r in others)
    assert [r.bytes_per_token for r in report.rows] == [
        1.5 * (1024 + 68),
        pytest.approx(1.5 * (584 + 68), rel=2e-3),  # V4 pages are padded
        1.5 * (528 + 68),
        1.5 * (288 + 68),
    ]
    assert json.loads(json.dumps(report.to_dict()))["rows"][3]["row_layout"] == "v41_fp4"


def test_progress_reaches_the_total(model: PagedModel, windows: list[torch.Tensor]):
    seen: list[evaluation.Progress] = []
    pairs = [("bf16", "bf16"), ("v41", "v41_fp4")]
    evaluate(model, windows[2:], source="x", pairs=pairs, chunk=8, progress=seen.append)
    assert [(p.done, p.total) for p in seen] == [(8, 30), (15, 30), (23, 30), (30, 30)]
    assert seen[-1].pair == "v41 + v41_fp4"


def test_agreement_counts_only_real_choices():
    def picks(*rows: list[int]) -> Picks:
        return Picks({1: [torch.tensor(rows, dtype=torch.int32)]})

    # the first query sees two rows and the second three: nothing was left out
    reference = picks([0, 1, -1], [0, 1, 2], [1, 4, 7], [2, 3, 9])
    assert agreement(picks([0, 1, -1], [0, 1, 2], [1, 5, 7], [2, 3, 9]), reference) == 5 / 6
    assert agreement(picks([0, 1, -1]), picks([0, 1, -1])) is None


def test_plot_is_an_image(report: evaluation.Report, tmp_path: Path):
    plot(report, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_text_is_cut_into_windows(tmp_path: Path):
    (tmp_path / "t.txt").write_text("abcdefg")
    assert [w.tolist() for w in text_windows(tmp_path / "t.txt", 3, 9)] == [
        [START_TOKEN, *b"abc"],
        [START_TOKEN, *b"def"],
        [START_TOKEN, *b"g"],
    ]
    assert len(text_windows(tmp_path / "t.txt", 3, 2)) == 2
    with pytest.raises(ValueError, match="context: 0"):
        text_windows(tmp_path / "t.txt", 0, 2)


def test_held_out_windows_prefer_long_files(tmp_path: Path):
    from latentkv.model.corpus import is_held_out

    names = list(itertools.islice((n for n in (f"m{i}.py" for i in range(999)) if is_held_out(n)), 6))
    for i, name in enumerate(names):
        (tmp_path / name).write_bytes(b"x" * (50 if i % 2 else 10))
    (tmp_path / next(n for n in (f"m{i}.py" for i in range(99)) if not is_held_out(n))).write_bytes(b"y" * 90)
    windows = held_out_windows(40, 5, folder=tmp_path)
    assert [w.numel() for w in windows] == [41, 41, 41, 11, 11]
    assert not any((w == ord("y")).any() for w in windows)


def test_evaluation_without_pairs_or_windows_is_refused(model: PagedModel, windows: list[torch.Tensor]):
    with pytest.raises(ValueError, match="0 pairs"):
        evaluate(model, windows, source="x", pairs=[])
    with pytest.raises(ValueError, match="0 windows"):
        evaluate(model, [], source="x")
