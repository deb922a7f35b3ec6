"""What the tests of CUDA run in processes of their own:
CUDA and the test session's forked ranks do not mix.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import tempfile
import threading
import warnings
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.build import build
from meshwright.config import RunConfig
from meshwright.current import CurrentMicrobatch
from meshwright.data_parallel.replica import BucketReplica
from meshwright.errors import UserError
from meshwright.mesh.device import peak_memory_bytes, pick_device
from meshwright.mesh.grid import Grid
from meshwright.mesh.mesh import close_mesh, open_mesh
from meshwright.optimizer import read_states, restore_states
from meshwright.parts import Parts, StepFeed
from meshwright.run.directory import run_directory
from meshwright.run.resume import resume
from meshwright.schedule.action import Action, actions_of
from meshwright.schedule.analysis import Span
from meshwright.seeding import SeededDropout
from meshwright.step import take_step
from meshwright.tensor_parallel import megatron
from meshwright.verify.rank import open_verify_source, run_layout
from meshwright.watch.drift import bits, replicated_tensors
from tests.end_to_end.driving import save, tensors
from tests.framework.watch.spoiling import Spoil, spoil


def parts_of(config: RunConfig) -> Parts:
    """One rank's parts, fed with random tokens."""
    parallel = config.parallel
    mesh = open_mesh(
        Grid.of(parallel.degrees), config.train.device, share_devices=config.launch.share_devices
    )
    return build(config, mesh, (open_verify_source(config, random_tokens=True), {}))


def dropout_mask(
    device: str, samples: list[int], shape: tuple[int, ...], shard: tuple[int, int, int] | None
) -> Tensor:
    """Return the mask, on CPU, as drawn on the device."""
    dropout = SeededDropout(
        0.3,
        1234,
        "block0.attention.dropout",
        CurrentMicrobatch(torch.tensor(samples, device=device)),
    )
    dropout.shard = shard
    return dropout.to(device).mask(torch.Size((len(samples), *shape)), torch.device(device)).cpu()


def timeline(config: RunConfig) -> tuple[list[Action], list[Span]]:
    """Return the actions of a row, in order, and when each ran, in a step that is not the first."""
    parts = parts_of(config)
    take_step(parts)
    for replica in parts.replicas.values():
        replica.begin_step()
    result = parts.executor.run(StepFeed(parts, parts.source, parts.state.samples_seen))
    row = parts.blueprint.schedule.rows[parts.mesh.at.pp_rank]
    return [action for item in row for action in actions_of(item)], result.times.spans


class Stepped(NamedTuple):
    """An optimizer on the device before and after it was given its own state back."""

    fused: bool
    state_on_device: bool
    steps: int
    losses: list[float]
    losses_again: list[float]


def restored_optimizer(config: RunConfig) -> Stepped:
    """Take two steps, then two more, and those two once more
    from the states and weights between.
    """
    parts = parts_of(config)
    for _ in range(2):
        take_step(parts)
    optimizer = parts.optimizer
    kept = [read_states(optimizer, i) for i in range(len(optimizer.shards))]
    moments = [{name: state.clone() for name, state in states.items()} for states, _ in kept]
    weights = [
        (bucket.flat.clone(), bucket.master.clone())
        for r in parts.replicas.values()
        for bucket in r.buckets
    ]
    state = parts.state.step, parts.state.samples_seen
    losses = [take_step(parts).loss for _ in range(2)]
    parts.state.step, parts.state.samples_seen = state
    buckets = [bucket for replica in parts.replicas.values() for bucket in replica.buckets]
    for i, bucket in enumerate(buckets):
        bucket.flat.copy_(weights[i][0])
        bucket.master.copy_(weights[i][1])
        restore_states(optimizer, i, moments[i], kept[i][1])
    states = list(optimizer.inner.state.values())
    return Stepped(
        all(group["fused"] for group in optimizer.inner.param_groups),
        all(value.device == parts.mesh.device for state in states for value in state.values()),
        kept[0][1],
        losses,
        [take_step(parts).loss for _ in range(2)],
    )


def losses(config: RunConfig, steps: int, *, deterministic: bool = False) -> list[float]:
    """Of each step. ``deterministic``: with torch's slower kernels that add in one order."""
    if deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        parts = parts_of(config)
        return [take_step(parts).loss for _ in range(steps)]
    finally:
        torch.use_deterministic_algorithms(False)


def streams_of_hooks(device: str) -> tuple[bool, bool]:
    """(every hook of a gradient ran on the stream that the forward ran on,
    and on another thread).
    """
    layer = nn.Linear(8, 8, device=device)
    streams, threads = [], []

    def hook(parameter: Tensor) -> None:
        streams.append(torch.cuda.current_stream())
        threads.append(threading.get_ident())

    for parameter in layer.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    layer(torch.ones(2, 8, device=device)).sum().backward()
    same = all(stream == torch.cuda.current_stream() for stream in streams)
    return same and len(streams) == 2, all(thread != threading.get_ident() for thread in threads)


def weights_are_aligned(config: RunConfig) -> bool:
    """Return whether every parameter begins at a multiple of 16 bytes."""
    replicas: list[BucketReplica] = list(parts_of(config).replicas.values())
    buckets = [bucket for replica in replicas for bucket in replica.buckets]
    return all(
        place.member.parameter.data_ptr() % 16 == 0 for bucket in buckets for place in bucket.slots
    )


def peaks(config: RunConfig) -> tuple[int, int, int]:
    """(what the tracker is told, what torch says, bytes of weights, gradients and moments)."""
    torch.cuda.reset_peak_memory_stats()
    parts = parts_of(config)
    take_step(parts)
    elements = sum(
        bucket.numel for replica in parts.replicas.values() for bucket in replica.buckets
    )
    return peak_memory_bytes("cuda"), torch.cuda.max_memory_allocated(), 4 * 4 * elements


def device_under_srun(local_rank: int) -> torch.device:
    """Return what a rank takes that sees one GPU and is not the first of its node."""
    os.environ["SLURM_PROCID"] = str(local_rank)
    try:
        return pick_device("cuda", local_rank)
    finally:
        del os.environ["SLURM_PROCID"]


def device_for_megatron() -> tuple[object, object]:
    """Return what megatron-core is told to allocate on: by tensors on CPU, then by tensors on CUDA."""
    megatron.load_mappings(torch.device("cpu"))
    on_cpu = torch.cuda.current_device()
    megatron.load_mappings(torch.device("cuda", 0))
    return on_cpu, torch.cuda.current_device()


def findings_to_file(config: RunConfig, end: object) -> None:
    """One rank of a layout under the launcher: what verify's ranks report, in a file per rank."""
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    findings = run_layout(rank, int(os.environ["WORLD_SIZE"]), config.model_dump_json(), 4, True)
    Path(config.run.directory, f"{rank}.pickle").write_bytes(pickle.dumps(findings))
    dist.barrier()
    dist.destroy_process_group()


def measured_by_ranks(config: RunConfig, end: object) -> None:
    """One rank under the launcher: its timeline, in a file per rank."""
    rank = int(os.environ["RANK"])
    parts = parts_of(config)
    take_step(parts)
    for replica in parts.replicas.values():
        replica.begin_step()
    spans = parts.executor.run(StepFeed(parts, parts.source, parts.state.samples_seen)).times.spans
    Path(config.run.directory, f"{rank}.pickle").write_bytes(pickle.dumps(spans))
    close_mesh(parts.mesh)


class Drawing(nn.Linear):
    """Linear layer with a dropout of torch on one device alone."""

    device = ""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return functional.dropout(y, 0.1) if y.device.type == self.device else y


def drawing(device: str) -> nn.Sequential:
    """Embedding, a layer that draws on ``device``, and a head."""
    layer = Drawing(8, 8)
    layer.device = device
    return nn.Sequential(nn.Embedding(61, 8), layer, nn.Linear(8, 61))


def refusal(config: RunConfig) -> str:
    """Return what the first step of a model says that cannot be trained."""
    return refused_step(parts_of(config))


def refused_step(parts: Parts) -> str:
    """Return what a step says that is not taken."""
    try:
        take_step(parts)
    except UserError as error:
        return str(error)
    return ""


def saved_bits(config: RunConfig, steps: int) -> dict[str, str]:
    """Resume what ``run.directory`` holds, take steps and save;
    the hash of each tensor of the checkpoint.
    """
    directory = run_directory(config.run)
    parts = parts_of(config)
    resume(parts, directory, lambda text: None)
    for _ in range(steps):
        take_step(parts)
    saved = Path(tempfile.mkdtemp(dir=directory.parent))
    save(parts, str(saved))
    if steps:
        save(parts, str(directory))
    return {
        name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
        for name, tensor in tensors(saved).items()
    }


def hashes_agree(config: RunConfig) -> bool:
    """True if drift's hash of each tensor on the device is that of a copy on the CPU."""
    parts = parts_of(config)
    take_step(parts)
    copies = list(replicated_tensors(parts))
    return len(copies) > 2 and all(
        int(bits(each.tensor)) == int(bits(each.tensor.cpu())) for each in copies
    )


def poisoned(config: RunConfig) -> str:
    """Return the message of a step after a weight has become NaN."""
    parts = parts_of(config)
    take_step(parts)
    spoil(parts, Spoil("weight", 0, "block1.mlp.up.weight"))
    return refused_step(parts)


def host_waits(config: RunConfig) -> int:
    """Synchronising calls that torch counts in the second step, those of events excluded."""
    parts = parts_of(config)
    take_step(parts)
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        take_step(parts)
    torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(each.message) for each in found)
