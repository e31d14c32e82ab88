"""Text generation: a prompt is prefilled in chunks, then bytes are decoded and streamed one by one."""

from __future__ import annotations

import codecs
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from latentkv.layout import KVLayout
from latentkv.model.cache import ModelCache
from latentkv.model.captured import DecodeStep
from latentkv.model.config import PAD_TOKEN, START_TOKEN
from latentkv.model.corpus import encode
from latentkv.model.paged import PagedModel, prefill

WINDOW_LAYOUT = "v41"
ROW_LAYOUT = "v41_fp4"


@dataclass(frozen=True)
class Sampling:
    """How the next byte is drawn.

    Attributes:
        temperature: divides the logits; 0 takes the likeliest byte.
        top_p: keeps the likeliest bytes up to this share.
        seed: of the draws.
    """

    temperature: float = 0.7
    top_p: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature: {self.temperature} is negative")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: {self.top_p} is not in (0, 1]")


@dataclass(frozen=True)
class Summary:
    """What a generation took.

    Attributes:
        text: the generated text.
        prompt_tokens: prefilled tokens, the start token included.
        new_tokens: decoded tokens.
        prefill_seconds: wall time of the prompt.
        decode_seconds: wall time of the new tokens.
        kv_bytes_per_token: compressed rows and index keys, measured from the pools.
        window_bytes: window rows of the request, whatever its length.
        window_layout: layout of window rows.
        row_layout: layout of compressed rows.
        stopped: "end" when the model closed the document, "length" when the limit was reached.
    """

    text: str
    prompt_tokens: int
    new_tokens: int
    prefill_seconds: float
    decode_seconds: float
    kv_bytes_per_token: float
    window_bytes: int
    window_layout: str
    row_layout: str
    stopped: str

    @property
    def tokens_per_second(self) -> float:
        """Decoded tokens a second."""
        return self.new_tokens / self.decode_seconds if self.decode_seconds > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "tokens_per_second": self.tokens_per_second}


@dataclass(frozen=True)
class Event:
    """One step of a generation.

    Attributes:
        phase: "prefill", "decode" or "done".
        done: tokens processed in the phase.
        total: tokens that the phase may take.
        text: text that became printable with this token; a byte inside a character gives none yet.
        summary: in the last event.
    """

    phase: str
    done: int
    total: int
    text: str = ""
    summary: Summary | None = None


def generate(
    model: PagedModel,
    prompt: str | bytes,
    *,
    max_tokens: int = 256,
    sampling: Sampling | None = None,
    window_layout: KVLayout | str = WINDOW_LAYOUT,
    row_layout: KVLayout | str = ROW_LAYOUT,
    chunk: int = 256,
) -> Iterator[Event]:
    """Continue a prompt.

    Args:
        model: the model.
        prompt: text; it follows the token that opens a document.
        max_tokens: most bytes to decode.
        sampling: how bytes are drawn.
        window_layout: layout of window rows.
        row_layout: layout of compressed rows.
        chunk: prompt tokens a step.

    Yields:
        An event a prompt chunk, an event a byte, and a last one with the summary.

    Raises:
        ValueError: a limit below 1, a prompt that leaves no room, or layouts that cannot be read together.
    """
    sampling = sampling or Sampling()
    tokens = encode(prompt.encode() if isinstance(prompt, str) else prompt)
    limit = model.config.max_positions
    if max_tokens < 1:
        raise ValueError(f"max_tokens: {max_tokens} is below 1")
    if tokens.numel() + max_tokens > limit:
        raise ValueError(
            f"prompt: {tokens.numel()} tokens and {max_tokens} new ones pass the model's {limit} positions"
        )
    cache = ModelCache(
        model.config,
        window_layout=window_layout,
        row_layout=row_layout,
        max_tokens=tokens.numel() + max_tokens,
        chunk=min(chunk, tokens.numel()),
        device=model.device,
    )
    return _events(model, cache, tokens, max_tokens, sampling)


def _events(
    model: PagedModel, cache: ModelCache, tokens: Tensor, max_tokens: int, sampling: Sampling
) -> Iterator[Event]:
    request = cache.open()
    step = DecodeStep(model, cache, ladder=(1,))
    started = time.perf_counter()
    for done, logits in prefill(model, cache, request, tokens):  # noqa: B007, the last logits are used
        yield Event("prefill", done, tokens.numel())
    prefilled = time.perf_counter()
    generator = torch.Generator().manual_seed(sampling.seed)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text, count, stopped = [], 0, "length"
    while count < max_tokens:
        token = draw(logits, sampling, generator)
        if token == START_TOKEN:
            stopped = "end"
            break
        count += 1
        text.append(decoder.decode(bytes([token])))
        yield Event("decode", count, max_tokens, text[-1])
        if count < max_tokens:
            logits = step([(request, [token])]).logits[0, 0]
    text.append(decoder.decode(b"", final=True))
    summary = Summary(
        text="".join(text),
        prompt_tokens=tokens.numel(),
        new_tokens=count,
        prefill_seconds=prefilled - started,
        decode_seconds=time.perf_counter() - prefilled,
        kv_bytes_per_token=cache.bytes_per_token(),
        window_bytes=cache.window_bytes_per_request(),
        window_layout=str(cache.window_layout),
        row_layout=str(cache.row_layout),
        stopped=stopped,
    )
    cache.release(request)
    yield Event("done", count, max_tokens, text[-1], summary)


def draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Draw a token, a byte or the start token, from logits `[vocab]`."""
    logits = logits[:PAD_TOKEN].float().cpu()
    if sampling.temperature == 0:
        return int(logits.argmax())
    share, order = (logits / sampling.temperature).softmax(-1).sort(descending=True)
    share[share.cumsum(-1) - share >= sampling.top_p] = 0.0
    return int(order[torch.multinomial(share, 1, generator=generator)])
