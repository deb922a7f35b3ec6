"""Configuration schema: one frozen pydantic model per section, in ``sections`` and ``training``.

tests/framework/config/test_every_key_is_read.py fails for a field without a reader. Units are in
the names. ``load`` makes a :class:`RunConfig` from a TOML file and overrides; ``resolve`` adds the
values that depend on the number of ranks. Error messages derive the allowed values from types and
bounds; ``description`` adds facts that those do not express.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.config.sections import Adapter, Batch, Data, Model, Parallel, Pipeline, Run, Section
from meshwright.config.training import (
    Checkpoint,
    Launch,
    LossScaling,
    Optimizer,
    Tracking,
    Train,
    Watch,
)


class RunConfig(Section):
    """Configuration of one run. Frozen; ``resolved.json`` in the run directory parses back
    to an equal object.
    """

    run: Run = Run()
    model: Model = Model()
    adapter: Adapter = Adapter()
    data: Data = Data()
    batch: Batch = Batch()
    parallel: Parallel = Parallel()
    pipeline: Pipeline = Pipeline()
    optimizer: Optimizer = Optimizer()
    loss_scale: LossScaling = LossScaling()
    train: Train = Train()
    checkpoint: Checkpoint = Checkpoint()
    watch: Watch = Watch()
    tracking: Tracking = Tracking()
    launch: Launch = Launch()

    def replace(self, **sections: Mapping[str, Any]) -> RunConfig:
        """Return a copy with other values, which are not validated: ``replace(train={"device":
        "cpu"})``.
        """
        changed = {
            name: getattr(self, name).model_copy(update=values) for name, values in sections.items()
        }
        return self.model_copy(update=changed)
