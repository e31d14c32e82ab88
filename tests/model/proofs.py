"""What is shown of the model on a GPU, as functions of a device and of sizes: a CPU runs them small."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from latentkv.model import ModelCache, PagedModel, evaluate, held_out_windows, load_checkpoint
from latentkv.model.config import PAD_TOKEN
from latentkv.model.serving import Server, Stream, decode_all

PAIR = [("v41", "v41_fp4")]
CHUNK = 128


def prompts(count: int) -> list[list[int]]:
    """The beginnings of held-out files, 24 tokens and more, opened by the start token."""
    return [w[: 24 + 7 * i].tolist() for i, w in enumerate(held_out_windows(256, count))]


def greedy(model: PagedModel, given: Sequence[Sequence[int]], count: int, *, capture: bool | None = None) -> list[list]:
    """`count` tokens after each prompt, decoded side by side."""
    longest = max(len(p) for p in given) + count
    cache = ModelCache(
        model.config,
        max_requests=len(given),
        max_tokens=len(given) * (longest + 128),
        max_context=longest + 1,
        chunk=CHUNK,
        device=model.device,
    )
    return decode_all(Server(model, cache, ladder=(len(given),), capture=capture), given, count)


# --- the reference, on a CPU ------------------------------------------------------------------------------------------


def in_parallel(work: Callable[..., object], parts: Sequence[object], *, processes: int) -> list:
    """`work` on each part: in processes of their own, or here where that is one."""
    if processes == 1:
        return [work(part) for part in parts]
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(work, parts))


@dataclass(frozen=True)
class Verdict:
    """How a text looks to the reference, token by token.

    Attributes:
        shortfalls: logits by which a token is below the likeliest; 0 where it is the likeliest.
        gaps: logits between the likeliest and the second.
    """

    shortfalls: list[float]
    gaps: list[float]

    @property
    def first_other(self) -> int | None:
        """The first token that the reference would not have said; up to there its greedy text is the same."""
        return next((i for i, s in enumerate(self.shortfalls) if s > 0), None)


def judge(text: tuple[Sequence[int], int], checkpoint: Path | None = None) -> Verdict:
    """The reference's view of a text.

    Prefill and decode give the same bits on a CPU, so that the likeliest tokens along a text are what it would decode.

    Args:
        text: tokens, and how many of them are the prompt.
        checkpoint: the packaged one by default.
    """
    torch.set_num_threads(1)
    tokens, prompt = text
    model = PagedModel(*load_checkpoint(checkpoint))
    cache = ModelCache(model.config, max_tokens=len(tokens) + 128, chunk=CHUNK)
    request, logits = cache.open(), []
    for at in range(0, len(tokens) - 1, CHUNK):
        part = tokens[:-1][at : at + CHUNK]
        logits.append(model.step(cache, [(request, part)], all_logits=True))
    seen = torch.cat(logits)[prompt - 1 :, :PAD_TOKEN]
    said = torch.tensor(tokens[prompt:]).unsqueeze(1)
    best = seen.topk(2).values
    return Verdict((best[:, 0] - seen.gather(1, said)[:, 0]).tolist(), (best[:, 0] - best[:, 1]).tolist())


def bits_per_byte(model: PagedModel, windows: Sequence[Tensor]) -> float:
    """Of V41 windows and V41_FP4 rows."""
    return evaluate(model, windows, source="held out", pairs=PAIR, requests=len(windows)).rows[0].bits_per_byte


def reference_bits(window: Tensor, checkpoint: Path | None = None) -> float:
    """`bits_per_byte` of one window by the reference on a CPU."""
    torch.set_num_threads(1)
    return bits_per_byte(PagedModel(*load_checkpoint(checkpoint)), [window])


def judge_all(
    texts: Sequence[tuple[Sequence[int], int]], *, processes: int, checkpoint: Path | None = None
) -> list[Verdict]:
    """`judge` on every text."""
    return in_parallel(partial(judge, checkpoint=checkpoint), texts, processes=processes)


# --- serving ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Served:
    """What a run of a server left."""

    cache: ModelCache
    texts: list[list[int]]
    joined: int
    accepted: int
    drafted: int


def serve(
    model: PagedModel,
    source: Sequence[int],
    *,
    requests: int,
    rows: int,
    steps: int,
    capture: bool | None = None,
    every: int = 8,
    life: tuple[int, int] = (40, 160),
    seed: int = 0,
) -> Served:
    """Requests join and leave every few steps of a server that verifies `rows` - 1 drafts.

    What happens depends on the seed and on the decoded tokens alone.

    Args:
        model: the model.
        source: tokens that prompts are cut from.
        requests: most at a time; at least three quarters are there.
        rows: of a request in a step.
        steps: how many.
        capture: as in `DecodeStep`.
        every: steps between changes.
        life: new tokens after which a request leaves, drawn between the two.
        seed: of everything that is drawn.
    """
    context = 96 + life[1] + rows * (every + 1)
    cache = ModelCache(
        model.config,
        max_requests=requests,
        max_tokens=requests * (context + 128),
        max_context=context,
        chunk=CHUNK,
        draft_rows=rows,
        device=model.device,
        seed=seed,
    )
    server = Server(
        model, cache, drafter=lambda tokens, count: [tokens[-1]] * count, ladder=(requests,), capture=capture
    )
    rng, ends, every_one = random.Random(seed), {}, []
    for step in range(steps):
        if step % every == 0:
            for stream in list(server.streams.values()):
                if len(stream.new) >= ends[id(stream)]:
                    server.leave(stream)
            joining = rng.randint(-(-3 * requests // 4), requests) - len(server.streams)
            if joining > 0:
                starts = [rng.randrange(len(source) - 96) for _ in range(joining)]
                new: list[Stream] = server.join(*([*source[s : s + rng.randint(1, 96)]] for s in starts))
                every_one += new
                ends.update({id(s): rng.randint(*life) for s in new})
        server.step()
    return Served(
        cache,
        [s.tokens for s in every_one],
        len(every_one),
        sum(s.accepted for s in every_one),
        sum(s.drafted for s in every_one),
    )


def pool_bytes(cache: ModelCache) -> int:
    """Bytes of all pools."""
    return sum(p.numel() * p.element_size() for p in cache.pools)
