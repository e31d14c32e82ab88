"""Where the benchmark modules are: `benchmarks/` of the clone, or the copy that a wheel carries inside the package."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

PACKAGE = Path(__file__).resolve().parents[1]
FOLDERS = (PACKAGE / "benchmarks", PACKAGE.parents[1] / "benchmarks")  # installed, clone


def find_stages(folders: tuple[Path, ...] = FOLDERS) -> dict[str, Path]:
    """Stages that have a benchmark module, from the first of `folders` that has any.

    Raises:
        ValueError: there is no such folder.
    """
    for folder in folders:
        if found := {file.stem: file for file in sorted(folder.glob("*.py")) if not file.stem.startswith("_")}:
            return found
    raise ValueError(f"bench: no benchmark modules in {' or '.join(map(str, folders))}")


def load_stage(stage: str, folders: tuple[Path, ...] = FOLDERS) -> ModuleType:
    """The benchmark module of a stage.

    Raises:
        ValueError: the stage has none, or it is no module.
    """
    found = find_stages(folders)
    if stage not in found:
        raise ValueError(f"stage: {stage!r} is none of {', '.join(found)}")
    spec = importlib.util.spec_from_file_location(f"latentkv_benchmarks_{stage}", found[stage])
    if spec is None or spec.loader is None:
        raise ValueError(f"stage: {found[stage]} is not a Python module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
