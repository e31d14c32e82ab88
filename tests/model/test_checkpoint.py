"""Checkpoints and the text they are trained on."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from latentkv.model import corpus
from latentkv.model.checkpoint import FORMAT, load_checkpoint, packaged_checkpoint, save_checkpoint
from latentkv.model.config import START_TOKEN, ModelConfig
from latentkv.model.weights import Weights, init_weights, weight_shapes


def test_checkpoint_returns_the_stored_bits(config: ModelConfig, weights: Weights, tmp_path: Path):
    save_checkpoint(tmp_path / "a.safetensors", config, weights)
    loaded_config, loaded = load_checkpoint(tmp_path / "a.safetensors")
    assert loaded_config == config
    assert all(loaded[n].dtype == weights[n].dtype and torch.equal(loaded[n], weights[n]) for n in weights)


def test_packaged_checkpoint_is_at_most_12_mb_and_loads():
    assert packaged_checkpoint().stat().st_size <= 12_000_000
    config, weights = load_checkpoint()
    assert config == ModelConfig()
    assert all(bool(torch.isfinite(w).all()) for w in weights.values())


def test_packaged_record_states_licence_seed_and_quality():
    record = json.loads((packaged_checkpoint().parent / "training.json").read_text())
    assert record["corpus"]["licence"] == "PSF-2.0"
    assert isinstance(record["seed"], int)
    assert record["held_out_bits_per_byte"]["bf16+bf16"] <= 2.0


def test_missing_file_is_one_clear_error(tmp_path: Path):
    with pytest.raises(ValueError, match="is not a file"):
        load_checkpoint(tmp_path / "none.safetensors")


def test_file_that_is_not_safetensors_is_refused(tmp_path: Path):
    (tmp_path / "x.safetensors").write_bytes(b"plain text, no tensors")
    with pytest.raises(ValueError, match="is not a safetensors file"):
        load_checkpoint(tmp_path / "x.safetensors")


def test_foreign_safetensors_is_refused(tmp_path: Path):
    save_file({"weight": torch.zeros(2)}, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match=f"is no {FORMAT} file"):
        load_checkpoint(tmp_path / "x.safetensors")


def test_broken_config_is_refused(tmp_path: Path):
    save_file({"weight": torch.zeros(2)}, tmp_path / "x.safetensors", metadata={"format": FORMAT, "config": "{"})
    with pytest.raises(ValueError, match="unreadable config"):
        load_checkpoint(tmp_path / "x.safetensors")


def test_missing_weight_and_wrong_shape_are_named(config: ModelConfig, weights: Weights, tmp_path: Path):
    path = tmp_path / "a.safetensors"
    save_checkpoint(path, config, weights)
    metadata = {"format": FORMAT, "config": json.dumps(config.to_dict())}
    tensors = load_file(path)
    save_file({n: t for n, t in tensors.items() if n != "layers.3.index.wk"}, path, metadata=metadata)
    with pytest.raises(ValueError, match=r"first layers\.3\.index\.wk"):
        load_checkpoint(path)
    save_file({**tensors, "norm": torch.ones(3, dtype=torch.bfloat16)}, path, metadata=metadata)
    with pytest.raises(ValueError, match=r"norm is torch.bfloat16 \[3\]"):
        load_checkpoint(path)


def test_initial_weights_follow_the_seed():
    config = ModelConfig()
    one, same, other = (init_weights(config, seed=s) for s in (1, 1, 2))
    assert set(one) == set(weight_shapes(config))
    assert torch.equal(one["embed"], same["embed"])
    assert not torch.equal(one["embed"], other["embed"])


# --- corpus -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def library(tmp_path: Path) -> Path:
    names = [f"m{i}.py" for i in range(40)] + ["pkg/a.py", "site-packages/b.py", "pkg/__pycache__/c.py", "notes.txt"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(f"# {name}\n".encode())
    return tmp_path


def test_split_is_by_the_hash_of_the_path(library: Path):
    held_out = {d.path for d in corpus.read_corpus(library, held_out=True)}
    training = {d.path for d in corpus.read_corpus(library, held_out=False)}
    expected = {p for p in held_out | training if int.from_bytes(hashlib.sha256(p.encode()).digest(), "big") % 10 == 0}
    assert held_out == expected
    assert held_out
    assert not held_out & training
    assert held_out | training == {f"m{i}.py" for i in range(40)} | {"pkg/a.py"}


def test_digest_depends_on_paths_and_bytes(library: Path):
    before = corpus.corpus_digest(corpus.read_corpus(library))
    assert before == corpus.corpus_digest(corpus.read_corpus(library))
    (library / "m0.py").write_bytes(b"x")
    assert before != corpus.corpus_digest(corpus.read_corpus(library))


def test_stream_opens_every_document_with_the_start_token():
    documents = [corpus.Document("a", b"\x00\xff"), corpus.Document("b", b"z")]
    assert corpus.token_stream(documents).tolist() == [START_TOKEN, 0, 255, START_TOKEN, 122]


def test_folder_without_sources_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"no \*\.py files"):
        corpus.read_corpus(tmp_path)


@pytest.mark.parametrize(
    ("data", "message"),
    [(b"", "is empty"), (b"a\xff\xfeb", r"not UTF-8 text \(byte 1"), (b"a\0b", "NUL bytes"), (None, "cannot be read")],
)
def test_file_that_is_not_text_is_one_clear_error(tmp_path: Path, data: bytes | None, message: str):
    path = tmp_path / "t.txt"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(ValueError, match=message):
        corpus.read_text(path)
