"""One command on a machine with a GPU: versions, ceilings of kernels, the tests of CUDA, memory,
and a race.

    python benchmarks/gpu_day.py --minutes 9 --out DIR [--stages facts,ceilings]
    python benchmarks/gpu_day.py --device cpu --tiny --out DIR     the same code on toy sizes: its numbers mean nothing

Each stage is a process with a deadline: its share of the time that is left. Each row is in
DIR/STAGE.json at once. A stage that dies or hangs is a row with its reason. DIR/STAGE.log holds its
output, DIR/table.txt the table.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SHARES = {
    "facts": 2,
    "ceilings": 3,
    "tests": 6,
    "memory": 5,
    "race": 14,
    "predict": 2,
    "one_rank": 4,
    "shared": 3,
}
"""Share of each stage in the time; time that a stage leaves goes to those after it."""
CONTENDER_S = 90.0
"""Longest time of one contender of the race."""
SAME_LOSS = 0.02
"""Largest relative difference of the first losses of contenders."""
ONLY_IN_JSON = ("name", "output", "kernels_ms", "step_ms_of_blocks")
PACKAGES = (
    "triton",
    "numpy",
    "pydantic",
    "megatron-core",
    "transformers",
    "nvidia-ml-py",
    "pytest",
)
Row = dict[str, Any]
Rows = Iterator[Row]


def write_atomic(path: Path, rows: list[Row]) -> None:
    """Write rows as JSON under another name, then rename."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(rows, indent=1) + "\n")
    part.replace(path)


def facts(options: argparse.Namespace) -> Rows:
    """Yield versions and the device, then the kernels of fused attention and of its backward."""
    import torch

    row: Row = {"name": "versions", "python": platform.python_version(), "torch": torch.__version__}
    for package in PACKAGES:
        try:
            row[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            row[package] = "missing"
    yield row
    if options.device == "cuda":
        found = torch.cuda.get_device_properties(0)
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        yield {
            "name": "device",
            "device": found.name,
            "memory_gib": round(found.total_memory / 2**30, 1),
        } | {
            "cuda": torch.version.cuda,
            "nccl": nccl,
            "multiprocessors": found.multi_processor_count,
        }
    else:
        yield {"name": "device", "device": "cpu", "cores": os.cpu_count()}
    attend = attention(options)
    activity = torch.profiler.ProfilerActivity
    wanted = [activity.CPU] + ([activity.CUDA] if options.device == "cuda" else [])
    attend()
    with torch.profiler.profile(activities=wanted) as profile:
        attend()
        settle(options.device)
    cuda = options.device == "cuda"
    spent = {
        event.key: event.self_device_time_total if cuda else event.self_cpu_time_total
        for event in profile.key_averages()
    }
    yield {
        "name": "kernels of attention",
        "kernels": sorted(spent, key=lambda key: -spent[key])[:5],
    }


def settle(device: str) -> None:
    """Block until the device is idle."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def attention_shape(options: argparse.Namespace) -> tuple[int, int, int]:
    """Return heads, tokens and head dim of Llama-3-8B's attention, or toy sizes."""
    return (4, 32, 16) if options.tiny else (32, 8192, 128)


def attention(options: argparse.Namespace) -> Callable[[], object]:
    """Return causal attention forward and backward of Llama-3-8B's heads, q, k and v (B, H, S,
    d).
    """
    import torch

    heads, length, size = attention_shape(options)
    q, k, v = (
        torch.randn(
            1, heads, length, size, device=options.device, dtype=torch.bfloat16, requires_grad=True
        )
        for _ in range(3)
    )

    def run() -> object:
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.autograd.grad(y, (q, k, v), torch.ones_like(y))

    return run


def seconds(call: Callable[[], object], device: str, tiny: bool) -> float:
    """Return the median seconds of a call, from an idle device to an idle device,
    over blocks of calls.
    """
    calls, found = (1, []) if tiny else (10, [])
    for _ in range(2 if tiny else 8):
        settle(device)
        start_s = time.perf_counter()
        for _ in range(calls):
            call()
        settle(device)
        found.append((time.perf_counter() - start_s) / calls)
    return sorted(found[1:])[len(found[1:]) // 2]


def ceilings(options: argparse.Namespace) -> Rows:
    """Yield the rate of each kernel that a step consists of;
    a kernel that fails is a row with its reason.
    """
    import torch

    tokens, hidden, wide = (32, 16, 48) if options.tiny else (8192, 4096, 14336)
    vocabulary, numel = (64, 2**10) if options.tiny else (32768, 2**28)
    kwargs: dict[str, Any] = {"device": options.device, "dtype": torch.bfloat16}
    x_TD, w_VD, y_TV = (
        torch.randn(*shape, **kwargs)
        for shape in ((tokens, hidden), (wide, hidden), (tokens, wide))
    )
    total_VD = torch.zeros(wide, hidden, device=options.device)

    def addmm() -> object:
        return torch.addmm(total_VD, y_TV.T, x_TD, out_dtype=torch.float32)

    def fp8() -> object:
        one = torch.ones((), device=options.device)
        a, b = x_TD.to(torch.float8_e4m3fn), w_VD.to(torch.float8_e4m3fn)
        return torch._scaled_mm(a, b.T, one, one, out_dtype=torch.bfloat16)

    def copy() -> Callable[[], object]:
        source = torch.zeros(numel, device=options.device)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    def adamw() -> Callable[[], object]:
        weights = torch.zeros(numel, device=options.device)
        weights.grad = torch.ones_like(weights)
        return torch.optim.AdamW([weights], fused=True).step

    def cross_entropy() -> Callable[[], object]:
        logits = torch.randn(tokens, vocabulary, device=options.device, requires_grad=True)
        labels = torch.zeros(tokens, dtype=torch.long, device=options.device)
        return lambda: torch.autograd.grad(
            torch.nn.functional.cross_entropy(logits, labels), logits
        )

    gemm, (heads, length, size) = 2.0 * tokens * hidden * wide, attention_shape(options)
    kernels: dict[str, tuple[Callable[[], Callable[[], object]], float, str]] = {
        "GEMM forward": (lambda: lambda: x_TD @ w_VD.T, gemm, "TFLOP/s"),
        "GEMM input gradient": (lambda: lambda: y_TV @ w_VD, gemm, "TFLOP/s"),
        "GEMM weight gradient": (lambda: lambda: y_TV.T @ x_TD, gemm, "TFLOP/s"),
        "addmm into float32": (lambda: addmm, gemm, "TFLOP/s"),
        "fp8 GEMM with its casts": (lambda: fp8, gemm, "TFLOP/s"),
        "attention, causal half": (
            lambda: attention(options),
            7.0 * heads * length**2 * size,
            "TFLOP/s",
        ),
        "copy, read and written": (copy, 8.0 * numel, "TB/s"),
        "fused AdamW, 28 bytes each": (adamw, 28.0 * numel, "TB/s"),
        "cross-entropy, 12 bytes each": (cross_entropy, 12.0 * tokens * vocabulary, "TB/s"),
    }
    for name, (make, work, unit) in kernels.items():
        try:
            each_s = seconds(make(), options.device, options.tiny)
            yield {"name": name, "ms": round(each_s * 1e3, 4), unit: round(work / each_s / 1e12, 4)}
        except Exception as error:  # a kernel that this torch or device lacks is a result
            yield {
                "name": name,
                "reason": f"{type(error).__name__}: {str(error).splitlines()[0][:150]}",
            }


def command(
    words: Sequence[str],
    name: str,
    last_lines: int = 1,
    limit_s: float | None = None,
    **environ: str,
) -> Row:
    """Run a program of the checkout; return its exit code and the end of its output."""
    with subprocess.Popen(
        [sys.executable, *words],
        cwd=ROOT,
        env=os.environ | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            output, reason = process.communicate(timeout=limit_s)[0], ""
        except subprocess.TimeoutExpired:
            process.kill()
            output, reason = process.communicate()[0], f"stopped after {limit_s:.0f} s"
    print(output, flush=True)
    lines = output.strip().splitlines()
    row: Row = {"name": name, "exit_code": process.returncode, "output": lines[-last_lines:]}
    if process.returncode:
        row["reason"] = (
            reason or f"exit code {process.returncode}: {lines[-1][:150] if lines else 'no output'}"
        )
    return row


def tests(options: argparse.Namespace) -> Rows:
    """Yield the result of the CUDA tests; on a CPU that of the tests that also run there,
    of a single one if tiny.
    """
    only = (
        ["tests/gpu/test_options.py", "-k", "nan_is_named"]
        if options.device == "cpu"
        else ["tests/gpu"]
    )
    # names, should a deadline cut it off
    words = ["-m", "pytest", "-vv", "-m", "gpu", "-p", "no:cacheprovider", *only]
    # a --basetemp for tests that run this script would remove its own output
    yield command(
        words, "pytest -m gpu", 20, MESHWRIGHT_GPU_TESTS=options.device, PYTEST_ADDOPTS=""
    )


def memory(options: argparse.Namespace) -> Rows:
    """Yield the peak that a dry run predicts for each model of the race,
    then the one measured in a process.
    """
    from gpu_contenders import SHAPES
    from gpu_memory import predicted_bytes, row

    for job in list(SHAPES)[:1] if options.tiny else list(SHAPES):
        start_s = time.perf_counter()
        predicted = predicted_bytes(job, options.device, options.tiny)
        spent_s = round(time.perf_counter() - start_s, 1)
        yield {
            "name": f"{job}: dryrun",
            "predicted_gib": round(predicted / 2**30, 6),
            "prediction_s": spent_s,
        }
        path = options.out / f"memory-{job}.json"
        path.unlink(missing_ok=True)
        done = command(
            program("gpu_memory", options, job, path), f"{job}: measured", limit_s=CONTENDER_S
        )
        yield row(job, predicted, json.loads(path.read_text())) if path.exists() else done


def program(name: str, options: argparse.Namespace, job: str, path: Path) -> list[str]:
    """Return the command line of a benchmark of one job on the chosen device."""
    words = [f"benchmarks/{name}.py", "--job", job, "--out", str(path), "--device", options.device]
    return words + (["--tiny"] if options.tiny else [])


def race(options: argparse.Namespace) -> Rows:
    """Yield the rows of each contender of gpu_race.py, one process for each;
    the most important model comes first.
    """
    from gpu_contenders import CONTENDERS, SHAPES

    for job in list(SHAPES)[:1] if options.tiny else SHAPES:
        first_loss = 0.0
        for contender in [each for each in CONTENDERS if not (options.tiny and "compiled" in each)]:
            path = options.out / f"race-{job}-{contender}.json"
            path.unlink(missing_ok=True)
            words = [*program("gpu_race", options, job, path), "--contender", contender]
            done = command(words, f"{job}: {contender}", limit_s=CONTENDER_S)
            rows = json.loads(path.read_text()) if path.exists() else []
            if rows:  # the first row's weights are those drawn at the start
                first_loss = first_loss or rows[0]["first_loss"]
                if abs(rows[0]["first_loss"] - first_loss) > SAME_LOSS * first_loss:
                    rows[0]["reason"] = f"the first loss of the first contender is {first_loss:.4f}"
            yield from rows
            if "reason" in done:
                yield done


def predict(options: argparse.Namespace) -> Rows:
    """Yield the rates of ``calibrate`` on this device,
    then predicted and measured step times of the race.
    """
    from gpu_contenders import SHAPES
    from gpu_predict import hardware_of, rows

    from meshwright_plan.planner.calibrate import to_toml

    found = hardware_of(options.device, options.tiny)
    (options.out / "hardware.toml").write_text(to_toml(found))
    shares = ("memory_bytes_per_s", "product_share", "attention_share", "attention_backward_share")
    yield {"name": f"calibrate: {found.name}"} | {
        key: float(f"{getattr(found, key):.4g}") for key in shares
    }
    names = list(SHAPES)[:1] if options.tiny else list(SHAPES)
    yield from rows(names, options.device, options.tiny, found, options.out / "race.json")


def one_rank(options: argparse.Namespace) -> Rows:
    """Yield compute time and memory of one rank of each layout of gpu_one_rank.py,
    a process for each.
    """
    from gpu_one_rank import LAYOUTS

    for layout in LAYOUTS:
        path = options.out / f"one_rank-{layout}.json"
        path.unlink(missing_ok=True)
        done = command(program("gpu_one_rank", options, layout, path), layout, limit_s=CONTENDER_S)
        yield json.loads(path.read_text()) if path.exists() else done


def shared(options: argparse.Namespace) -> Rows:
    """Yield the losses of layouts of two ranks on one device;
    those that are not of one rank have a reason.
    """
    from gpu_shared import LAYOUTS

    expected: list[float] = []
    for layout in LAYOUTS:
        path = options.out / f"shared-{layout}.json"
        path.unlink(missing_ok=True)
        row = command(program("gpu_shared", options, layout, path), layout, limit_s=CONTENDER_S)
        if path.exists():
            row = json.loads(path.read_text())
            losses = row["losses"]
            expected = expected or losses
            if any(abs(a - b) > SAME_LOSS * b for a, b in zip(losses, expected, strict=True)):
                row["reason"] = f"the losses of one rank are {expected}"
        yield row


STAGES = {
    "facts": facts,
    "ceilings": ceilings,
    "tests": tests,
    "memory": memory,
    "race": race,
    "predict": predict,
    "one_rank": one_rank,
    "shared": shared,
}


def run_stage(options: argparse.Namespace) -> None:
    """Run one stage in this process; write its rows after each."""
    rows: list[Row] = []
    for row in STAGES[options.stage](options):
        rows.append(row)
        write_atomic(options.out / f"{options.stage}.json", rows)


def rows_of(stage: str, deadline_s: float, options: argparse.Namespace) -> list[Row]:
    """Run a stage as a process until its deadline; return its rows,
    the last with the reason if it did not end well.
    """
    path = options.out / f"{stage}.json"
    path.unlink(missing_ok=True)
    words = [
        sys.executable,
        __file__,
        "--stage",
        stage,
        "--device",
        options.device,
        "--out",
        str(options.out),
    ]
    words += ["--tiny"] if options.tiny else []
    with (options.out / f"{stage}.log").open("w") as log:
        process = subprocess.Popen(
            words, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(timeout=deadline_s)
            reason = f"exit code {code}, see {stage}.log" if code else ""
        except subprocess.TimeoutExpired:
            reason = f"stopped at its deadline of {deadline_s:.0f} s"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    rows: list[Row] = json.loads(path.read_text()) if path.exists() else []
    if reason:
        rows.append({"name": stage, "reason": reason})
        write_atomic(path, rows)
    return rows


def main(argv: Sequence[str]) -> int:
    """Run the stages; return 0 if each row is a measurement, 1 if one is a reason."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stages", default=",".join(SHARES))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--tiny", action="store_true", help="toy sizes: exercises the code, measures nothing"
    )
    parser.add_argument("--stage", choices=list(SHARES), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.stage:
        run_stage(options)
        return 0
    stages = options.stages.split(",")
    if unknown := set(stages) - set(SHARES):
        parser.error(
            f"no stage is named {', '.join(sorted(unknown))}; the stages are {', '.join(SHARES)}"
        )
    end_s, lines, failed = time.monotonic() + 60 * options.minutes, [], False
    for i, stage in enumerate(stages):
        share = SHARES[stage] / sum(SHARES[each] for each in stages[i:])
        for row in rows_of(stage, max(1.0, share * (end_s - time.monotonic())), options):
            failed = failed or "reason" in row
            numbers = "  ".join(
                f"{key} {value}" for key, value in row.items() if key not in ONLY_IN_JSON
            )
            lines.append(f"{stage:10} {row['name']:32} {numbers}")
            print(lines[-1], flush=True)
    (options.out / "table.txt").write_text("\n".join(lines) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
