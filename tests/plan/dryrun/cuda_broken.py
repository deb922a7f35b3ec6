"""The process of ``tests.support.cuda`` in a framework that leaves out one wait: ``python -m ...
LIBRARY``.

It reads lines of a fault, a rank and a configuration, and writes one JSON object for each.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.system.process import leave
from tests.support.cuda.library import load_library


def leave_out(group: str, operation: str) -> Callable[[Any], None]:
    """Handles of these collectives do not make the stream wait."""

    def apply(patch: Any) -> None:
        from meshwright.mesh.handles import CollectiveHandle

        wait = CollectiveHandle.wait

        def waiting(handle: CollectiveHandle) -> None:
            if (
                handle.group is not None
                and handle.group.name == group
                and handle.operation.startswith(operation)
            ):
                handle.work = None
            wait(handle)

        patch.setattr(CollectiveHandle, "wait", waiting)

    return apply


def transfers(patch: Any) -> None:
    """Received values are used at once."""
    from meshwright.mesh.handles import TransferHandle

    patch.setattr(TransferHandle, "wait", lambda handle: None)


def early_receives(patch: Any) -> None:
    """Received values are used at once; sends are waited for."""
    from meshwright.mesh.handles import TransferHandle

    wait = TransferHandle.wait
    patch.setattr(TransferHandle, "wait", lambda handle: wait(handle) if handle.sends else None)


def weights(patch: Any) -> None:
    """Forward does not wait for the weights of its layer."""
    from meshwright.data_parallel.replica import BucketReplica

    patch.setattr(BucketReplica, "wait_for_layer", lambda replica, layer: None)
    patch.setattr(BucketReplica, "wait_for_weights", lambda replica: None)


def reductions(patch: Any) -> None:
    """The optimizer does not wait for the sums over the replicas."""
    from meshwright.data_parallel.buckets import Bucket

    patch.setattr(Bucket, "wait", lambda bucket: None)


def copy_begins_early(patch: Any) -> None:
    """The copy of a gradient to the host does not wait for the stream that computes it."""
    import torch

    patch.setattr(torch.cuda.Stream, "wait_stream", lambda stream, other: None)


def copy_before_the_sum(patch: Any) -> None:
    """The copy of a gradient to the host does not wait for its reduction."""
    from meshwright.mesh.handles import CollectiveHandle

    patch.setattr(CollectiveHandle, "join", lambda handle: None)


def copy_not_awaited(patch: Any) -> None:
    """The optimizer in host memory does not wait for the copy."""
    import torch

    patch.setattr(torch.cuda.Event, "synchronize", lambda event: None)


def offloaded_gradients(patch: Any) -> None:
    """ZeRO-3 with offload adds gradients in host memory before they have arrived there."""
    from meshwright.data_parallel.fsdp import FsdpLayers

    patch.setattr(FsdpLayers, "wait_for_host_copies", lambda layers: None)


def regions(patch: Any) -> None:
    """Sums of tensor-parallel regions are posted and not awaited."""
    import torch.distributed as dist

    all_reduce = dist.all_reduce
    patch.setattr(
        dist,
        "all_reduce",
        lambda *args, **options: all_reduce(*args, **options | {"async_op": True}),
    )


def unsharded(patch: Any) -> None:
    """ZeRO-3: a layer does not wait for its gathered weights."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    wait_for_unshard = FSDPParamGroup.wait_for_unshard

    def waiting(group: Any) -> None:
        import torch

        with torch.cuda.stream(torch.cuda.Stream()):  # waits in the name of another stream
            wait_for_unshard(group)

    patch.setattr(FSDPParamGroup, "wait_for_unshard", waiting)


def activations_early(patch: Any) -> None:
    """Saved tensors are copied to the host before they are computed."""
    import torch

    patch.setattr(torch.cuda.Stream, "wait_stream", lambda stream, other: None)


def activations_return_late(patch: Any) -> None:
    """Backward uses saved tensors before they are back on the device."""
    from meshwright.pipeline.offload_copies import HostCopies

    patch.setattr(HostCopies, "finish_in", lambda copies, stored: None)


def activations_return_early(patch: Any) -> None:
    """Saved tensors return before their copies to the host are complete."""
    from meshwright.pipeline.offload_copies import HostCopies

    patch.setattr(HostCopies, "post_in", no_waits(HostCopies.post_in))
    patch.setattr(HostCopies, "finish_out", no_waits(HostCopies.finish_out))


def no_waits(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function in which no stream waits for an event."""

    def calling(*args: Any) -> Any:
        import torch

        stream: Any = torch.cuda.Stream
        waits, stream.wait_event = stream.wait_event, lambda stream, event: None
        try:
            return function(*args)
        finally:
            stream.wait_event = waits

    return calling


def nothing(patch: Any) -> None:
    """All waits are there."""


FAULTS: dict[str, Callable[[Any], None]] = {
    "gradients, ZeRO-0": leave_out("dp", "all-reduce"),
    "gradients, ZeRO-1": leave_out("dp", "reduce-scatter"),
    "gradients, ZeRO-2": leave_out("dp", "reduce-scatter"),
    "gradients across shard groups": leave_out("dp_replicate", "all-reduce"),
    "gradients over tp": leave_out("tp", "all-reduce"),
    "gradients of tied weights": leave_out("tied", "all-reduce"),
    "all reductions": reductions,
    "step's sums": leave_out("world", "all-reduce"),
    "weights": weights,
    "messages": transfers,
    "receives that are posted ahead": early_receives,
    "gathered weights, ZeRO-3": leave_out("dp", "all-gather"),
    "unsharded weights, ZeRO-3": unsharded,
    "gradients, ZeRO-3": leave_out("dp", "reduce-scatter"),
    "offload: copy before backward": copy_begins_early,
    "offload: copy before the sum": copy_before_the_sum,
    "offload: update before the copy": copy_not_awaited,
    "offload, ZeRO-3: sum before the copy": offloaded_gradients,
    "activations: copy before they are computed": activations_early,
    "activations: use before they are back": activations_return_late,
    "activations: return before the copy": activations_return_early,
    "regions": regions,
    "column: gradient of the input": leave_out("tp", "all-reduce"),
    "column: gathered input": leave_out("tp", "all-gather"),
    "column: gradient of a part of the sequence": leave_out("tp", "reduce-scatter"),
    "keys of a group of heads": leave_out("cp", "all-gather"),
    "gradients of keys of a group of heads": leave_out("cp", "reduce-scatter"),
    "heads of all tokens": leave_out("cp", "all-to-all"),
    "nothing": nothing,
}


def main(library: str) -> None:
    """Run the ranks."""
    load_library(Path(library))
    from tests.support.cuda.streams import Streams
    from tests.support.cuda.stubs import HostWaits, install

    waits, streams = HostWaits(), Streams()
    install(waits, streams)
    import pytest

    from meshwright.config import parse
    from tests.support.cuda.rank import check_rank

    for line in sys.stdin:
        fault, rank, config = line.split("\t")
        with pytest.MonkeyPatch.context() as patch:
            FAULTS[fault](patch)
            print(
                json.dumps(check_rank(parse(config), int(rank), waits, streams)._asdict()),
                flush=True,
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
    leave(0)
