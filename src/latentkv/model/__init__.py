"""A small but complete V4.1 language model that runs on the library's public ops.

`PagedModel` runs on pages, `dense.forward` trains the same weights and is its oracle, `ModelCache` holds the pools,
`generate` and `evaluate` are what the command line shows.
"""

from latentkv.model.cache import ModelCache
from latentkv.model.checkpoint import load_checkpoint, save_checkpoint
from latentkv.model.config import ModelConfig
from latentkv.model.evaluation import Report, evaluate, held_out_windows, text_windows
from latentkv.model.generation import Sampling, generate
from latentkv.model.paged import PagedModel, Picks, prefill

__all__ = [
    "ModelCache",
    "ModelConfig",
    "PagedModel",
    "Picks",
    "Report",
    "Sampling",
    "evaluate",
    "generate",
    "held_out_windows",
    "load_checkpoint",
    "prefill",
    "save_checkpoint",
    "text_windows",
]
