"""Greedy serving: requests join and leave between steps, and drafts are verified several tokens at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from latentkv.model.cache import ModelCache, pages_of
from latentkv.model.captured import LADDER, DecodeStep
from latentkv.model.config import PAD_TOKEN
from latentkv.model.paged import PagedModel

STEP_TOKENS = 4096  # of a prefill step, which bounds the memory of its index logits

# Proposes what may follow a text, at most so many tokens.
Drafter = Callable[[Sequence[int], int], Sequence[int]]


@dataclass
class Stream:
    """One request of a server.

    Attributes:
        request: its id in the cache.
        tokens: the prompt and everything decoded so far; the last one is not in the cache yet.
        prompt: how many of them are the prompt.
        drafted: tokens proposed by the drafter.
        accepted: those of them that were what the model would have said.
    """

    request: int
    tokens: list[int] = field(default_factory=list)
    prompt: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def new(self) -> list[int]:
        """The decoded tokens."""
        return self.tokens[self.prompt :]


class Server:
    """Decodes the likeliest continuation of any number of requests side by side.

    Args:
        model: the model.
        cache: its caches; `draft_rows` - 1 drafts a request are verified at once.
        drafter: proposes drafts; none by default. What is decoded does not depend on it.
        ladder: batch sizes, as in `DecodeStep`.
        capture: whether steps are captured, as in `DecodeStep`.
    """

    def __init__(
        self,
        model: PagedModel,
        cache: ModelCache,
        *,
        drafter: Drafter | None = None,
        ladder: Sequence[int] = LADDER,
        capture: bool | None = None,
    ) -> None:
        self.model, self.cache, self.drafter = model, cache, drafter
        rows = cache.draft_rows if drafter else 1
        self.decode = DecodeStep(model, cache, rows=rows, ladder=ladder, capture=capture)
        self.streams: dict[int, Stream] = {}

    def join(self, *prompts: Sequence[int]) -> list[Stream]:
        """Prefill prompts side by side, in chunks, and decode the first token of each.

        Args:
            prompts: tokens, at least one each.

        Raises:
            ValueError: an empty prompt, a token outside the vocabulary, one prompt longer than the cache's longest
                context, or too few pages, requests or places in a step. Nothing has been reserved or written then.
        """
        self._check(prompts)
        joined = [Stream(self.cache.open(), list(p), len(p)) for p in prompts]
        side_by_side = max(1, STEP_TOKENS // self.cache.chunk)
        for first in range(0, len(joined), side_by_side):
            self._prefill(joined[first : first + side_by_side])
        self.streams.update({s.request: s for s in joined})
        return joined

    def _prefill(self, streams: Sequence[Stream]) -> None:
        chunk = self.cache.chunk
        for at in range(0, max(s.prompt for s in streams), chunk):
            parts = [(s, s.tokens[at : at + chunk]) for s in streams if at < s.prompt]
            logits = self.model.step(self.cache, [(s.request, part) for s, part in parts])
            picks = logits[:, :PAD_TOKEN].argmax(-1).tolist()
            for (stream, _), pick in zip(parts, picks, strict=True):
                if at + chunk >= stream.prompt:
                    stream.tokens.append(pick)

    def leave(self, stream: Stream) -> list[int]:
        """End a request, free its pages and return what it decoded.

        Raises:
            ValueError: it has left already.
        """
        if self.streams.get(stream.request) is not stream:
            raise ValueError(f"leave: request {stream.request} is not one of the {len(self.streams)} being served")
        del self.streams[stream.request]
        self.cache.release(stream.request)
        return stream.new

    def step(self) -> dict[int, list[int]]:
        """Advance every request by one token, and by the drafts that proved right.

        Returns:
            New tokens by request.

        Raises:
            ValueError: too few pages, or a request at the cache's longest context; nothing has changed then, and the
                step succeeds once requests have left.
        """
        if not self.streams:
            return {}
        streams = list(self.streams.values())
        entries = [(s.request, [s.tokens[-1], *self._drafts(s)]) for s in streams]
        outcome = self.decode(entries)
        new = {}
        for stream, (request, given), picks in zip(streams, entries, outcome.likeliest, strict=True):
            right = 0
            while right < len(given) - 1 and given[right + 1] == picks[right]:
                right += 1
            self.cache.keep(request, 1 + right)
            new[request] = picks[: 1 + right]
            stream.tokens += new[request]
            stream.drafted += len(given) - 1
            stream.accepted += right
        return new

    def _drafts(self, stream: Stream) -> list[int]:
        room = self.cache.max_context - self.cache.length(stream.request) - 1
        most = min(self.decode.rows - 1, room)
        if self.drafter is None or most < 1:
            return []
        return [t for t in self.drafter(stream.tokens, most) if 0 <= t < self.model.config.vocab][:most]

    def _check(self, prompts: Sequence[Sequence[int]]) -> None:
        most, vocab = self.decode.ladder[-1], self.model.config.vocab
        if not prompts or len(self.streams) + len(prompts) > most:
            raise ValueError(f"join: {len(prompts)} prompts beside {len(self.streams)} requests, {most} fit a step")
        for prompt in prompts:
            if not 1 <= len(prompt) <= self.cache.max_context:
                raise ValueError(f"join: a prompt of {len(prompt)} tokens, 1 to {self.cache.max_context} fit the cache")
            if not 0 <= min(prompt) <= max(prompt) < vocab:
                raise ValueError(f"join: a token outside 0..{vocab - 1}")
        needed = sum(pages_of(len(prompt)) for prompt in prompts)
        if needed > self.cache.free_pages:
            raise ValueError(
                f"pages: {needed} needed, {self.cache.free_pages} free; let requests leave or enlarge the cache"
            )


def repeated(tokens: Sequence[int], count: int, *, match: int = 2, look_back: int = 512) -> list[int]:
    """A drafter that needs no model: what followed the last `match` tokens when they stood in the text before."""
    tokens = tokens[-look_back:]
    tail = list(tokens[-match:])
    for at in range(len(tokens) - match - 1, -1, -1):
        if list(tokens[at : at + match]) == tail:
            return list(tokens[at + match : at + match + count])
    return []


def decode_all(server: Server, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Decode `count` tokens after each prompt, all of them side by side.

    Raises:
        ValueError: as `Server.join` and `Server.step`.
    """
    streams = server.join(*prompts)
    left: list[list[int]] = [[] for _ in streams]
    while server.streams:
        for i, stream in enumerate(streams):
            if server.streams.get(stream.request) is stream and len(stream.new) >= count:
                left[i] = server.leave(stream)[:count]
        server.step()
    return left


__all__ = ["Drafter", "Server", "Stream", "decode_all", "repeated"]
