"""Check of the CUDA path without a GPU: ``python -m tests.support.cuda LIBRARY RESULTS``.

Ranks take steps on fake tensors of a stub CUDA device, which executes nothing.

Each line of stdin is a rank, a space and a resolved configuration in JSON. For each it adds one
``CudaStep`` as JSON to the file RESULTS, since the model may print.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from meshwright.system.process import leave
from tests.support.cuda.library import load_library


def main(library: str, results: str) -> None:
    """Run the ranks."""
    load_library(Path(library))
    from tests.support.cuda.streams import Streams
    from tests.support.cuda.stubs import HostWaits, install

    waits, streams = HostWaits(), Streams()
    install(waits, streams)  # before other modules take functions out of torch.cuda
    from meshwright.config import parse
    from tests.support.cuda.rank import check_rank

    for line in sys.stdin:
        rank, _, config = line.partition(" ")
        step = check_rank(parse(config), int(rank), waits, streams)
        with Path(results).open("a", encoding="utf-8") as file:
            file.write(json.dumps(step._asdict()) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
    # autograd's thread may still be freeing tensors: at interpreter shutdown it would abort
    leave(0)
