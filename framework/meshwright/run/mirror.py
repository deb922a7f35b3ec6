"""Observer that mirrors every step in host memory, for a recovery without a lost step."""

from __future__ import annotations

from pathlib import Path

from meshwright.checkpoint import shard_name
from meshwright.checkpoint.memory import SLOTS, MirrorWriter
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
        self._is_off = False
        self._num_first = len(SLOTS)

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
        problem = ""
        if not self._is_off:
            try:
                self._writer.write(head, saved_pieces(parts, self._saves_frozen))
            except OSError as error:
                problem = f"{error.strerror} on rank {parts.mesh.rank}"
        if self._num_first:  # files are laid out in the first write to each slot
            self._num_first -= 1
            self._agree(parts, problem)

    def _agree(self, parts: Parts, problem: str) -> None:
        """Switch the mirror off on all ranks if one cannot write. Collective; blocks."""
        problems = [each for each in parts.mesh.world.gather_objects(problem) if each]
        if problems and not self._is_off:
            self._is_off = True
            self._writer.clear()
            if parts.mesh.rank == 0:
                print_warning(
                    f"steps are not mirrored in memory any more: {problems[0]}. The run continues; a"
                    " rank that dies costs the steps since the last checkpoint"
                )
