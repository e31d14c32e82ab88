"""Messages in one line."""

from __future__ import annotations

LIMIT = 300  # characters


def one_line(text: object) -> str:
    """A text without line breaks, cut at `LIMIT` characters."""
    line = " ".join(str(text).split())
    return line if len(line) <= LIMIT else line[: LIMIT - 3] + "..."


def error_line(error: BaseException) -> str:
    """An exception's type and message in one line."""
    return one_line(f"{type(error).__name__}: {error}") if str(error) else type(error).__name__
