"""Time to draw the initial weights of a stage: all on each rank, and divided over its replicas.

    python benchmarks/initial_weights.py [BLOCKS [RANKS]]

Model: BLOCKS blocks of Llama-3-8B's shapes without its vocabulary, bfloat16; RANKS data-parallel
replicas on this machine's CPU. Printed: elements, seconds until the last rank has its weights, and
CPU seconds of all ranks.
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

from meshwright.mesh import Grid
from meshwright.mesh.mesh import close_mesh, open_mesh
from meshwright.model.build import build_model, copy_module, materialise
from meshwright.parameters import ParameterInfo
from meshwright_launch.pool import RankPool

OPTIONS = {
    "vocab_size": 64,
    "hidden_size": 4096,
    "num_heads": 32,
    "num_kv_heads": 8,
    "ffn_size": 14336,
}


def draw(rank: int, world_size: int, blocks: int, together: bool) -> tuple[int, float, float]:
    """Return (elements, seconds, CPU seconds) of one rank."""
    mesh = open_mesh(Grid(dp=world_size), "cpu")
    options = {**OPTIONS, "num_layers": blocks, "max_sequence_length": 64}
    model = build_model("meshwright_models.llama:build", options, 0)
    infos = {
        name: ParameterInfo(name, tuple(each.shape))
        for name, each in model.layers.named_parameters()
    }
    layers = copy_module(model.layers, {})
    dist.barrier()
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    ranks = (mesh.replicas, mesh.tp, mesh.device) if together else None
    materialise(layers, model, infos, torch.bfloat16, mesh.device, ranks=ranks)
    cpu_s = time.process_time() - start_cpu_s
    dist.barrier()
    passed_s = time.perf_counter() - start_s
    close_mesh(mesh)
    return sum(each.numel() for each in layers.parameters()), passed_s, cpu_s


def main(blocks: int = 4, ranks: int = 2) -> None:
    """Print a line for each way."""
    with RankPool(ranks) as pool:
        for way, together in (("alone", False), ("together", True)):
            found = pool.run(draw, ranks, blocks, together, timeout_s=900)
            cpu_s = sum(cpu_s for _, _, cpu_s in found)
            print(
                f"{way:9} {found[0][0]:,} elements on {ranks} ranks: {found[0][1]:.1f} s,"
                f" {cpu_s:.1f} CPU s"
            )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
