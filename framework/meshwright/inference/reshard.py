"""Offline resharding: rewrite a checkpoint as another layout would have saved it, without starting a rank.

    source                 layout                      target
    pp0-tp0 |####|         draw_blueprint              pp0-tp0 |##|  pp0-tp1 |##|
    pp1-tp0 |####|  read   for each tp and     write   pp1-tp0 |##|  pp1-tp1 |##|
                    ---->  ep rank: tensors,   ---->   ...
                           and their slices            manifest: the same step, the new layout

Resuming does not need it, since any layout reads any checkpoint. It is worthwhile for files that each rank of a layout
reads whole, or for one single file. Memory holds one tensor at a time, besides the contents of the file being written.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.blueprint import Blueprint
from meshwright.checkpoint import (
    CheckpointMetadata,
    CheckpointReader,
    Manifest,
    TensorKind,
    begin,
    find,
    open_checkpoint,
    publish,
    write_shard,
)
from meshwright.checkpoint.files import MAX_FILE_BYTES, final_directory, shard_names
from meshwright.config import (
    RunConfig,
    load_saved,
    parse,
    read_resolved,
    resolve,
    write_snapshot,
)
from meshwright.config.layout_keys import drop_unused_keys
from meshwright.errors import CheckpointError, ConfigError
from meshwright.inference.reshard_pieces import added_states, draw_blueprints, pieces, shard_tensors
from meshwright.mesh import Coordinates, Grid
from meshwright.run import RunLock
from meshwright.run.directory import check_own_directory
from meshwright.run.trust import changed_keys, check_trusted
from meshwright.system.atomic import make_directory_synced
from meshwright.system.bounded import real_path

MAY_CHANGE = ("parallel", "pipeline", "run")
"""Sections that an override may change: the layout of a run and its place on disk."""


class ReshardResult(NamedTuple):
    """Rewritten checkpoint."""

    path: Path
    manifest: Manifest
    config: RunConfig


def reshard(
    source: Path,
    out: Path,
    overrides: Sequence[str] = (),
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    trust_code: bool = False,
) -> ReshardResult:
    """Write the checkpoint ``source`` into the run directory ``out``, laid out by its configuration plus overrides.

    ``meshwright train out/config.toml`` can then continue the run in ``out``.

    Args:
        trust_code: import whatever builder the checkpoint names.

    Raises:
        CheckpointError: the source is damaged, or ``out`` cannot take the checkpoint.
        ConfigError: an override that changes more than the layout, or a layout that does not fit; a builder that is not
            meshwright's own and that no override names.
    """
    if out.name in ("", ".."):
        out = real_path(out)  # its last part becomes the run's name
    _check_place(source, out)
    with contextlib.ExitStack() as open_files:
        checkpoint = open_files.enter_context(_open_verified(source))
        saved = checkpoint.manifest
        config = _config_for_layout(saved.config, out, overrides, f"{source}/manifest.json", trust_code)
        _check_free(out, saved.step, config)
        grid = Grid(*config.parallel.degrees)
        blueprints = draw_blueprints(config, grid)
        is_fresh = not saved.state.get("optimizer_steps") and not any(
            kind != TensorKind.WEIGHTS for kind in checkpoint.kinds()
        )
        _check_names(checkpoint, blueprints[0], is_fresh)
        make_directory_synced(out)
        open_files.enter_context(RunLock(out))  # keeps a job of that directory from saving into it meanwhile
        temporary = begin(out, saved.step, secrets.token_hex(4))
        for rank, name in enumerate(shard_names(grid)):
            if name is None:
                continue
            blueprint = blueprints[rank % (grid.num_replicas * grid.tp)]
            shard = pieces(checkpoint, blueprint, grid.coordinates(rank), is_fresh)
            write_shard(temporary, name, shard, max_file_bytes=max_file_bytes)
            checkpoint.close()  # unmap the files that this shard was read from
        head = CheckpointMetadata(
            step=saved.step,
            samples_seen=saved.samples_seen,
            seed=saved.seed,
            config=config.model_dump(mode="json"),
            data_fingerprint=saved.data_fingerprint,
            state=saved.state,
        )
        path = final_directory(out, saved.step)
        manifest = publish(temporary, path, head)
        write_snapshot(out, config)  # last: with it but without a checkpoint, training would start from fresh weights
    return ReshardResult(path, manifest, config)


def _check_place(source: Path, out: Path) -> None:
    run, target = real_path(source).parent.parent, real_path(out)
    if target == run:
        raise CheckpointError(
            "MW-RESHARD-001",
            f"--out {out} is the run that the checkpoint is of: a published checkpoint is never written into; name "
            f"another directory",
        )
    if target.is_relative_to(real_path(source).parent):
        raise CheckpointError(
            "MW-RESHARD-002", f"--out {out} lies among the checkpoints of {run}: name a directory of its own"
        )
    if out.exists() and not out.is_dir():
        raise CheckpointError(
            "MW-RESHARD-003", f"--out {out} is a file: name a directory, new or of a run of the same configuration"
        )


def _open_verified(source: Path) -> CheckpointReader:
    """Open the source and verify all its bytes before any write: damaged data would get valid new hashes."""
    checkpoint = open_checkpoint(source)
    try:
        checkpoint.verify()
    except CheckpointError as error:
        raise CheckpointError(
            "MW-RESHARD-004",
            f"{error.message}\nnothing is written; choose another checkpoint (--step), or restore the file from a copy",
        ) from None
    return checkpoint


def _config_for_layout(
    saved: dict[str, Any], out: Path, overrides: Sequence[str], place: str, trust_code: bool
) -> RunConfig:
    """Return the saved configuration on the new layout, resolved, with ``out`` as the directory of its run."""
    before = parse(json.dumps(saved), place)
    changed = changed_keys(before, overrides)
    refused = sorted(".".join(path) for path in changed if path[0] not in MAY_CHANGE or path == ("run", "seed"))
    if refused:
        raise ConfigError(
            "MW-RESHARD-005",
            f"{', '.join(refused)}: resharding changes only the layout; only parallel.* and pipeline.* may be set. "
            f"`meshwright train` accepts the others",
        )
    check_trusted(before, place, overrides, trust_code=trust_code)
    tree = before.model_dump(mode="json")
    tree["batch"]["chunks"] = None  # it follows from global_batch, which stays, and dp
    tree["launch"]["processes"] = "auto"
    drop_unused_keys(tree["parallel"], changed)
    config = load_saved(tree, [f"--run.name={out.name}", f"--run.directory={out.parent}", *overrides], place)
    check_own_directory(config, out)
    return resolve(config)


def _check_free(out: Path, step: int, config: RunConfig) -> None:
    """Check that ``out`` is new, or that it has this very configuration and no sound checkpoint of the step."""
    for candidate in find(out):
        if candidate.step != step:
            continue
        try:
            open_checkpoint(candidate.path).verify()
        except CheckpointError:
            continue  # `begin` moves a damaged one aside, with a message
        raise CheckpointError(
            "MW-RESHARD-006",
            f"{candidate.path} exists and is sound: a checkpoint is never written into; name another --out",
        )
    resolved = out / "resolved.json"
    if not resolved.is_file():
        return
    other = read_resolved(resolved)
    if other.model_copy(update={"run": config.run.model_copy(update={"seed": other.run.seed})}) != config:
        raise CheckpointError(
            "MW-RESHARD-007",
            f"--out {out} is the directory of a run of another configuration ({resolved}): name another",
        )


def _check_names(checkpoint: CheckpointReader, blueprint: Blueprint, is_fresh: bool) -> None:
    """Check that the model as built now has exactly the tensors of the checkpoint, so that none is lost."""
    expected = {
        kind.of(info.name)
        for pp_rank in range(blueprint.grid.pp)
        for kind, info in shard_tensors(
            blueprint, Coordinates(pp_rank, 0, 0), is_fresh, added_states(checkpoint, blueprint)
        )
    }
    stored = set(checkpoint.manifest.tensors)
    if expected == stored:
        return
    problems = [f"{name} is in the model and not in the checkpoint" for name in sorted(expected - stored)]
    problems += [f"{name} is in the checkpoint and not in the model" for name in sorted(stored - expected)]
    raise CheckpointError(
        "MW-RESHARD-008",
        f"{checkpoint.path} is not of the model that {blueprint.config.model.builder} builds: {problems[0]}"
        + (f", and {len(problems) - 1} more" if problems[1:] else "")
        + "; use the code that it was trained with",
    )
