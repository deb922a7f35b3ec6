"""A pipeline schedule of one's own: breadth-first (Lamy-Poirier 2023),
all micro-batches of a stage before the next.
"""


def breadth_first(pp, chunks, num_stages):
    """Return the actions of each pipeline rank; messages,
    gradient reduction and the optimizer step are added.
    """

    def row(rank):
        stages = range(rank, num_stages, pp)
        forwards = [f"{stage}F{m}" for stage in stages for m in range(chunks)]
        backwards = [f"{stage}B{m}" for stage in reversed(stages) for m in range(chunks)]
        return forwards + backwards

    return [row(rank) for rank in range(pp)]
