"""The benchmark harness: timing, roofs measured in the same run, records, tables and plots.

What is measured stands in `benchmarks/`, one module a stage; `latentkv bench STAGE` runs it.
"""

from latentkv.bench.records import Case, Peer, Row, Timing, load_record, record_of, run
from latentkv.bench.stages import find_stages, load_stage

__all__ = [
    "Case",
    "Peer",
    "Row",
    "Timing",
    "find_stages",
    "load_record",
    "load_stage",
    "record_of",
    "run",
]
