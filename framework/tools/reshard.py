"""Offline resharding: rewrite a checkpoint as another layout would have saved it, without starting a rank.

    source                 layout                      target
    pp0-tp0 |####|         draw_blueprint              pp0-tp0 |##|  pp0-tp1 |##|
    pp1-tp0 |####|  read   for each tp rank:   write   pp1-tp0 |##|  pp1-tp1 |##|
                    ---->  tensors per rank,   ---->   ...
                           and their slices            manifest: the same step, the new layout

Resuming does not need it, since any layout reads any checkpoint. It is worthwhile for files that each rank of a layout
reads whole, or for one single file. Memory holds one tensor at a time, besides the contents of the file being written.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.adapters.attach import is_adapter
from meshwright.blueprint import Blueprint, draw_blueprint
from meshwright.checkpoint import (
    CheckpointMetadata,
    CheckpointReader,
    Manifest,
    TensorKind,
    TensorPiece,
    begin,
    find,
    open_checkpoint,
    publish,
    write_shard,
)
from meshwright.checkpoint.files import MAX_FILE_BYTES, final_directory
from meshwright.config import (
    RunConfig,
    bucket_bytes,
    leaves_out_base,
    load_saved,
    parse,
    read_resolved,
    resolve,
    write_snapshot,
)
from meshwright.data_parallel.members import plan_buckets, stage_members
from meshwright.data_parallel.sharding import StageParameter, accumulation_dtype
from meshwright.errors import CheckpointError, ConfigError
from meshwright.mesh.comm import Group
from meshwright.model.buffers import is_saved
from meshwright.optimizer import factor_infos, saved_states_of
from meshwright.parameters import ParameterInfo
from meshwright.run import RunLock
from meshwright.system.bounded import real_path
from meshwright.tools.trust import changed_keys, check_trusted

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
        parallel = config.parallel
        blueprints = [
            draw_blueprint(config, Group("tp", tuple(range(parallel.tp)), tp_rank)) for tp_rank in range(parallel.tp)
        ]
        is_fresh = not saved.state.get("optimizer_steps") and not any(
            kind != TensorKind.WEIGHTS for kind in checkpoint.kinds()
        )
        _check_names(checkpoint, blueprints[0], is_fresh)
        out.mkdir(parents=True, exist_ok=True)
        open_files.enter_context(RunLock(out))  # keeps a job of that directory from saving into it meanwhile
        temporary = begin(out, saved.step, secrets.token_hex(4))
        for pp_rank in range(parallel.pp):
            for tp_rank, blueprint in enumerate(blueprints):
                shard = pieces(checkpoint, blueprint, pp_rank, tp_rank, is_fresh)
                write_shard(temporary, f"pp{pp_rank}-tp{tp_rank}", shard, max_file_bytes=max_file_bytes)
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


class ShardTensor(NamedTuple):
    """Tensor that one rank writes: its kind, name and slice."""

    kind: TensorKind
    info: ParameterInfo


def shard_tensors(
    blueprint: Blueprint, pp_rank: int, tp_rank: int, is_fresh: bool = False, added: Sequence[TensorKind] = ()
) -> Iterator[ShardTensor]:
    """Yield the tensors that the rank (pp_rank, dp 0, tp_rank) writes, in the order of ``run.tensors.pieces``.

    Args:
        blueprint: drawn for this tp rank.
        is_fresh: the checkpoint is an imported model, with weights alone.
        added: kinds of tensors that callbacks have added, such as ema.
    """
    stages, optimizer = blueprint.schedule.stages_of(pp_rank), blueprint.config.optimizer
    if tp_rank == 0:
        for stage in stages:
            inside = {name for name, _ in blueprint.stage_layers(stage).named_children()}
            for name in blueprint.running:
                if name.partition(".")[0] in inside and is_saved(blueprint.model.layers, name):
                    shape = tuple(blueprint.model.layers.get_buffer(name).shape)
                    yield ShardTensor(TensorKind.WEIGHTS, ParameterInfo(name, shape))
    for stage in stages:
        members = _members(blueprint, stage)
        for member in members:
            if leaves_out_base(blueprint.config) and not is_adapter(member.info.name):
                continue
            if not member.parameter.requires_grad and member.kind.owns(tp_rank):
                yield ShardTensor(TensorKind.WEIGHTS, member.info)
        trained = [member for member in members if member.parameter.requires_grad]
        for together in plan_buckets(trained, bucket_bytes(blueprint.config)):
            if not together[0].kind.owns(tp_rank):
                continue
            dtype = together[0].parameter.dtype
            names = saved_states_of(optimizer, is_matrix=together[0].kind.is_matrix)
            kinds = [TensorKind.WEIGHTS, *map(TensorKind, names), *added]
            if dtype != accumulation_dtype(dtype):
                kinds.append(TensorKind.MASTER)
            if is_fresh:
                kinds = [TensorKind.WEIGHTS]
            for of in kinds:
                for member in together:
                    yield ShardTensor(of, member.info)
            for member in together if tp_rank == 0 and not is_fresh else ():
                for name, info in factor_infos(optimizer, member.info.name, member.info.global_shape):
                    yield ShardTensor(TensorKind(name), info)


def pieces(
    checkpoint: CheckpointReader, blueprint: Blueprint, pp_rank: int, tp_rank: int, is_fresh: bool
) -> Iterator[TensorPiece]:
    """Yield the tensors of :func:`shard_tensors` with their values, read one by one."""
    added = added_states(checkpoint, blueprint)
    for kind, info in shard_tensors(blueprint, pp_rank, tp_rank, is_fresh, added):
        tensor = checkpoint.read(kind, info)
        assert tensor is not None, (kind, info)  # guaranteed by _check_names
        yield TensorPiece(kind, info, info.unpadded(tensor))


def added_states(checkpoint: CheckpointReader, blueprint: Blueprint) -> list[TensorKind]:
    """Return the kinds of tensors in a checkpoint that callbacks of its run have added, such as ema."""
    own = {TensorKind.WEIGHTS, TensorKind.MASTER, *saved_states_of(blueprint.config.optimizer)}
    return [kind for kind in checkpoint.kinds() if kind not in own]


def _members(blueprint: Blueprint, stage: int) -> list[StageParameter]:
    """Return the parameters of a stage, each once. Tied weights get a group of one rank: nothing is reduced here."""
    stages_of = blueprint.stage_of_parameter()
    tied = {name: Group("pp", (0,), 0) for name, stages in stages_of.items() if len(stages) > 1}
    of_stage = stage, blueprint.stage_layers(stage), blueprint.infos, blueprint.model.canonical
    found: dict[str, StageParameter] = {}
    for member in stage_members(*of_stage, stages_of, tied):
        found.setdefault(member.info.name, member)
    return list(found.values())


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
            f"{', '.join(refused)}: resharding changes only the layout; only parallel.*, pipeline.*, run.name and "
            f"run.directory may be set. `meshwright train` accepts the others",
        )
    check_trusted(before, place, overrides, trust_code=trust_code)
    tree = before.model_dump(mode="json")
    tree["batch"]["chunks"] = None  # it follows from global_batch, which stays, and dp
    tree["launch"]["processes"] = "auto"
    config = load_saved(tree, [f"--run.name={out.name}", f"--run.directory={out.parent}", *overrides], place)
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
        for kind, info in shard_tensors(blueprint, pp_rank, 0, is_fresh, added_states(checkpoint, blueprint))
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
