"""The training text: the source files of a Python standard library, split by the hash of their paths.

The files are those of CPython, under the PSF licence (https://docs.python.org/3/license.html). The list is every `*.py`
below the library's folder except what lies in a folder named in `EXCLUDED_FOLDERS`. A file is held out from training
when the SHA-256 of its POSIX path, relative to that folder, is 0 modulo 10; the rule needs no list, so every machine's
own standard library has the same held-out files.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from latentkv.model.config import START_TOKEN

EXCLUDED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__"})
HELD_OUT_MODULUS = 10


@dataclass(frozen=True)
class Document:
    """One source file: its path relative to the corpus folder, and its bytes."""

    path: str
    text: bytes

    @property
    def held_out(self) -> bool:
        """Whether the file is kept from training."""
        return is_held_out(self.path)


def is_held_out(path: str) -> bool:
    """Whether a file of this relative POSIX path is kept from training."""
    return int(hashlib.sha256(path.encode()).hexdigest(), 16) % HELD_OUT_MODULUS == 0


def stdlib_folder() -> Path:
    """The standard library of the running Python."""
    return Path(sysconfig.get_paths()["stdlib"])


def read_corpus(folder: Path | None = None, *, held_out: bool | None = None) -> list[Document]:
    """The documents of a folder, in the order of their paths.

    Args:
        folder: where the library lies; the running Python's own by default.
        held_out: only held-out files (True), only training files (False), or all (None).

    Raises:
        ValueError: the folder has no such files.
    """
    root = folder or stdlib_folder()
    documents = []
    for file in sorted(root.rglob("*.py"), key=lambda f: f.relative_to(root).as_posix()):
        path = file.relative_to(root).as_posix()
        if EXCLUDED_FOLDERS.isdisjoint(path.split("/")) and held_out in (None, is_held_out(path)):
            documents.append(Document(path, file.read_bytes()))
    if not documents:
        raise ValueError(f"corpus: {root} has no *.py files to read")
    return documents


def encode(text: bytes) -> Tensor:
    """Tokens of one document, int64: the start token, then its bytes."""
    body = torch.from_numpy(np.frombuffer(text, dtype=np.uint8).astype(np.int64))
    return torch.cat((torch.tensor([START_TOKEN]), body))


def token_stream(documents: list[Document]) -> Tensor:
    """Tokens of all documents in a row, int16, each opened by the start token."""
    return torch.cat([encode(d.text).to(torch.int16) for d in documents])


def corpus_digest(documents: list[Document]) -> str:
    """SHA-256 over the paths and bytes of the documents."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(f"{document.path}\0{len(document.text)}\0".encode())
        digest.update(document.text)
    return digest.hexdigest()


def read_text(path: Path) -> bytes:
    """The bytes of a text file.

    Raises:
        ValueError: the file is missing, empty, or not UTF-8 text.
    """
    try:
        data = path.read_bytes()
        data.decode("utf-8")
    except OSError as error:
        raise ValueError(f"text: {path} cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"text: {path} is not UTF-8 text (byte {error.start} does not decode)") from error
    if not data or b"\0" in data:
        raise ValueError(f"text: {path} is {'empty' if not data else 'binary: it has NUL bytes'}")
    return data
