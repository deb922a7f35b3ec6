"""Process that takes steps on the stub CUDA device: ``python -m meshwright_plan.dryrun.cuda LIBRARY RESULTS``.

Each line of stdin is a rank, a space and a resolved configuration in JSON. For each it adds one ``CudaStep`` as JSON to
the file RESULTS, since the model may print.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from meshwright.system.process import leave
from meshwright_plan.dryrun.cuda.library import load_library


def main(library: str, results: str) -> None:
    """Run the ranks."""
    load_library(Path(library))
    from meshwright_plan.dryrun.cuda.streams import Streams
    from meshwright_plan.dryrun.cuda.stubs import HostWaits, install

    waits, streams = HostWaits(), Streams()
    install(waits, streams)  # before other modules take functions out of torch.cuda
    from meshwright.config import parse
    from meshwright_plan.dryrun.cuda.rank import check_rank

    for line in sys.stdin:
        rank, _, config = line.partition(" ")
        step = check_rank(parse(config), int(rank), waits, streams)
        with Path(results).open("a", encoding="utf-8") as file:
            file.write(json.dumps(step._asdict()) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
    leave(0)  # autograd's thread may still be freeing tensors: at interpreter shutdown it would abort
