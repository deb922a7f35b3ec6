"""Accuracy of the layer times that balance a pipeline: each layer's share,
predicted and measured on this CPU.

    python benchmarks/balance.py [CONFIG] [--section.key=value ...]       default: configs/demo.toml

Each layer runs forward and backward as a stage of its own does, first to last and back, in float32
on one thread; its gradients accumulate over micro-batches. Time is this process's CPU time, median
over the repeats, so that other work on the machine does not count. Then the layers are cut into
stages by each balance, and the slowest stage is compared with the mean, by the measured times. Last
come the rates that one thread reaches here: the figures behind
framework/meshwright/pipeline/plan/costs.py.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import date
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.config import load, resolve
from meshwright.model.build import build_model
from meshwright.model.meter import reference
from meshwright.pipeline.plan import LayerCost, count_layers, layer_weights, partition
from meshwright.pipeline.values import cross_entropy
from meshwright_plan.planner.balance import BALANCES, imbalance
from tests.support.plain import plain_layers

REPEATS = 60
WARM_UP = 5
NUM_STAGES = (2, 3, 4)


def measure(layers: nn.Sequential, tokens: Tensor, labels: Tensor) -> list[tuple[float, float]]:
    """Return the median CPU seconds of (forward, backward) of each layer, the last with the loss.
    Inputs are (B, S).
    """
    names = [name for name, _ in layers.named_children()]
    times: list[list[tuple[float, float]]] = [[] for _ in names]
    for p in layers.parameters():
        p.grad = torch.zeros_like(p)
    for repeat in range(WARM_UP + REPEATS):
        value, saved = tokens, []
        for layer in layers:
            given = value.detach().requires_grad_(value.is_floating_point())
            start = time.process_time()
            output = layer(given)
            if len(saved) == len(names) - 1:
                output = cross_entropy(output, labels)
            saved.append((given, output, time.process_time() - start))
            value = output
        gradient = torch.full_like(value, 1.0 / value.numel())
        for index in reversed(range(len(names))):
            given, output, forward_s = saved.pop()
            start = time.process_time()
            output.backward(gradient)
            del output
            if repeat >= WARM_UP:
                times[index].append((forward_s, time.process_time() - start))
            gradient = given.grad
    return [
        tuple(statistics.median(column) for column in zip(*each, strict=True)) for each in times
    ]  # type: ignore


def show(costs: Sequence[LayerCost], measured: Sequence[tuple[float, float]]) -> None:
    """Print predicted and measured shares side by side, and the imbalances that follow."""
    predicted_s, measured_s = sum(cost.time_s for cost in costs), sum(map(sum, measured))
    flops = sum(cost.forward.flops for cost in costs)
    print(
        f"{'layer':12}  {'FLOPs alone':>11}  {'predicted':>9}  {'measured':>8}  {'ms forward':>10} "
        f" {'backward':>8}"
    )
    for cost, (forward_s, backward_s) in zip(costs, measured, strict=True):
        print(
            f"{cost.name:12}  {cost.forward.flops / flops:11.1%}  {cost.time_s / predicted_s:9.1%} "
            f" {(forward_s + backward_s) / measured_s:8.1%}  {forward_s * 1e3:10.3f} "
            f" {backward_s * 1e3:8.3f}"
        )
    print(f"{'all':12}  predicted {predicted_s * 1e3:.1f} ms, measured {measured_s * 1e3:.1f} ms")
    print("\ndearest stage / mean, by measured times (by predicted)")
    print("balance     " + "".join(f"{f'{count} stages':>18}" for count in NUM_STAGES))
    by_measured, by_predicted = [sum(each) for each in measured], [cost.time_s for cost in costs]
    by = {"FLOPs": [cost.forward.flops for cost in costs]}
    by |= {balance: layer_weights(costs, balance) for balance in BALANCES} | {
        "measured": by_measured
    }
    for name, each in by.items():
        stages = [partition(each, count) for count in NUM_STAGES]
        shown = (
            f"{imbalance(by_measured, cut):10.3f} ({imbalance(by_predicted, cut):.3f})"
            for cut in stages
        )
        print(f"{name:12}{''.join(shown)}")


def reached(repeats: int = 15) -> None:
    """Print the rates of one thread, in far and near memory:
    the figures behind the CPU of meshwright/model/meter.
    """

    def median_s(run: Callable[[], Any]) -> float:
        run()
        times = []
        for _ in range(repeats):
            start = time.process_time()
            for _ in range(20):
                run()
            times.append((time.process_time() - start) / 20)
        return statistics.median(times)

    print()
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        a, b = torch.randn(512, 512, dtype=dtype), torch.randn(512, 512, dtype=dtype)
        print(
            f"product of 512 x 512 {dtype}:"
            f" {2 * 512**3 / median_s(partial(torch.matmul, a, b)) / 1e9:.0f} GFLOP/s"
        )
    for mebibytes in (1, 64):
        x = torch.randn(mebibytes * 64, 4096)
        for run in (torch.neg, torch.exp, partial(torch.softmax, dim=-1)):
            name = getattr(run, "__name__", "softmax")
            print(
                f"{name:8} of {mebibytes:2} MiB:"
                f" {2 * x.numel() * 4 / median_s(partial(run, x)) / 1e9:.1f} GB/s"
            )


def keep_freed_memory() -> None:
    """Make glibc, if there is one, keep freed memory. Otherwise the kernel may map and clear large
    tensors anew each time, or not, which makes twofold differences of a layer's time from run to
    run.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
        mallopt(-3, 2**30)  # M_MMAP_THRESHOLD


def main() -> None:
    words = sys.argv[1:]
    path = words.pop(0) if words and not words[0].startswith("--") else "configs/demo.toml"
    config = load(path, words)
    config = resolve(config)
    batch, length = config.batch.micro_batch_size, config.data.sequence_length
    assert batch is not None
    torch.set_num_threads(1)
    keep_freed_memory()
    print(f"python benchmarks/balance.py {shlex.join(sys.argv[1:])}")
    print(
        f"torch {torch.__version__}, {date.today()}, one thread, {REPEATS} repeats, load"
        f" {os.getloadavg()[0]:.1f}\n"
    )
    model = build_model(config.model.builder, config.model.options, config.run.seed)
    tokens = torch.randint(int(config.model.options["vocab_size"]), (batch, length))
    costs = count_layers(model.layers, tokens, tokens, reference("cpu", "float32"))
    model.current.sample_indices = torch.arange(batch)
    show(costs, measure(plain_layers(model, torch.float32).train(), tokens, tokens))
    reached()


if __name__ == "__main__":
    main()
