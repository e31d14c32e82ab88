"""Train the packaged checkpoint on a Python standard library, within a time limit.

    PYTHONPATH=src python training/train.py --corpus stdlib --out out --seconds 300
    PYTHONPATH=src python training/train.py --corpus stdlib --out out --smoke

The learning rate follows the elapsed share of the limit, so a run always ends annealed. It trains on short contexts
first, then on long ones, where the selection of rows is at work. The output folder gets the weights (bf16,
safetensors) and a JSON record: seed, versions, corpus digest, settings, loss curve, held-out bits per byte.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from latentkv.layout import KVLayout
from latentkv.model import corpus, dense
from latentkv.model.checkpoint import PACKAGED_NAME, save_checkpoint
from latentkv.model.config import ModelConfig
from latentkv.model.weights import Weights, init_weights, weight_dtype

WARMUP_STEPS = 100
MAX_GRAD_NORM = 1.0
BIAS_STEP = 1e-3  # of the router's balancing rule
LOG_EVERY = 25


@dataclass(frozen=True)
class Stage:
    """A part of the run: context length, sequences a step, and the share of time at which it ends."""

    length: int
    batch: int
    until: float


def main() -> None:
    args = _arguments()
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")  # fp32 products are of bf16 values, which tf32 holds exactly
    device = torch.device(args.device)
    dense.enable_compile(args.compile and device.type == "cuda")
    config = _tiny_config() if args.tiny else ModelConfig()
    stages = [
        Stage(args.lengths[0], max(1, args.step_tokens // args.lengths[0]), args.switch),
        Stage(args.lengths[1], max(1, args.step_tokens // args.lengths[1]), 1.0),
    ]
    training, held_out = (corpus.read_corpus(args.corpus, held_out=h) for h in (False, True))
    streams = {name: corpus.token_stream(docs).to(device) for name, docs in (("t", training), ("h", held_out))}
    print(
        f"{len(training)} files of {streams['t'].numel()} tokens to train, {len(held_out)} files held out", flush=True
    )

    trainer = Trainer(config, streams["t"], device=device, seed=args.seed, peak=args.lr)
    count = sum(w.numel() for w in trainer.weights.values())
    print(f"{count / 1e6:.2f}M weights on {_device_name(device)}", flush=True)
    if args.smoke:
        for stage in stages:
            trainer.measure(stage)
        result = evaluate(config, trainer.weights, streams["h"], length=args.lengths[1], windows=4)
        print(f"evaluation runs: {result}", flush=True)
        return

    started = time.perf_counter()
    trainer.train(stages, args.seconds)
    trained = time.perf_counter() - started
    rounded = {n: w.detach().to(weight_dtype(n)).float() for n, w in trainer.weights.items()}
    results = evaluate(config, rounded, streams["h"], length=args.lengths[1], windows=args.windows)
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        save_checkpoint(args.out / PACKAGED_NAME, config, rounded)
    except ImportError:  # a machine without safetensors: `save_checkpoint` the file elsewhere
        torch.save({n: w.to(weight_dtype(n)) for n, w in rounded.items()}, args.out / "weights.pt")
    record = {
        "weights": count,
        "config": config.to_dict(),
        "seed": args.seed,
        "stages": [asdict(s) for s in stages],
        "peak_lr": args.lr,
        "steps": trainer.step_count,
        "tokens": trainer.tokens,
        "seconds": round(trained, 1),
        "held_out_bits_per_byte": results,
        "corpus": {
            "files": "*.py of the standard library without " + ", ".join(sorted(corpus.EXCLUDED_FOLDERS)),
            "licence": "PSF-2.0",
            "held_out_rule": "int(sha256(relative posix path), 16) % 10 == 0",
            "training_files": len(training),
            "training_bytes": sum(len(d.text) for d in training),
            "training_sha256": corpus.corpus_digest(training),
            "held_out_files": len(held_out),
            "held_out_bytes": sum(len(d.text) for d in held_out),
            "held_out_sha256": corpus.corpus_digest(held_out),
        },
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda},
        "device": _device_name(device),
        "curve": trainer.curve,
    }
    (args.out / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps({k: record[k] for k in ("steps", "tokens", "seconds", "held_out_bits_per_byte")}), flush=True)


class Trainer:
    """Weights, optimizer and data of a run."""

    def __init__(self, config: ModelConfig, stream: Tensor, *, device: torch.device, seed: int, peak: float) -> None:
        self.config, self.stream, self.device, self.peak = config, stream, device, peak
        self.weights: Weights = {n: w.to(device) for n, w in init_weights(config, seed=seed).items()}
        trained = {n: w.requires_grad_() for n, w in self.weights.items() if not n.endswith("router_bias")}
        decayed = [w for n, w in trained.items() if w.dim() >= 2 and n != "embed" and not n.endswith("hc_fn")]
        others = [w for w in trained.values() if all(w is not d for d in decayed)]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), fused=device.type == "cuda")
        # the indexer has a loss of its own, so its gradient is clipped on its own
        self.clip_groups = [[w for n, w in trained.items() if (".index." in n) == indexer] for indexer in (False, True)]
        self.biases = [self.weights[f"layers.{i}.moe.router_bias"] for i in range(config.layers)]
        self.generator = torch.Generator(device=device).manual_seed(seed)
        self.options = dense.DenseOptions(
            math=torch.bfloat16 if device.type == "cuda" else torch.float32, exact_ties=False, index_loss=True
        )
        self.step_count, self.tokens = 0, 0
        self.curve: list[dict[str, float]] = []

    def step(self, stage: Stage, lr: float) -> tuple[Tensor, Tensor]:
        """One optimizer step; returns the text loss in nats and the indexer's loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        starts = torch.randint(
            self.stream.numel() - stage.length - 1, (stage.batch, 1), generator=self.generator, device=self.device
        )
        window = self.stream[starts + torch.arange(stage.length + 1, device=self.device)].long()
        out = dense.forward(self.config, self.weights, window[:, :-1], self.options)
        text = F.cross_entropy(out.logits.flatten(0, 1), window[:, 1:].flatten())
        (text + out.index_loss).backward()
        for group in self.clip_groups:
            torch.nn.utils.clip_grad_norm_(group, MAX_GRAD_NORM, foreach=self.device.type == "cuda")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for bias, load in zip(self.biases, out.loads, strict=True):
                bias += BIAS_STEP * torch.sign(1.0 / load.numel() - load)
        self.step_count += 1
        self.tokens += stage.batch * stage.length
        return text.detach(), out.index_loss.detach()

    def train(self, stages: list[Stage], seconds: float) -> None:
        """Run until `seconds` have passed."""
        started = time.perf_counter()
        while (share := (time.perf_counter() - started) / seconds) < 1.0:
            stage = next(s for s in stages if share < s.until)
            lr = self.peak * min(1.0, (self.step_count + 1) / WARMUP_STEPS) * 0.5 * (1 + math.cos(math.pi * share))
            text, index = self.step(stage, lr)
            if self.step_count % LOG_EVERY == 1:
                point = {
                    "step": self.step_count,
                    "seconds": round(time.perf_counter() - started, 1),
                    "tokens": self.tokens,
                    "length": stage.length,
                    "bits_per_byte": round(text.item() / math.log(2), 4),
                    "index_loss": round(index.item(), 4),
                }
                self.curve.append(point)
                print(json.dumps(point), flush=True)

    def measure(self, stage: Stage, *, warm: int = 3, steps: int = 10) -> None:
        """Print a stage's throughput and peak memory."""
        started = time.perf_counter()
        for _ in range(warm):
            text, index = self.step(stage, 1e-4)
        self._wait()
        ready = time.perf_counter()
        for _ in range(steps):
            text, index = self.step(stage, 1e-4)
        self._wait()
        rate = steps * stage.batch * stage.length / (time.perf_counter() - ready)
        memory = torch.cuda.max_memory_allocated() / 2**30 if self.device.type == "cuda" else 0.0
        print(
            f"context {stage.length} x {stage.batch}: first {warm} steps {ready - started:.1f} s, "
            f"then {rate:,.0f} tokens/s, "
            f"peak {memory:.1f} GiB, text loss {text.item():.3f}, index loss {index.item():.3f}",
            flush=True,
        )

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


@torch.no_grad()
def evaluate(config: ModelConfig, weights: Weights, stream: Tensor, *, length: int, windows: int) -> dict[str, float]:
    """Held-out bits per byte under two pairs of layouts, on evenly spread windows of the stream."""
    dense.enable_compile(False)  # other shapes than the training's, and few of them
    device = stream.device
    windows = min(windows, (stream.numel() - 1) // length)
    step = (stream.numel() - length - 1) // max(windows - 1, 1)
    math_dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    results = {}
    for window_layout, row_layout in ((KVLayout.BF16, KVLayout.BF16), (KVLayout.V41, KVLayout.V41_FP4)):
        options = dense.DenseOptions(window_layout, row_layout, math=math_dtype, exact_ties=False)
        total = 0.0
        for start in range(0, windows, 4):
            rows = [stream[i * step : i * step + length + 1] for i in range(start, min(start + 4, windows))]
            tokens = torch.stack(rows).long()
            logits = dense.forward(config, weights, tokens[:, :-1], options).logits
            total += F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum").item()
        results[f"{window_layout}+{row_layout}"] = round(total / (windows * length) / math.log(2), 5)
    return results


def _tiny_config() -> ModelConfig:
    return ModelConfig(hidden=64, q_rank=32, o_rank=16, experts=4, expert_width=16, index_topk=16, candidate_blocks=8)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu"


def _arguments() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, default=None, help="a standard library's folder; this Python's own")
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--seconds", type=float, default=300.0, help="limit of the training loop")
    parser.add_argument("--smoke", action="store_true", help="measure each stage's throughput and stop")
    parser.add_argument("--tiny", action="store_true", help="a small model, to check the script on a CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--step-tokens", type=int, default=32768)
    parser.add_argument("--lengths", type=int, nargs=2, default=(1024, 4096))
    parser.add_argument("--switch", type=float, default=0.6, help="share of the time after which contexts are long")
    parser.add_argument("--windows", type=int, default=64, help="held-out windows to evaluate")
    return parser.parse_args()


if __name__ == "__main__":
    main()
