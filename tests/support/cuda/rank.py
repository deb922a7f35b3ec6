"""One rank's step on the stub CUDA device, and its findings."""

from __future__ import annotations

from collections import Counter

from meshwright.config import RunConfig
from meshwright.parts import Parts
from meshwright.step import take_step
from meshwright_plan.dryrun.fake_step import record_step
from tests.support.cuda.process import CudaStep
from tests.support.cuda.recorder import CudaRecorder
from tests.support.cuda.streams import Streams
from tests.support.cuda.stubs import HostWaits


def check_rank(config: RunConfig, rank: int, waits: HostWaits, streams: Streams) -> CudaStep:
    """Build a rank on the stub device and take two steps. Counts are of the second step,
    races of both.

    ``config``: resolved. Call it in a process that has loaded the library.
    """
    recorder = CudaRecorder(waits, streams)
    waits.noted.clear()
    streams.forget_accesses()
    first = launched = 0

    def step(parts: Parts) -> None:
        nonlocal first
        take_step(parts)
        first, recorder.num_from_autograd = recorder.now, 0
        recorder.off_device.clear()
        update = parts.optimizer.step

        def launch(learning_rate: float, gradient_factor: float) -> None:
            nonlocal launched
            launched = recorder.now
            update(learning_rate, gradient_factor)

        parts.optimizer.step = launch  # type: ignore[method-assign]
        take_step(parts)

    record_step(config, rank, None, recorder, "cuda:0", step)
    in_step = [(at, where) for at, where in waits.noted if at >= first]
    calls = [call for call in recorder.communication if call.at > first]
    return CudaStep(
        recorder.now - first,
        len(calls),
        recorder.num_from_autograd,
        recorder.off_device,
        dict(streams.races),
        dict(Counter(where for at, where in in_step if at < launched)),
        dict(Counter(where for at, where in in_step if at >= launched)),
    )
