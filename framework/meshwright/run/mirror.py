"""Observer that mirrors every step in host memory, for a recovery without a lost step."""

from __future__ import annotations

from pathlib import Path

from meshwright.checkpoint import shard_name
from meshwright.checkpoint.memory import MirrorWriter
from meshwright.parts import Observer, Parts, StepEvent
from meshwright.run.base import fingerprint, saves_frozen
from meshwright.run.pieces import saved_pieces
from meshwright.run.tensors import agree_on_states, checkpoint_metadata
from meshwright.terminal.output import print_warning


class Mirror(Observer):
    """Mirror of one rank: after each step it copies what this rank would write to a checkpoint."""

    def __init__(self, parts: Parts, directory: Path, generation: int) -> None:
        """Mirror below ``directory``. Collective over all ranks; blocks. ``generation``: number of
        this launch of the ranks.
        """
        mesh = parts.mesh
        self._writer = MirrorWriter(directory, shard_name(mesh.grid, mesh.rank), generation)
        self._base = fingerprint(parts)  # of frozen weights: no step changes it
        self._saves_frozen = saves_frozen(parts)
        self._has_warned = False

    def after_step(self, parts: Parts, event: StepEvent) -> None:
        """Copy this rank's pieces of the step. Blocks; collective with ``optimizer.builder``."""
        if event.is_last:
            return
        head = checkpoint_metadata(
            parts.config,
            parts.state,
            parts.data_fingerprint,
            self._base,
            parts.stop_reason,
            agree_on_states(parts, checks=False),
        )
        try:
            self._writer.write(head, saved_pieces(parts, self._saves_frozen))
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                print_warning(
                    f"step {parts.state.step} is not mirrored in memory on rank {parts.mesh.rank}:"
                    f" {error.strerror}. The run continues; a rank that dies costs the steps since"
                    " the last mirror or checkpoint"
                )
