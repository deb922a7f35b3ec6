"""Record or replay of the routing of a run's training steps: the observer of ``train.routing``."""

from __future__ import annotations

from pathlib import Path

from meshwright.blueprint import Blueprint
from meshwright.config import batch_numbers
from meshwright.expert_parallel.plan import expert_names
from meshwright.expert_parallel.routing import (
    RankTokens,
    RoutingHooks,
    RoutingPlan,
    check_routers,
    path_of,
)
from meshwright.expert_parallel.routing_file import fingerprint_of
from meshwright.parts import Observer, Parts, StepEvent
from meshwright.terminal.output import print_warning

DIRECTORY = "routing"
"""Default subdirectory of the run's directory for a recording."""


def check_routing(blueprint: Blueprint) -> None:
    """Check that the model's routers can be recorded,
    if the configuration has them recorded or replayed.

    Raises:
        ConfigError: they cannot.
    """
    if blueprint.config.train.routing != "off":
        check_model(blueprint)


def check_model(blueprint: Blueprint) -> None:
    """Check that the model's routers can be recorded.

    Raises:
        ConfigError: they cannot.
    """
    model = blueprint.model
    check_routers(
        blueprint.config.model.builder, model.layers, expert_names(model.layers, model.plan)
    )


def hooks_of(parts: Parts, plan: RoutingPlan) -> RoutingHooks:
    """Return the hooks on the routers of this rank's stages."""
    adds = parts.mesh.at.tp_rank == 0 or parts.config.parallel.sequence
    drawn = parts.blueprint
    tokens = RankTokens(
        drawn.cut.length, parts.executor.current, parts.mesh.device, parts.mesh.world, adds
    )
    return RoutingHooks(
        plan, [stage.layers for stage in parts.executor.stages.values()], drawn.model.layers, tokens
    )


def step_key(step: int) -> str:
    """Return the name of the file of a step, from 1."""
    return f"step-{step:08d}"


class RoutingObserver(Observer):
    """Observer that records or replays the expert routing of each step. Rank 0 writes;
    a full disk is a warning.
    """

    def __init__(self, parts: Parts, directory: Path) -> None:
        config, train = parts.config, parts.config.train
        place = Path(train.routing_directory) if train.routing_directory else directory / DIRECTORY
        record, replay = (place, None) if train.routing == "record" else (None, place)
        fingerprint = fingerprint_of(
            config.model.builder,
            config.model.options,
            dict(parts.data_fingerprint),
            config.run.seed,
            config.data.sequence_length,
        )
        self._hooks = hooks_of(parts, RoutingPlan(record, replay, fingerprint))
        self._recorded = record if parts.mesh.rank == 0 else None
        self._key = ""

    def before_step(self, parts: Parts) -> None:
        """Begin the record or replay of the step."""
        seen = parts.state.samples_seen
        self._key = step_key(parts.state.step + 1)
        self._hooks.begin(
            self._key, range(seen, seen + batch_numbers(parts.config.batch, seen).global_batch)
        )

    def after_step(self, parts: Parts, event: StepEvent) -> None:
        """End the step's record or replay. Recording is collective over all ranks; blocks."""
        reason = self._hooks.end(self._key)
        if reason is not None:
            print_warning(
                f"the routing of {self._key} could not be written ({reason}); training goes on"
            )
        elif self._recorded is not None:
            parts.written_files.append(path_of(self._recorded, self._key))
