"""Processes that compute samples for the threads that read ahead (``data.processes``),
one for each thread.

    thread --job--> python -m meshwright.data.worker_main: dataset and collate function of the same
    configuration
           <-- (inputs, labels), or the error

A process ends with the rank: its pipe of jobs closes. One that dies ends the run with an error.
Only a rank and the process that it has started write to these pipes.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from multiprocessing.connection import Connection
from typing import Any

from torch import Tensor

from meshwright.config import RunConfig
from meshwright.errors import DataError, UserError

HIDDEN_DEVICES = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
"""Environment of a worker: no GPU, since those belong to the rank, and one thread."""


class WorkerProcess:
    """Process that turns a job (sample indices, or the raw samples of a stream) into (inputs,
    labels).
    """

    def __init__(self, config: RunConfig) -> None:
        """Start the process; it opens the dataset of the configuration itself."""
        down, jobs = os.pipe()
        results, up = os.pipe()
        environment = (
            os.environ | HIDDEN_DEVICES | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        )
        words = [sys.executable, "-P", "-m", "meshwright.data.worker_main", str(down), str(up)]
        self._process = subprocess.Popen(
            words, pass_fds=(down, up), env=environment, stdin=subprocess.DEVNULL
        )
        os.close(down)
        os.close(up)
        self._jobs = Connection(jobs, readable=False)
        self._results = Connection(results, writable=False)
        self._first: Any = config

    def __call__(self, job: Any) -> tuple[Any, Tensor]:
        """Return the samples of a job; blocks.

        Raises:
            DataError: the dataset or the collate function fails, or the process has died.
        """
        try:
            if self._first is not None:
                self._send(self._first)
                self._first = None
            self._send(job)
            answer = pickle.loads(self._results.recv_bytes())
        except (EOFError, OSError) as error:
            raise DataError(
                "MW-DATA-117",
                f"a process of data.workers has died (exit code {self._process.wait()}): its memory"
                " may have run out, or code of data.builder or data.collate ended it."
                " data.processes = false runs that code in threads",
            ) from error
        if isinstance(answer, UserError):
            raise answer
        if isinstance(answer, str):
            raise DataError("MW-DATA-118", f"a process of data.workers failed: {answer}")
        inputs, labels = answer
        return inputs, labels

    def _send(self, value: Any) -> None:
        try:
            message = pickle.dumps(value)
        except Exception as error:  # a raw sample of a stream may be anything
            raise DataError(
                "MW-DATA-119",
                "data.processes = true sends samples of a stream to the process that collates"
                f" them, and these cannot be pickled ({error}): yield plain values, or use"
                " data.processes = false",
            ) from error
        self._jobs.send_bytes(message)
