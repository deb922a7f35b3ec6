"""Main program of a process of ``data.workers``:
python -m meshwright.data.worker_main JOBS_FD RESULTS_FD
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from meshwright.config import RunConfig
from meshwright.config.functions import error_place
from meshwright.data.dataset import DatasetSource
from meshwright.data.sources import open_sources
from meshwright.data.stream_source import StreamSource
from meshwright.errors import UserError
from meshwright.terminal.output import make_printable


def open_reader(config: RunConfig) -> Callable[[Any], Any]:
    """Open the dataset of the configuration;
    return the function that computes the samples of a job.
    """
    data = config.data.model_copy(update={"workers": 0, "processes": False})
    source = open_sources(config.model_copy(update={"data": data}))[0]
    assert isinstance(source, DatasetSource | StreamSource)
    return source.compute


def serve(jobs: Connection, results: Connection) -> None:
    """Compute jobs until their pipe closes. The first message is the configuration."""
    config, compute = pickle.loads(jobs.recv_bytes()), None
    while True:
        message = jobs.recv_bytes()
        try:
            compute = compute or open_reader(config)
            answer = compute(pickle.loads(message))
        except UserError as error:
            answer = error
        except BaseException as error:
            answer = f"{type(error).__name__}{error_place(error)}: {error}"
        results.send_bytes(pickle.dumps(answer))


if __name__ == "__main__":
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        # sent to the whole group: the rank decides, and its end closes the pipe
        signal.signal(each, signal.SIG_IGN)
    make_printable()
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, OSError):
        serve(
            Connection(int(sys.argv[1]), writable=False),
            Connection(int(sys.argv[2]), readable=False),
        )
    sys.stdout.flush()
    os._exit(0)  # not held up by threads of the dataset
