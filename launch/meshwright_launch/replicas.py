"""Numbers of replicas with which a run on fewer or more nodes goes on (``launch.min_dp``).

    nodes that are left     hold a number of ranks
    largest dp              whose ranks fit there, with which the configuration is valid, and which keeps the global
                            batch: the same samples in each step, in more or fewer micro-batches

The layout with another dp is that of the same command with ``--parallel.dp``: all rules of a configuration and of
its blueprint decide. pp, cp, tp, ep, shard_factor and micro_batch_size stay. No torch at import.
"""

from __future__ import annotations

from typing import NamedTuple

from meshwright.config import RunConfig, load_saved, resolve
from meshwright.errors import UserError
from meshwright.mesh import Grid, check_placement, nodes_of
from meshwright_launch.node_place import NodePlace

MAX_PROBLEMS = 3
"""Numbers of replicas whose problems a message has."""


class NoReplicas(Exception):
    """No dp is possible on the nodes that are left. The message has the numbers."""


class Replicas(NamedTuple):
    """Layout with a number of replicas."""

    config: RunConfig
    """Resolved."""

    @property
    def dp(self) -> int:
        """Number of data-parallel replicas."""
        return Grid.of(self.config.parallel.degrees).dp

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return Grid.of(self.config.parallel.degrees).size

    def describe_change(self, other: Replicas) -> str:
        """Return the numbers that another layout has in place of these, such as ``dp 4 -> 2, chunks 2 -> 4``."""
        before, after = self._numbers(), other._numbers()
        return ", ".join(
            f"{name} {before[name]} -> {after[name]}"
            for name in before
            if before[name] != after[name]
        )

    def _numbers(self) -> dict[str, int | None]:
        return {"dp": self.dp, "chunks": self.config.batch.chunks}


def with_ranks(config: RunConfig, num_ranks: int) -> RunConfig:
    """Return the configuration resolved for a number of ranks. Of one that was resolved for another
    number, dp and chunks change, and the global batch and micro-batches stay.

    Raises:
        ConfigError: it is not valid with this dp.
    """
    if config.launch.processes in ("auto", num_ranks):
        return resolve(config, num_ranks)
    batch = config.batch
    changes = {
        "parallel.dp": num_ranks // config.parallel.ranks_per_batch,
        "launch.processes": num_ranks,
        "batch.micro_batch_size": batch.micro_batch_size,
        "batch.global_batch": batch.global_batch,
        "batch.chunks": "none",
    }
    words = [f"--{key}={value}" for key, value in changes.items()]
    return resolve(load_saved(config.model_dump(mode="json"), words, "the run"), num_ranks)


class ReplicaCounts:
    """Numbers of replicas of a run, as it is configured or fewer. Each is checked once."""

    def __init__(self, config: RunConfig, place: NodePlace) -> None:
        """Begin with the configured number alone. ``config``: resolved."""
        self.configured = Replicas(config)
        self._per_node = place.ranks_per_node
        self._least = config.launch.min_dp
        self._checked: dict[int, Replicas | str] = {self.configured.dp: self.configured}
        """dp -> its layout, or the reason why there is none."""

    def num_nodes(self, replicas: Replicas) -> int:
        """Return the number of nodes that a layout needs."""
        return -(-replicas.num_ranks // self._per_node)

    def find_most(self, num_nodes: int, above: int = 0) -> Replicas:
        """Return the layout with the largest dp above a number that these nodes hold.

        Raises:
            NoReplicas: there is none.
        """
        of_one = self.configured.config.parallel.ranks_per_batch
        most = min(num_nodes * self._per_node // of_one, self.configured.dp)
        problems: list[str] = []
        for dp in range(most, max(self._least - 1, above), -1):
            found = self._check(dp)
            if isinstance(found, Replicas):
                return found
            problems.append(f"; dp {dp}: {found}")
        raise NoReplicas(
            f"{num_nodes} node{'s' * (num_nodes != 1)} of {self._per_node} rank"
            f"{'s' * (self._per_node != 1)} hold at most dp {most} x"
            f" {self.configured.config.parallel.named_ranks}, and launch.min_dp = {self._least}"
            + "".join(problems[:MAX_PROBLEMS])
        )

    def _check(self, dp: int) -> Replicas | str:
        """Return the layout of a dp, or the reason why there is none."""
        if dp not in self._checked:
            try:
                self._checked[dp] = self._resolve(dp)
            except UserError as error:
                first_line = error.message.splitlines()[0].removeprefix("command line: ")
                self._checked[dp] = first_line.partition(";")[0]
            except Exception as error:
                # of the user's builder: no reason to end a run that can go on
                first_line = (str(error).splitlines() or [""])[0]
                self._checked[dp] = f"{type(error).__name__}: {first_line}"
        return self._checked[dp]

    def _resolve(self, dp: int) -> Replicas:
        from meshwright.blueprint import draw_blueprint

        config = self.configured.config
        found = Replicas(with_ranks(config, dp * config.parallel.ranks_per_batch))
        blueprint = draw_blueprint(found.config)
        nodes = nodes_of(self.num_nodes(found), self._per_node)[: found.num_ranks]
        across = {
            key: getattr(config.parallel, key) for key in ("tp_across_nodes", "ep_across_nodes")
        }
        check_placement(blueprint.grid, nodes, **across)
        return found
