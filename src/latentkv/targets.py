"""Offline compilation of every kernel for every target, and what the compilers say of it: no GPU is needed.

A kernel module lists its variants as `TARGET_CASES` (`latentkv.kernels.launch.TargetCase`). A build fails when it does
not compile, spills registers or uses scratch memory (beyond what its case allows: attend's Hopper kernel has such an
allowance), or wants more shared memory than the target has.
"""

from __future__ import annotations

import importlib
import multiprocessing
import pkgutil
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latentkv._text import error_line, one_line
from latentkv.doctor import interpreter_is_on

if TYPE_CHECKING:
    from latentkv.kernels.launch import TargetCase


@dataclass(frozen=True)
class Target:
    """A GPU architecture.

    Attributes:
        name: as shown and as given on the command line.
        backend: Triton's, "cuda" or "hip".
        arch: Triton's name of the architecture.
        warp_size: lanes.
        shared_limit: bytes of shared memory that one program may use.
    """

    name: str
    backend: str
    arch: int | str
    warp_size: int
    shared_limit: int


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target("gfx950", "hip", "gfx950", 64, 160 * 1024),
        Target("gfx942", "hip", "gfx942", 64, 64 * 1024),
        Target("gfx1201", "hip", "gfx1201", 32, 64 * 1024),
        Target("sm80", "cuda", 80, 32, 163 * 1024),
        Target("sm90", "cuda", 90, 32, 227 * 1024),
        Target("sm100", "cuda", 100, 32, 227 * 1024),
        Target("sm120", "cuda", 120, 32, 99 * 1024),
    )
}


@dataclass(frozen=True)
class CaseAddress:
    """Where a case stands: an entry of a module's `TARGET_CASES`. Kernels do not pickle, addresses do."""

    module: str
    index: int

    @property
    def stage(self) -> str:
        """The module's last name."""
        return self.module.rsplit(".", 1)[-1]

    def load(self) -> TargetCase:
        """The case itself."""
        return importlib.import_module(self.module).TARGET_CASES[self.index]


@dataclass(frozen=True)
class Usage:
    """What a compiled kernel takes.

    Attributes:
        registers: vector registers a lane.
        scalar_registers: per wave; 0 on NVIDIA, where they are not counted.
        spills: vector registers kept in memory (AMD), 4-byte words stored by spills (NVIDIA).
        scalar_spills: scalar registers kept in vector lanes.
        scratch_bytes: private memory of a lane.
        shared_bytes: shared memory of a program.
    """

    registers: int
    scalar_registers: int
    spills: int
    scalar_spills: int
    scratch_bytes: int
    shared_bytes: int


@dataclass(frozen=True)
class Build:
    """One kernel variant compiled for one target.

    Attributes:
        stage: the kernel's module.
        kernel: the kernel's name.
        label: the variant.
        target: the target's name.
        seconds: spent compiling; little if Triton's disk cache had it.
        usage: None if it did not compile.
        error: the compiler's complaint, in one line.
        spills_allowed: as in `TargetCase`; so many may also take scratch.
    """

    stage: str
    kernel: str
    label: str
    target: str
    seconds: float
    usage: Usage | None
    error: str | None = None
    spills_allowed: int = 0

    @property
    def problems(self) -> tuple[str, ...]:
        """Why this build fails, in words; empty if it passes."""
        if self.usage is None:
            return (self.error or "not compiled",)
        limit = TARGETS[self.target].shared_limit
        spilling = self.usage.spills > self.spills_allowed
        found = (
            (spilling, f"spills {self.usage.spills}"),
            (self.usage.scratch_bytes and (spilling or not self.usage.spills), f"scratch {self.usage.scratch_bytes} B"),
            (self.usage.shared_bytes > limit, f"shared {self.usage.shared_bytes} B of {limit}"),
        )
        return tuple(text for is_bad, text in found if is_bad)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "problems": list(self.problems)}


def find_cases(stages: Sequence[str] = (), modules: Sequence[str] = ()) -> list[CaseAddress]:
    """The cases of the library's kernel modules.

    Args:
        stages: only these; all if neither stages nor modules are named.
        modules: other modules with `TARGET_CASES`, by import name.

    Raises:
        ValueError: an unknown stage, a module that cannot be imported or has no cases, or the interpreter is on.
    """
    if interpreter_is_on():
        raise ValueError("targets: TRITON_INTERPRET is set, and interpreted kernels do not compile; unset it")
    import latentkv.kernels

    found: list[CaseAddress] = []
    known: list[str] = []
    for info in pkgutil.iter_modules(latentkv.kernels.__path__):
        name = f"latentkv.kernels.{info.name}"
        cases = getattr(importlib.import_module(name), "TARGET_CASES", None)
        if cases is not None:
            known.append(info.name)
            if info.name in stages or not (stages or modules):
                found += [CaseAddress(name, i) for i in range(len(cases))]
    if unknown := sorted(set(stages) - set(known)):
        raise ValueError(f"stage: {unknown[0]!r} is none of {', '.join(known)}")
    for name in modules:
        try:
            cases = importlib.import_module(name).TARGET_CASES
        except (ImportError, AttributeError) as error:
            raise ValueError(f"module: {name} has no cases to compile ({error})") from error
        found += [CaseAddress(name, i) for i in range(len(cases))]
    if not found:
        raise ValueError("targets: no kernel module has TARGET_CASES")
    return found


def find_targets(names: Sequence[str] = ()) -> list[Target]:
    """Targets by name; all if none is named.

    Raises:
        ValueError: no such target.
    """
    for name in names:
        if name not in TARGETS:
            raise ValueError(f"target: {name!r} is none of {', '.join(TARGETS)}")
    return [TARGETS[name] for name in names or TARGETS]


def build_all(
    cases: Sequence[CaseAddress],
    targets: Sequence[Target],
    *,
    asm_folder: Path | None = None,
    jobs: int = 1,
    progress: Callable[[Build], None] | None = None,
) -> list[Build]:
    """Compile cases for targets.

    Args:
        cases: from `find_cases`.
        targets: from `find_targets`; a case may name fewer.
        asm_folder: where assembly goes, one file a build; not written if None.
        jobs: processes.
        progress: called after each build.

    Returns:
        The builds, by case and then by target.
    """
    work = [(a, t, asm_folder) for a in cases for t in targets if not a.load().targets or t.name in a.load().targets]
    builds = []
    for build in _run(work, jobs):
        builds.append(build)
        if progress is not None:
            progress(build)
    return builds


def _run(work: list[tuple[CaseAddress, Target, Path | None]], jobs: int) -> Iterator[Build]:
    if jobs <= 1:
        yield from (_build(item) for item in work)
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(_build, work)


def _build(item: tuple[CaseAddress, Target, Path | None]) -> Build:
    address, target, asm_folder = item
    case = address.load()
    kernel = case.kernel.__name__
    started = time.perf_counter()
    usage, error = None, None
    try:
        usage, assembly = compile_case(case, target)
        if asm_folder is not None:
            _write_assembly(asm_folder, f"{address.stage}-{kernel}-{case.label}-{target.name}", assembly)
    except Exception as failure:  # whatever the compiler raises is the build's result
        error = error_line(failure)
    return Build(
        address.stage, kernel, case.label, target.name, time.perf_counter() - started, usage, error, case.spills_allowed
    )


def compile_case(case: TargetCase, target: Target) -> tuple[Usage, dict[str, str | bytes]]:
    """Compile one case.

    Args:
        case: the variant.
        target: for what.

    Returns:
        What it takes, and its assembly by Triton's name of the stage ("amdgcn", or "ptx" and "cubin").

    Raises:
        ValueError: the case's arguments are not the kernel's.
        Exception: whatever the compiler raises.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    names = case.kernel.arg_names
    if differing := sorted(set(names) ^ (set(case.signature) | set(case.constexprs))):
        raise ValueError(f"case {case.label}: {', '.join(differing)} missing, or not the kernel's")
    signature = {name: "constexpr" if name in case.constexprs else case.signature[name] for name in names}
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in case.aligned}
    source_of = GluonASTSource if case.kernel.is_gluon() else ASTSource
    constants = {(names.index(name),): value for name, value in case.constexprs.items()}
    source = source_of(case.kernel, signature, constexprs=constants, attrs=attrs)
    compiled = triton.compile(
        source,
        target=GPUTarget(target.backend, target.arch, target.warp_size),
        options={"num_warps": case.num_warps, **case.options},
    )
    shared = int(compiled.metadata.shared)
    if target.backend == "hip":
        assembly = {"amdgcn": compiled.asm["amdgcn"]}
        return amd_usage(compiled.asm["amdgcn"], shared), assembly
    assembly = {"ptx": compiled.asm["ptx"], "cubin": compiled.asm["cubin"]}
    usage = nvidia_usage(_cuobjdump("--dump-resource-usage", compiled.asm["cubin"]), shared)
    if usage.scratch_bytes:  # rare, so only then is the assembler asked how much of it is spills
        usage = nvidia_usage_with_spills(usage, _ptxas_log(compiled.asm["ptx"], target))
    return usage, assembly


# --- what the compilers say -------------------------------------------------------------------------------------------


def amd_usage(amdgcn: str, shared_bytes: int) -> Usage:
    """Usage from the metadata at the end of AMD assembly."""

    def value(key: str) -> int:
        match = re.search(rf"^\s*-?\s*\.{key}:\s*(\d+)", amdgcn, re.MULTILINE)
        if match is None:
            raise ValueError(f"the assembly's metadata has no .{key}")
        return int(match.group(1))

    return Usage(
        registers=value("vgpr_count"),
        scalar_registers=value("sgpr_count"),
        spills=value("vgpr_spill_count"),
        scalar_spills=value("sgpr_spill_count"),
        scratch_bytes=value("private_segment_fixed_size"),
        shared_bytes=max(shared_bytes, value("group_segment_fixed_size")),
    )


def nvidia_usage(resources: str, shared_bytes: int) -> Usage:
    """Usage from `cuobjdump --dump-resource-usage`; local memory counts as scratch."""
    match = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", resources)
    if match is None:
        raise ValueError(f"cuobjdump told no resource usage: {one_line(resources)}")
    registers, stack, local = map(int, match.groups())
    return Usage(registers, 0, 0, 0, stack + local, shared_bytes)


def nvidia_usage_with_spills(usage: Usage, ptxas_log: str) -> Usage:
    """Usage with the spill stores that `ptxas -v` counts, in 4-byte words."""
    match = re.search(r"(\d+) bytes spill stores", ptxas_log)
    return Usage(**{**asdict(usage), "spills": int(match.group(1)) // 4 if match else 0})


def _cuobjdump(option: str, cubin: bytes) -> str:
    import triton

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        return _tool_output([triton.knobs.nvidia.cuobjdump.path, option, str(file)])


def _ptxas_log(ptx: str, target: Target) -> str:
    from triton.backends.nvidia.compiler import get_ptxas

    match = re.search(r"^\.target\s+(sm_\w+)", ptx, re.MULTILINE)
    if match is None:
        raise ValueError("the PTX names no target")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(ptx)
        command = [get_ptxas(target.arch).path, "-v", f"--gpu-name={match.group(1)}", str(file)]
        return _tool_output([*command, "-o", f"{folder}/kernel.o"])


def _tool_output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise ValueError(f"{Path(command[0]).name}: {one_line(done.stderr or done.stdout)}")
    return done.stdout + done.stderr


def _write_assembly(folder: Path, name: str, assembly: dict[str, str | bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    stem = re.sub(r"[^A-Za-z0-9_.-]+", "_", name)
    for kind, text in assembly.items():
        if isinstance(text, bytes):
            kind, text = "sass", _cuobjdump("-sass", text)
        (folder / f"{stem}.{kind}").write_text(text)
