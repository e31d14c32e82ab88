"""What the GPU tests of several stages do with a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def captured(call: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """A graph of the call, and what its replays write."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()  # compile before the capture
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    return graph, results


def called_behind_a_pause(change: Callable[[], None], call: Callable[[], T]) -> T:
    """Results of the call on a stream that changes the inputs late: what ran on another would see the old ones."""
    call()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        change()
        results = call()
    side.synchronize()
    return results
