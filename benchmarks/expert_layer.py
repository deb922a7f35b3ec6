"""Time of a layer of experts relative to megatron-core's: same weights and tokens, in turns,
inside the same ranks.

    python benchmarks/expert_layer.py [--repeats 9] [--calls 8] [--only NAME] [--out FILE]

Router, dispatch, experts, combine: forward and backward of one layer in float32, experts sharded
over ep ranks. Both sides get the same weights, and must return the same output, input gradient and
weight gradients to rounding. megatron-core's side is its ``MoELayer``: alltoall dispatcher,
sequential experts (its grouped products need CUDA), no dropped tokens. Without CUDA it runs with
the few replacements of :func:`without_cuda`.

CPU seconds are those of all ranks. A ratio compares turns next to each other. Exit code 1: results
differ, or the bar is missed.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from report import Spread, conclude, environment, spread
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from meshwright.expert_parallel.plan import apply
from meshwright.mesh.grid import Grid
from meshwright.mesh.mesh import close_mesh, open_mesh
from meshwright.parameters import ParameterInfo
from meshwright.tensor_parallel.megatron import load_mappings
from meshwright_launch.pool import RankPool
from meshwright_models.experts import Experts, MoE
from meshwright_models.router import Router, Routing

BAR = 1.0
"""Largest median ratio of CPU seconds, ours / megatron-core's, that passes."""
ROUNDING = 2e-5
"""Largest difference of float32 results, relative to the largest value."""


class Case(NamedTuple):
    """One layer: its sizes, and the tokens of a rank."""

    hidden: int
    ffn: int
    num_experts: int
    top_k: int
    tokens: int
    ep: int


CASES = {
    "8 experts, top 2, ep 1": Case(256, 512, 8, 2, 1024, 1),
    "8 experts, top 2, ep 2": Case(256, 512, 8, 2, 1024, 2),
    "64 experts, top 8, ep 2": Case(256, 128, 64, 8, 512, 2),
    "64 experts, top 8, ep 4": Case(256, 128, 64, 8, 512, 4),
}


class Gradients(NamedTuple):
    """Results of one call: output and input gradient (N, D),
    and gradients of router and experts of this rank.
    """

    y: Tensor
    x: Tensor
    router: Tensor
    gate_up: Tensor  # (E/ep, 2F, D)
    down: Tensor  # (E/ep, D, F)


class Block(NamedTuple):
    """Calls of one side, in turn: seconds for each call of a rank."""

    cpu_s: float
    wall_s: float


def weights_of(case: Case) -> dict[str, Tensor]:
    """Draw the weights of the whole layer."""
    generator = torch.Generator().manual_seed(1)
    sizes = {
        "router": (case.num_experts, case.hidden),
        "gate_up": (case.num_experts, 2 * case.ffn, case.hidden),
        "down": (case.num_experts, case.hidden, case.ffn),
    }
    return {
        name: torch.randn(size, generator=generator) * size[-1] ** -0.5
        for name, size in sizes.items()
    }


def tokens_of(case: Case, rank: int) -> tuple[Tensor, Tensor]:
    """Draw the tokens of a rank and the gradient of its output, each (1, N, D)."""
    generator = torch.Generator().manual_seed(100 + rank)
    x, g = (torch.randn(1, case.tokens, case.hidden, generator=generator) for _ in range(2))
    return x, g


class Ours:
    """This framework's layer."""

    def __init__(self, case: Case, weights: dict[str, Tensor]) -> None:
        self.mesh = open_mesh(Grid(dp=case.ep, ep=case.ep), "cpu")
        router = Router(case.hidden, Routing(case.num_experts, case.top_k))
        moe = MoE(router, Experts(case.num_experts, case.hidden, case.ffn, activation=F.silu))
        with torch.no_grad():
            moe.router.weight.copy_(weights["router"])
            moe.experts.gate_up.copy_(weights["gate_up"])
            moe.experts.down.copy_(weights["down"])
        model = nn.Sequential(moe)
        infos = {name: ParameterInfo(name, tuple(p.shape)) for name, p in model.named_parameters()}
        apply("benchmark", model, {"0.experts": "experts"}, infos, self.mesh.ep)
        self.layer: Any = model[0]

    def call(self, x: Tensor, g: Tensor) -> Gradients:
        """Run forward and backward."""
        self.layer.zero_grad()
        x = x.detach().requires_grad_()
        y = self.layer(x)
        y.backward(g)
        assert x.grad is not None
        found = self.layer.router.weight, self.layer.experts.gate_up, self.layer.experts.down
        return Gradients(y.detach()[0], x.grad[0], *(weight.grad for weight in found))


def without_cuda() -> None:
    """Replace what megatron-core's layer takes from CUDA and Transformer Engine in any case.

    The current device, the stream of copies to the host and these copies, and a name that is
    missing without Transformer Engine.
    """
    load_mappings(torch.device("cpu"))  # the current device
    torch.cuda.Stream = _NoStream  # type: ignore[assignment,misc]
    torch.cuda.current_stream = lambda *device: _NoStream()  # type: ignore[assignment]
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    moe_utils.te_general_gemm = None
    token_dispatcher.maybe_move_tensor_to_cpu = _on_the_host


def _on_the_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Return the counts of an exchange in the form of a copy from a GPU."""
    return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor


class _NoStream:
    """Stream, and event, of a device that does everything at once."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _NoStream)

    def __hash__(self) -> int:
        return 0

    def wait_stream(self, other: object) -> None:
        """Return: nothing is pending."""

    def record_event(self) -> _NoStream:
        """Return an event that has passed."""
        return self

    def synchronize(self) -> None:
        """Return: nothing is pending."""


class Megatron:
    """megatron-core's layer, on the process group of all ranks."""

    def __init__(self, case: Case, weights: dict[str, Tensor]) -> None:
        from megatron.core import parallel_state
        from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
        from megatron.core.transformer.moe.moe_layer import MoELayer
        from megatron.core.transformer.transformer_config import TransformerConfig

        parallel_state.initialize_model_parallel(expert_model_parallel_size=case.ep)
        config = TransformerConfig(
            num_layers=1,
            hidden_size=case.hidden,
            num_attention_heads=4,
            num_moe_experts=case.num_experts,
            moe_router_topk=case.top_k,
            moe_ffn_hidden_size=case.ffn,
            moe_router_load_balancing_type="none",
            # softmax of the chosen logits: softmax of all, normalised
            moe_router_pre_softmax=False,
            moe_router_dtype="fp32",
            moe_token_dispatcher_type="alltoall",
            moe_grouped_gemm=False,
            expert_model_parallel_size=case.ep,
            add_bias_linear=False,
            gated_linear_unit=True,
            activation_func=F.silu,
            bias_activation_fusion=False,
            use_cpu_initialization=True,
            perform_initialization=False,
            params_dtype=torch.float32,
        )
        spec = get_moe_module_spec(
            use_te=False, num_experts=case.num_experts, moe_grouped_gemm=False
        )
        self.layer: Any = MoELayer(config, spec.submodules, layer_number=1)
        rank, each = dist.get_rank(), case.num_experts // case.ep
        with torch.no_grad():
            self.layer.router.weight.copy_(weights["router"])
            for number, expert in enumerate(self.layer.experts.local_experts, rank * each):
                expert.linear_fc1.weight.copy_(weights["gate_up"][number])
                expert.linear_fc2.weight.copy_(weights["down"][number])
        self.experts = self.layer.experts.local_experts

    def call(self, x: Tensor, g: Tensor) -> Gradients:
        """Run forward and backward. (1, N, D) is one token of N samples to megatron-core: (S, B,
        D).
        """
        self.layer.zero_grad()
        x = x.detach().requires_grad_()
        y, _ = self.layer(x)
        y.backward(g)
        assert x.grad is not None
        gate_up, down = (
            [getattr(e, name).weight.grad for e in self.experts]
            for name in ("linear_fc1", "linear_fc2")
        )
        return Gradients(
            y.detach()[0],
            x.grad[0],
            self.layer.router.weight.grad,
            torch.stack(gate_up),
            torch.stack(down),
        )


SIDES: dict[str, Callable[[Case, dict[str, Tensor]], Any]] = {
    "ours": Ours,
    "megatron-core": Megatron,
}


class RankResult(NamedTuple):
    """Measurements of one rank."""

    off: dict[str, float]
    """Largest difference of each result between the sides, relative to its largest value."""
    blocks: list[dict[str, Block]]
    """Turn of each side, for each repeat."""


def race(rank: int, world_size: int, case: Case, repeats: int, calls: int) -> RankResult:
    """Build both sides, compare their results, then time them in turns;
    the order reverses from repeat to repeat.
    """
    without_cuda()
    weights, given = weights_of(case), tokens_of(case, rank)
    sides = {name: build(case, weights) for name, build in SIDES.items()}
    found = {name: side.call(*given) for name, side in sides.items()}
    pairs = zip(Gradients._fields, found["ours"], found["megatron-core"], strict=True)
    off = {
        name: float((ours - theirs).abs().max() / theirs.abs().max())
        for name, ours, theirs in pairs
    }
    blocks = []
    for repeat in range(repeats):
        order = list(sides)[:: 1 if repeat % 2 == 0 else -1]
        blocks.append({name: _timed(sides[name], given, calls) for name in order})
    sides["ours"].mesh.world.barrier()
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    close_mesh(sides["ours"].mesh)
    return RankResult(off, blocks)


def _timed(side: Any, given: tuple[Tensor, Tensor], calls: int) -> Block:
    dist.barrier()
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    for _ in range(calls):
        side.call(*given)
    cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
    dist.barrier()
    return Block(cpu_s / calls, wall_s / calls)


def row_of(ranks: list[RankResult]) -> dict[str, Any]:
    """Return the ratios of one case over all ranks, and each side's CPU milliseconds per call."""
    cpu = [
        {name: sum(r.blocks[i][name].cpu_s for r in ranks) for name in SIDES}
        for i in range(len(ranks[0].blocks))
    ]
    wall = [
        {name: max(r.blocks[i][name].wall_s for r in ranks) for name in SIDES}
        for i in range(len(ranks[0].blocks))
    ]
    return {
        "cpu_ratio": spread([each["ours"] / each["megatron-core"] for each in cpu]),
        "wall_ratio": spread([each["ours"] / each["megatron-core"] for each in wall]),
        "cpu_ms": {name: spread([1e3 * each[name] for each in cpu]) for name in SIDES},
        "off": {name: max(rank.off[name] for rank in ranks) for name in Gradients._fields},
    }


def problems_of(name: str, row: dict[str, Any]) -> list[str]:
    """Return the reasons for which a case is invalid or misses the bar."""
    found = [
        f"{name}: {what} differs by {off:.1e} of its largest value"
        for what, off in row["off"].items()
        if not off < ROUNDING
    ]
    ratio: Spread = row["cpu_ratio"]
    return found + (
        [f"{name}: CPU {ratio} is above the bar of {BAR}"] if ratio.median > BAR else []
    )


def main() -> int:
    """Run, print and write; return 1 if there is a problem."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=CASES, action="append", help="may be given several times")
    parser.add_argument("--repeats", type=int, default=9, help="turns of each side (default 9)")
    parser.add_argument("--calls", type=int, default=8, help="calls in one turn (default 8)")
    parser.add_argument(
        "--out", type=Path, help="JSON file (default benchmarks/results/<date>-expert-layer.json)"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    without_cuda()
    import megatron.core.models.gpt.moe_module_specs
    import megatron.core.transformer.moe.moe_layer  # seconds: once, before the fork

    console = Console(width=140)
    command = shlex.join(["python", "benchmarks/expert_layer.py", *sys.argv[1:]])
    report: dict[str, Any] = {
        "environment": environment(command),
        "megatron_core": megatron.core.__version__,
        "cases": {},
    }
    report["repeats"], report["calls"], problems = arguments.repeats, arguments.calls, []
    table = Table(
        "layer",
        "CPU, ours / megatron-core",
        "wall",
        "CPU ms, ours",
        "megatron-core",
        "largest difference",
    )
    with RankPool(4) as pool:
        for name in arguments.only or CASES:
            case = CASES[name]
            row = row_of(
                pool.run(race, case.ep, case, arguments.repeats, arguments.calls, timeout_s=600)
            )
            report["cases"][name] = {"sizes": case, **row}
            cpu_ms = (f"{row['cpu_ms'][side].median:.1f}" for side in SIDES)
            table.add_row(
                name,
                str(row["cpu_ratio"]),
                str(row["wall_ratio"]),
                *cpu_ms,
                f"{max(row['off'].values()):.1e}",
            )
            problems += problems_of(name, row)
    console.print(table)
    report["problems"] = problems
    return conclude("expert-layer", arguments.out, report, console)


if __name__ == "__main__":
    sys.exit(main())
