"""The `latentkv` command. Everything heavy is imported inside the command that needs it."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from latentkv._text import one_line

if TYPE_CHECKING:
    from latentkv.layout import KVLayout
    from latentkv.model.paged import PagedModel
    from latentkv.targets import Build

BAD_INPUT = 2
FAILED = 1
INTERRUPTED = 130
PLAIN_WIDTH = 180  # columns of a table that goes to a file or a pipe

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Portable kernels for DeepSeek-V4.1's latent key-value cache.",
)
state = {"traceback": False}

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
Checkpoint = Annotated[Path | None, typer.Option(help="A checkpoint of this library; the packaged one by default.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; a GPU if there is one.")]


@app.callback()
def options(
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error was raised.")] = False,
) -> None:
    """Options before the command."""
    state["traceback"] = traceback


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: `sys.argv[1:]` if None.

    Returns:
        0; 1 where a check failed; 2 for bad input, told in one line on stderr; 130 when interrupted.
    """
    state["traceback"] = False
    try:
        code = app(args=list(sys.argv[1:] if arguments is None else arguments), standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except Exception as error:
        message = _bad_input(error)
        if message is None or state["traceback"]:
            raise
        if message:  # the bare command has shown its help instead
            print(f"latentkv: {message}", file=sys.stderr)
        return BAD_INPUT
    return code if isinstance(code, int) else 0


def _bad_input(error: Exception) -> str | None:
    """One line on an error that the input caused; None for any other."""
    if hasattr(error, "format_message"):  # a usage error; which class it is depends on typer's version
        return one_line(error.format_message())
    if isinstance(error, (ValueError, NotImplementedError, OSError)):
        return one_line(error) or type(error).__name__
    return None


# --- the model --------------------------------------------------------------------------------------------------------


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads it from stdin.")],
    tokens: Annotated[int, typer.Option(help="Most bytes to decode.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest byte.")] = 0.7,
    top_p: Annotated[float, typer.Option(help="Share of the likeliest bytes to draw from.")] = 0.95,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    window_layout: Annotated[str, typer.Option(help="Layout of window rows.")] = "v41",
    row_layout: Annotated[str, typer.Option(help="Layout of compressed rows.")] = "v41_fp4",
    checkpoint: Checkpoint = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Continue PROMPT with the packaged model, whose caches are the library's pages."""
    from latentkv.model import Sampling
    from latentkv.model import generate as events

    text = _stdin_text() if prompt == "-" else prompt
    sampling = Sampling(temperature, top_p, seed)
    model = _load_model(checkpoint, device)
    stream = events(
        model, text, max_tokens=tokens, sampling=sampling, window_layout=window_layout, row_layout=row_layout
    )
    summary, streaming = None, False
    with _progress("prefill") as (bar, task):
        for event in stream:
            summary = event.summary or summary
            bar.update(task, description=event.phase, completed=event.done, total=event.total)
            if as_json or event.phase == "prefill":
                continue
            if not streaming:  # from here on the text itself shows how far it is
                streaming = True
                bar.stop()
                _write(text)
            _write(event.text)
    assert summary is not None  # the last event has it
    if as_json:
        _print_json({"prompt": text, **summary.to_dict()})
        return
    _write("\n")
    _stderr().print(
        f"{summary.prompt_tokens} prompt tokens in {summary.prefill_seconds:.2f} s, {summary.new_tokens} new at "
        f"{summary.tokens_per_second:.1f} a second; cache: {summary.kv_bytes_per_token:.0f} bytes a token "
        f"({summary.row_layout}) and a window of {summary.window_bytes} ({summary.window_layout})",
        style="dim",
        highlight=False,
    )


@app.command("eval")
def evaluate(
    text: Annotated[Path | None, typer.Option(help="A text file, instead of held-out library sources.")] = None,
    corpus: Annotated[
        Path | None, typer.Option(help="A Python library's folder; this Python's own by default.")
    ] = None,
    context: Annotated[int, typer.Option(help="Bytes of a context.")] = 1024,
    windows: Annotated[int, typer.Option(help="Contexts.")] = 2,
    pair: Annotated[
        list[str] | None, typer.Option(help="WINDOW:ROWS layouts, repeatable; differences are to the first.")
    ] = None,
    checkpoint: Checkpoint = None,
    device: Device = None,
    plot: Annotated[Path | None, typer.Option(help="Draw quality against bytes into this image.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure bits per byte of held-out text under pairs of cache layouts."""
    from latentkv.model import evaluation

    if plot is not None:
        _check_image(plot)
    pairs: Sequence[tuple[KVLayout | str, KVLayout | str]] = evaluation.DEFAULT_PAIRS
    if pair:
        pairs = [_layout_pair(p) for p in pair]
    if text is not None:
        source, contexts = str(text), evaluation.text_windows(text, context, windows)
    else:
        source = "held-out library sources"
        contexts = evaluation.held_out_windows(context, windows, folder=corpus)
    model = _load_model(checkpoint, device)
    with _progress("evaluating") as (bar, task):
        report = evaluation.evaluate(
            model,
            contexts,
            source=source,
            pairs=pairs,
            progress=lambda p: bar.update(task, description=p.pair, completed=p.done, total=p.total),
        )
    if plot is not None:
        evaluation.plot(report, plot)
    if as_json:
        _print_json(report.to_dict())
        return
    table = Table(
        title=f"{report.source}: {report.windows} contexts of up to {report.context} bytes, top {report.topk}"
    )
    table.add_column("window + rows", no_wrap=True)
    for name in ("bits/byte", "change", "B/token", "window B", "same picks", "s"):
        table.add_column(name, justify="right")
    for row in report.rows:
        same = "" if row.agreement is None else f"{100 * row.agreement:.1f} %"
        measured = (f"{row.bits_per_byte:.4f}", f"{row.difference:+.4f}", f"{row.bytes_per_token:.0f}")
        table.add_row(row.name, *measured, f"{row.window_bytes:,}", same, f"{row.seconds:.1f}")
    _stdout().print(table)


def _load_model(checkpoint: Path | None, device: str | None) -> PagedModel:
    from latentkv.doctor import find_device
    from latentkv.model import PagedModel, load_checkpoint

    return PagedModel(*load_checkpoint(checkpoint, device=find_device(device)))


def _layout_pair(text: str) -> tuple[KVLayout, KVLayout]:
    from latentkv.layout import KVLayout

    window, colon, rows = text.partition(":")
    if not colon:
        raise ValueError(f"pair: {text!r} given, WINDOW:ROWS needed, such as v41:v41_fp4")
    return KVLayout.parse(window), KVLayout.parse(rows)


def _stdin_text() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"prompt: stdin is not UTF-8 text (byte {error.start} does not decode)") from error


# --- the machine ------------------------------------------------------------------------------------------------------


@app.command()
def doctor(
    quick: Annotated[bool, typer.Option("--quick", help="Do not run the kernels.")] = False,
    as_json: AsJson = False,
) -> None:
    """Report versions, devices and the path of each op: paste it into bug reports.

    On a GPU every op runs once against the reference; exit 1 if one is wrong.
    """
    from latentkv.doctor import find_device, report

    found = report()
    found["checks"] = []
    if not quick and found["devices"]:
        from latentkv import checkup

        with _progress("checking") as (bar, task):
            found["checks"] = checkup.run(find_device("cuda"), lambda op: bar.update(task, description=op))
    if as_json:
        _print_json(found)
    else:
        _print_doctor(found)
    if not all(check["passed"] for check in found["checks"]):
        raise typer.Exit(FAILED)


def _print_doctor(found: dict[str, Any]) -> None:
    console = _stdout()
    facts = Table(show_header=False, box=None, pad_edge=False)
    for name in ("latentkv", "revision", "python", "platform", "torch", "triton", "cuda", "hip", "driver"):
        facts.add_row(name, str(found[name] if found[name] is not None else "-"))
    facts.add_row("interpreter", "on (TRITON_INTERPRET)" if found["interpreter"] else "off")
    facts.add_row("packages", ", ".join(f"{k} {v or '-'}" for k, v in found["packages"].items()))
    for device in found["devices"]:
        size = f"{device['memory'] / 2**30:.0f} GiB, {device['multiprocessors']} multiprocessors"
        facts.add_row(f"gpu {device['index']}", f"{device['name']}, {device['target']}, {size}")
    if not found["devices"]:
        facts.add_row("gpu", "none that PyTorch sees")
    console.print(facts)
    checks = {check["op"]: check for check in found["checks"]}
    paths = Table()
    for name in ("stage", "op", "cpu", "gpu", *(["against the reference"] if checks else [])):
        paths.add_column(name, no_wrap=True)
    for op in found["ops"]:
        compared = [_verdict(checks[op["op"]])] if checks else []
        paths.add_row(op["stage"], op["op"], op["cpu"], op["gpu"], *compared)
    console.print(paths)
    if not checks:
        console.print("the kernels were not run: latentkv doctor runs them where there is a GPU", highlight=False)


def _verdict(check: dict[str, Any]) -> str:
    if check["error"] or not check["calls"]:
        return f"[red]failed[/red]: {escape(check['error'] or 'not called')}"
    text = "equal" if not check["differing"] else f"{check['differing']} of {check['values']} differ"
    if check["largest"]:
        text += f", by {check['largest']:.1e} of the largest at most"
    return text if check["passed"] else f"[red]{text}[/red]"


@app.command()
def targets(
    stage: Annotated[list[str] | None, typer.Option(help="Only this stage's kernels, repeatable.")] = None,
    target: Annotated[list[str] | None, typer.Option(help="Only this target, such as gfx950, repeatable.")] = None,
    module: Annotated[list[str] | None, typer.Option(help="Another module with TARGET_CASES, repeatable.")] = None,
    asm: Annotated[Path | None, typer.Option(help="Write the assembly of every build into this folder.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that compile.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Compile every kernel for every GPU target, without a GPU; exit 1 if one fails, or spills more than it may."""
    from dataclasses import asdict

    from latentkv import targets as machinery
    from latentkv.doctor import triton_version

    chosen = machinery.find_targets(target or ())
    cases = machinery.find_cases(stage or (), module or ())
    with _progress("compiling", total=len(cases) * len(chosen)) as (bar, task):
        builds = machinery.build_all(
            cases,
            chosen,
            asm_folder=asm,
            jobs=jobs,
            progress=lambda b: bar.update(task, advance=1, description=f"{b.kernel} {b.target}"),
        )
    failing = [b for b in builds if b.problems]
    if as_json:
        _print_json(
            {
                "triton": triton_version(),
                "targets": [asdict(t) for t in chosen],
                "builds": [b.to_dict() for b in builds],
                "failing": len(failing),
            }
        )
    else:
        console = _stdout()
        console.print(_matrix(builds, [t.name for t in chosen]))
        for build in failing:
            where = f"{build.stage}.{build.kernel} [{build.label}] on {build.target}"
            console.print(f"{where}: {', '.join(build.problems)}", style="red", markup=False, highlight=False)
        console.print(f"{len(builds)} builds, {len(failing)} failing")
    if failing:
        raise typer.Exit(FAILED)


def _matrix(builds: Sequence[Build], names: Sequence[str]) -> Table:
    table = Table(
        caption="registers, KiB of shared memory; v: words spilled, as allowed; s: scalar registers kept in lanes"
    )
    table.add_column("kernel")
    table.add_column("variant")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for build in builds:
        lines.setdefault((f"{build.stage}.{build.kernel}", build.label), {})[build.target] = _cell(build)
    for (kernel, label), cells in lines.items():
        table.add_row(kernel, label, *(cells.get(name, "") for name in names))
    return table


def _cell(build: Build) -> str:
    if build.usage is None:
        return "[red]failed[/red]"
    text = str(build.usage.registers)
    if build.usage.shared_bytes:
        text += f" {build.usage.shared_bytes / 1024:.3g}K"
    if build.usage.spills:
        text += f" v{build.usage.spills}"
    if build.usage.scalar_spills:
        text += f" s{build.usage.scalar_spills}"
    return f"[red]{text}![/red]" if build.problems else text


@app.command()
def bench(
    stage: Annotated[str | None, typer.Argument(help="A stage; all that have benchmarks if left out.")] = None,
    device: Annotated[str | None, typer.Option(help="cuda, cuda:N, or cpu to time the reference.")] = None,
    size: Annotated[
        list[int] | None,
        typer.Option(min=1, help="This size for most ops, repeatable; some keep their own."),
    ] = None,
    seconds: Annotated[float, typer.Option(help="No measurement of a stage starts later than this.")] = 80.0,
    out: Annotated[Path | None, typer.Option(help="Write the record here; with several stages, a folder.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw bandwidth against size into this image.")] = None,
    revision: Annotated[str | None, typer.Option(help="Recorded where there is no git clone to ask.")] = None,
    as_json: AsJson = False,
) -> None:
    """Time the ops of STAGE beside other implementations, with this machine's limits measured in the same run."""
    from latentkv.bench import find_stages, load_stage, record_of, report, run, timing
    from latentkv.doctor import environment

    if plot is not None:
        _check_image(plot)
    if out is not None:
        _check_file("out", out) if stage else _check_folder("out", out)
    names = [stage] if stage else list(find_stages())
    modules = {name: load_stage(name) for name in names}
    clock = timing.clock_for(device)
    found = environment()
    found["revision"] = revision or found["revision"]
    records = []
    with _progress("roofs") as (bar, task):
        roofs = clock.roofs()
        for name, module in modules.items():
            cases = module.cases(size)
            total = sum(1 + len(case.peers) for case in cases)
            bar.update(task, completed=0, total=total)

            def advance(what: str) -> None:
                bar.update(task, description=what, advance=1)

            over = time.monotonic() + seconds
            rows = run(cases, clock, roofs, seconds=seconds, progress=advance)
            record = record_of(name, rows, roofs, found)
            if hasattr(module, "steps"):  # the model's: what a step consists of
                bar.update(task, completed=total)
                record["steps"] = module.steps(
                    rows,
                    clock,
                    is_over=lambda over=over: time.monotonic() > over,
                    progress=lambda what: bar.update(task, description=what),
                )
            records.append(record)
    for record in records:
        if out is not None:
            path = out if stage else out / f"{record['stage']}.json"
            path.write_text(json.dumps(record, indent=1) + "\n")
    if plot is not None:
        report.plot(records, plot)
    if as_json:
        _print_json(records[0] if stage else records)
    else:
        for record in records:
            _stdout().print(report.table(record))
            if record.get("steps"):
                _stdout().print(report.steps_table(record))
            for note in report.notes(record):
                _stdout().print(note, markup=False, highlight=False)
    if any(row["error"] for record in records for row in record["rows"]):
        raise typer.Exit(FAILED)


# --- shared -----------------------------------------------------------------------------------------------------------


def _stdout() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=PLAIN_WIDTH)


def _stderr() -> Console:
    return Console(stderr=True)


@contextmanager
def _progress(description: str, total: int | None = None) -> Iterator[tuple[Progress, TaskID]]:
    """A progress bar on stderr; nothing where stderr is no terminal."""
    console = _stderr()
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        yield bar, bar.add_task(description, total=total)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=1, ensure_ascii=False))


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _check_folder(option: str, path: Path) -> None:
    """Check, before the work whose results go there, that this is a folder, and make it."""
    if path.exists() and not path.is_dir():
        raise ValueError(f"{option}: {path} is a file, a folder needed")
    path.mkdir(parents=True, exist_ok=True)


def _check_file(option: str, path: Path) -> None:
    if path.is_dir():
        raise ValueError(f"{option}: {path} is a folder, a file needed")
    _check_folder(option, path.parent)


def _check_image(path: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("plot: matplotlib is missing; `pip install '.[plot]'` in a clone brings it")
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.lower().lstrip(".") not in kinds:
        raise ValueError(f"plot: {path} given, a file name that ends in one of {', '.join(sorted(kinds))} needed")
    _check_file("plot", path)
