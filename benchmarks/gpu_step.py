"""Step time on one GPU: this framework beside a hand-written loop, in turns inside one process,
compiled and not.

    python benchmarks/gpu_step.py [--only NAME ...] [--steps 30] [--compile off|on|both] [--out FILE]
    python benchmarks/gpu_step.py --tiny --device cpu        the same code on toy sizes: its numbers mean nothing

    ours     train.dtype = "bfloat16": weights in bfloat16, gradients summed and weights stepped in float32
    plain    float32 weights under torch.autocast(bfloat16), gradient accumulation, clip_grad_norm_, fused AdamW

Both train the same builder on random tokens: with plain nn.Dropout in the loop, with masks by name
in ours. CUDA events time blocks of steps, which take turns, A B, B A, ...; a ratio compares
adjacent blocks. FLOPs are the model's: three forwards per step. MFU has two counts, full attention
and its causal half, both against the dense bfloat16 peak of the maker's data sheet; a device
without a listed peak has the reason instead.

Exit code 2: no CUDA device. 1: the two do not begin with the same loss.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from report import environment
from torch import Tensor, nn

from meshwright.build import build
from meshwright.config import RunConfig, resolve
from meshwright.config.functions import find_function
from meshwright.errors import ModelError
from meshwright.mesh import Grid
from meshwright.mesh.mesh import open_mesh
from meshwright.model.meter import causal_share
from meshwright.step import take_step
from meshwright.tracking.observer import peak_flops

RESULTS = Path(__file__).parent / "results"
WARM_UP_STEPS = 3
BLOCK_STEPS = 5
LEARNING_RATE, BETAS, WEIGHT_DECAY, CLIP_NORM = 3e-4, (0.9, 0.95), 0.1, 1.0
SAME_LOSS = 0.02
"""Relative difference of the first losses: both draw initial weights from the same distribution,
but not the same.
"""


class Job(NamedTuple):
    """Model and batch of a race."""

    builder: str
    options: dict[str, Any]
    sequence_length: int
    micro_batch_size: int
    chunks: int

    @property
    def tokens_per_step(self) -> int:
        """Tokens per optimizer step."""
        return self.sequence_length * self.micro_batch_size * self.chunks


GPT2 = {
    "vocab_size": 50257,
    "hidden_size": 768,
    "num_layers": 12,
    "num_heads": 12,
    "max_sequence_length": 1024,
}
LLAMA_1B = {
    "vocab_size": 32768,
    "hidden_size": 2048,
    "num_layers": 16,
    "num_heads": 32,
    "num_kv_heads": 8,
    "ffn_size": 8192,
    "max_sequence_length": 4096,
}
JOBS = {
    "gpt2-124m": Job("meshwright_models.gpt2:build", {**GPT2, "dropout": 0.0}, 1024, 16, 2),
    "gpt2-124m-dropout": Job("meshwright_models.gpt2:build", {**GPT2, "dropout": 0.1}, 1024, 8, 2),
    "llama-1b": Job("meshwright_models.llama:build", LLAMA_1B, 4096, 2, 2),
}
TINY = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "max_sequence_length": 16,
}
TINY_JOBS = {
    "gpt2-124m": Job("meshwright_models.gpt2:build", {**TINY, "dropout": 0.0}, 16, 2, 2),
    "gpt2-124m-dropout": Job("meshwright_models.gpt2:build", {**TINY, "dropout": 0.1}, 16, 2, 2),
    "llama-1b": Job(
        "meshwright_models.llama:build", {**TINY, "num_kv_heads": 2, "ffn_size": 48}, 16, 2, 2
    ),
}


class Tokens:
    """Source of a few random micro-batches, repeated, because reading data is not measured."""

    def __init__(self, job: Job) -> None:
        generator = torch.Generator().manual_seed(1234)
        shape = (8, job.micro_batch_size, job.sequence_length + 1)
        self.windows = torch.randint(job.options["vocab_size"], shape, generator=generator)

    def read(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return (tokens, labels), both (B, S),
        of the micro-batch that these sample indices begin.
        """
        window = self.windows[indices[0] // len(indices) % len(self.windows)]
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()


def config_of(job: Job, device: str, *, compiled: bool = False, **parallel: object) -> RunConfig:
    """Return the resolved configuration of this framework for a job."""
    degrees = [int(parallel.get(axis, 1)) for axis in ("pp", "dp", "cp", "tp")]  # type: ignore[call-overload]
    config = RunConfig.model_validate(
        {
            "model": {"builder": job.builder, "options": job.options},
            "data": {"train": "random", "sequence_length": job.sequence_length},
            "batch": {"micro_batch_size": job.micro_batch_size, "chunks": job.chunks},
            "parallel": parallel,
            "optimizer": {
                "learning_rate": LEARNING_RATE,
                "schedule": "constant",
                "betas": BETAS,
                "weight_decay": WEIGHT_DECAY,
                "clip_norm": CLIP_NORM,
            },
            "train": {"dtype": "bfloat16", "device": device, "compile": compiled},
        }
    )
    return resolve(config, math.prod(degrees))


class Ours:
    """Contender: this framework with one rank."""

    def __init__(self, job: Job, device: torch.device, compiled: bool) -> None:
        config = config_of(job, device.type, compiled=compiled)
        self.parts = build(config, open_mesh(Grid(), device.type), (Tokens(job), {}))

    def step(self) -> float:
        """Take the framework's own step; return its loss."""
        return take_step(self.parts).loss


class Plain:
    """Contender: a training loop without a framework."""

    def __init__(self, job: Job, device: torch.device, compiled: bool) -> None:
        torch.manual_seed(1234)
        builder = find_function(
            job.builder, "builder", "a function that returns an nn.Sequential", ModelError
        )
        model: nn.Module = builder(**job.options).to(device)
        self.job, self.device, self.tokens, self.samples_seen = job, device, Tokens(job), 0
        self.parameters = list(model.parameters())
        self.optimizer = torch.optim.AdamW(
            [
                {
                    "params": [p for p in self.parameters if p.dim() >= 2],
                    "weight_decay": WEIGHT_DECAY,
                },
                {"params": [p for p in self.parameters if p.dim() < 2], "weight_decay": 0.0},
            ],
            lr=LEARNING_RATE,
            betas=BETAS,
            fused=True,
        )
        self.model = torch.compile(model) if compiled else model

    def step(self) -> float:
        """Accumulate gradients, clip, step; return the loss."""
        job = self.job
        self.optimizer.zero_grad()
        total = torch.zeros((), device=self.device)
        for m in range(job.chunks):
            first = self.samples_seen + m * job.micro_batch_size
            found = self.tokens.read(range(first, first + job.micro_batch_size))
            tokens, labels = (tensor.to(self.device) for tensor in found)
            with torch.autocast(self.device.type, torch.bfloat16):
                logits = self.model(tokens)
            loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten()) / job.chunks
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.parameters, CLIP_NORM)
        self.optimizer.step()
        self.samples_seen += job.micro_batch_size * job.chunks
        return float(total)


class Measured(NamedTuple):
    """Measurements of one contender."""

    first_loss: float
    step_s: list[float]
    """Seconds per step, for each block."""
    peak_bytes: int
    """Peak bytes without those that the other contender holds; 0 on CPU."""


def allocated(device: torch.device) -> int:
    """Return the bytes that torch has allocated on the device now; 0 on CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def timed(step: Callable[[], float], steps: int, device: torch.device) -> float:
    """Return the seconds per step of consecutive steps, from an idle device to an idle device."""
    if device.type != "cuda":
        start_s = time.perf_counter()
        for _ in range(steps):
            step()
        return (time.perf_counter() - start_s) / steps
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    start.record()
    for _ in range(steps):
        step()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1e3 / steps


class Flops(NamedTuple):
    """Model FLOPs of a step."""

    full: float
    """Attention counted whole."""
    causal: float
    """Causal attention counted half."""

    def rates(self, step_s: float, device: torch.device) -> dict[str, Any]:
        """Return TFLOP/s and both counts of MFU, or the reason for none."""
        row: dict[str, Any] = {"tflops": round(self.full / step_s / 1e12, 3)}
        peak = peak_flops(device, "bfloat16")
        if peak is None:
            name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
            return row | {
                "mfu": None,
                "mfu_causal": None,
                "mfu_reason": f"no bfloat16 peak is listed for {name}",
            }
        return row | {
            f"mfu{end}": round(n / step_s / peak, 4)
            for end, n in (("", self.full), ("_causal", self.causal))
        }


def race(
    job: Job, device: torch.device, compiled: bool, steps: int
) -> tuple[dict[str, Measured], Flops]:
    """Time ours and plain in turns; return their measurements, and the model FLOPs of a step."""
    contenders: dict[str, Ours | Plain] = {}
    first_losses, held_bytes = {}, {}
    for name, make in (("ours", Ours), ("plain", Plain)):
        before = allocated(device)
        contenders[name] = make(job, device, compiled)
        first_losses[name] = contenders[name].step()
        for _ in range(WARM_UP_STEPS - 1):
            contenders[name].step()
        gc.collect()
        held_bytes[name] = allocated(device) - before
    times: dict[str, list[float]] = {name: [] for name in contenders}
    peaks = dict.fromkeys(contenders, 0)
    block_steps = min(BLOCK_STEPS, steps)
    for block in range(max(2, round(steps / block_steps))):
        for name in list(contenders)[:: 1 if block % 2 == 0 else -1]:
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            times[name].append(timed(contenders[name].step, block_steps, device))
            if device.type == "cuda":
                others = sum(held for other, held in held_bytes.items() if other != name)
                peaks[name] = max(peaks[name], torch.cuda.max_memory_allocated(device) - others)
    ours = contenders["ours"]
    assert isinstance(ours, Ours)
    blueprint = ours.parts.blueprint
    full = blueprint.flops_per_step
    flops = Flops(full, full * causal_share([cost.forward for cost in blueprint.layer_costs]))
    return {
        name: Measured(first_losses[name], times[name], peaks[name]) for name in contenders
    }, flops


def summary(
    job: Job, measured: dict[str, Measured], flops: Flops, device: torch.device
) -> dict[str, Any]:
    """Return the numbers for the table and for the file."""
    rows = {}
    for name, (first_loss, step_s, peak_bytes) in measured.items():
        median_s = statistics.median(step_s)
        rows[name] = {
            "first_loss": first_loss,
            "step_ms": round(median_s * 1e3, 3),
            "step_ms_of_blocks": [round(each * 1e3, 3) for each in step_s],
            "tokens_per_s": round(job.tokens_per_step / median_s),
            **flops.rates(median_s, device),
            "peak_gib": round(peak_bytes / 2**30, 3),
        }
    ratios = [
        ours / plain
        for ours, plain in zip(measured["ours"].step_s, measured["plain"].step_s, strict=True)
    ]
    spread = [round(each, 4) for each in (statistics.median(ratios), min(ratios), max(ratios))]
    return {
        "contenders": rows,
        "time_of_ours_over_plain": dict(zip(("median", "least", "most"), spread, strict=True)),
    }


def show(title: str, found: dict[str, Any]) -> None:
    """Print one race."""
    print(
        f"\n{title}\n{'':8}{'step ms':>10}{'tokens/s':>12}{'TFLOP/s':>10}{'MFU':>8}{'causal':>8}{'peak GiB':>10}"
        f"{'loss 1':>9}"
    )
    for name, row in found["contenders"].items():
        mfu = "".join(
            f"{'-' if row[key] is None else f'{row[key]:.1%}':>8}" for key in ("mfu", "mfu_causal")
        )
        print(
            f"{name:8}{row['step_ms']:>10.2f}{row['tokens_per_s']:>12,}{row['tflops']:>10.2f}{mfu}"
            f"{row['peak_gib']:>10.2f}{row['first_loss']:>9.4f}"
        )
    ratio = found["time_of_ours_over_plain"]
    print(
        f"ours / plain, time of a step: {ratio['median']:.3f}  [{ratio['least']:.3f} .."
        f" {ratio['most']:.3f}]",
        flush=True,
    )


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=list(JOBS), default=list(JOBS))
    parser.add_argument("--steps", type=int, default=30, help="timed steps of each contender")
    parser.add_argument("--compile", choices=["off", "on", "both"], default="both")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--tiny", action="store_true", help="toy sizes: exercises the code, measures nothing"
    )
    parser.add_argument("--out", type=Path, help="where the JSON goes; - for nowhere")
    options = parser.parse_args(argv)
    if options.device == "cpu" and not options.tiny:
        parser.error("--device cpu is for --tiny: these models want a GPU")
    if options.steps < 1:
        parser.error("--steps must be 1 or more")
    return options


def main(argv: Sequence[str]) -> int:
    """Run the races; return the exit code."""
    options = parse(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            "gpu_step needs a CUDA device, and torch sees none; --tiny --device cpu exercises the"
            " code",
            file=sys.stderr,
        )
        return 2
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    races, wrong = {}, []
    for job_name in options.only:
        job = (TINY_JOBS if options.tiny else JOBS)[job_name]
        for compiled in {"off": [False], "on": [True], "both": [False, True]}[options.compile]:
            title = f"{job_name}{', compiled' if compiled else ''}"
            measured, flops = race(job, device, compiled, options.steps)
            races[title] = {
                "job": job._asdict(),
                "flops_per_step": flops.full,
                **summary(job, measured, flops, device),
            }
            show(f"{title}, {job.tokens_per_step:,} tokens a step, {name}", races[title])
            ours, plain = measured["ours"].first_loss, measured["plain"].first_loss
            if not abs(ours - plain) <= SAME_LOSS * plain:
                wrong.append(
                    f"{title}: the first loss of ours is {ours:.4f}, that of plain {plain:.4f}"
                )
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            torch.compiler.reset()
    command = shlex.join(["python", "benchmarks/gpu_step.py", *argv])
    report = {
        "environment": {**environment(command), "device": name, "cuda": torch.version.cuda},
        "races": races,
    }
    out = options.out or RESULTS / f"gpu_step-{name.replace(' ', '-').lower()}-{date.today()}.json"
    if str(out) != "-":
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report, indent=1) + "\n")
        print(f"\nwritten to {out}")
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
