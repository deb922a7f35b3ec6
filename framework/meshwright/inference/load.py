"""Trained model on the ranks of any layout, for inference:
stages in eval mode with the weights of a checkpoint.

    checkpoint of any layout -> each rank reads its slices of its stages -> forward, in the order of the schedule's Fs

There is no optimizer, no gradient and no initialisation: a rank's memory holds its weights and
activations.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from meshwright.adapters.attach import is_adapter
from meshwright.adapters.fingerprint import FINGERPRINT, base_sum, check_base
from meshwright.blueprint import Blueprint
from meshwright.build import make_stage, pick_loss
from meshwright.checkpoint import CheckpointReader, TensorKind, open_checkpoint
from meshwright.config import (
    Launch,
    Parallel,
    RunConfig,
    has_base_elsewhere,
    load_saved,
    parse,
    read_resolved,
)
from meshwright.config.combinations.axes import drop_unused_options
from meshwright.errors import CheckpointError, ConfigError
from meshwright.mesh import Grid
from meshwright.mesh.holders import open_holders
from meshwright.mesh.mesh import Mesh, open_mesh
from meshwright.model.buffers import is_saved
from meshwright.model.build import materialise
from meshwright.model.sync_batch_norm import join_replicas
from meshwright.parameters import DTYPES, ParameterInfo
from meshwright.parts import ForwardParts
from meshwright.pipeline.executor import Executor
from meshwright.pipeline.stage import Stage
from meshwright.pipeline.values import Loss
from meshwright.run.directory import RESOLVED, find_run, is_checkpoint
from meshwright.run.places import find_in, saved_places
from meshwright.run.resume import newest_sound
from meshwright.run.trust import changed_keys, check_trusted
from meshwright.schedule.analysis import links_of
from meshwright.system.store import Place, StorePath
from meshwright.terminal.output import print_warning
from meshwright.watch.hang.watchdog import GROUP_TIMEOUT_MARGIN_S

LAYOUT = ("parallel", "pipeline", "launch")
"""Sections of which inference may change every key: they define the layout."""
KEPT = frozenset({("train", "device"), ("train", "dtype"), ("batch", "micro_batch_size")})
"""Keys of other sections that inference may change."""


ONLY_TRAINING = ("optimizer", "loss_scale", "checkpoint", "watch", "tracking")
"""Sections that inference ignores. They are reset to defaults, which no other key contradicts."""


class ModelLocation(NamedTuple):
    """Location of a trained model."""

    run: Place
    """Directory of the run, or of the checkpoint alone; or a path in an object store."""
    checkpoints: tuple[Place, ...]
    """Candidates, newest first; the first sound one is used."""
    saved: dict[str, Any]
    """Configuration of the training."""
    source: str
    """File that ``saved`` was read from."""
    weights: str = TensorKind.WEIGHTS
    """Kind of tensors to read as the weights: a callback's state, such as "ema"."""


def locate(place: Place, step: int | None) -> ModelLocation:
    """Locate a run's checkpoints, only the one of ``step`` if given;
    ``place`` may also be a checkpoint itself.

    Raises:
        ConfigError: ``place`` is not a run.
        CheckpointError: the run has no checkpoint, or none of this step.
    """
    if is_checkpoint(place):
        manifest = open_checkpoint(place).manifest
        if step is not None and step != manifest.step:
            raise CheckpointError(
                "MW-INFERENCE-008",
                f"{place} is the checkpoint of step {manifest.step}, not of --step={step}",
            )
        return ModelLocation(place, (place,), dict(manifest.config), str(place / "manifest.json"))
    run = place if isinstance(place, StorePath) else find_run(place)
    found = find_in(saved_places(run))
    if not found:
        raise CheckpointError(
            "MW-INFERENCE-009",
            f"{run} has no checkpoint yet: let it train to its first (checkpoint.every)",
        )
    if step is None and isinstance(run, StorePath):  # which has no file besides checkpoints
        newest = locate(found[0].path, None)
        return newest._replace(run=run, checkpoints=tuple(each.path for each in found))
    if step is None:
        assert isinstance(run, Path)
        saved = read_resolved(run / RESOLVED).model_dump(mode="json")
        return ModelLocation(run, tuple(each.path for each in found), saved, str(run / RESOLVED))
    for each in found:
        if each.step == step:
            return locate(each.path, step)._replace(run=run)
    steps = ", ".join(str(each.step) for each in reversed(found))
    raise CheckpointError(
        "MW-INFERENCE-010", f"{run} has no checkpoint of step {step}; it has those of steps {steps}"
    )


def config_for(
    place: ModelLocation,
    overrides: Sequence[str],
    command: str,
    *,
    defaults: Sequence[str] = (),
    may_change: Collection[tuple[str, str]] = KEPT,
    trust_code: bool = False,
    has_own_rows: bool = False,
) -> RunConfig:
    """Return the training's configuration with ``defaults`` and then ``overrides`` applied,
    not yet resolved.

    Training-only sections are reset to their defaults. The schedule defaults to gpipe, in which
    micro-batches pass the stages in order.

    Args:
        command: name of the command, for error messages.
        may_change: keys outside the layout that ``overrides`` may change.
        trust_code: import whatever builders the configuration names.
        has_own_rows: the rows are no samples of the run, and its global batch is left out.

    Raises:
        ConfigError: an override of a key that may not change, or one that conflicts with the
            others; a builder that is not meshwright's own and that no override names.
    """
    saved = parse(json.dumps(place.saved), place.source)
    saved = saved.replace(train={"callbacks": ()}, tracking={"sinks": ()})  # code of training alone
    changed = changed_keys(saved, overrides)
    refused = sorted(
        ".".join(path) for path in changed if path[0] not in LAYOUT and path not in may_change
    )
    if refused:
        others = ", ".join(sorted(".".join(path) for path in may_change))
        raise ConfigError(
            "MW-INFERENCE-011",
            f"{', '.join(refused)}: {command} uses the run's own configuration; only parallel.*,"
            f" pipeline.*, launch.* and {others} may be changed",
        )
    check_trusted(saved, place.source, overrides, trust_code=trust_code)
    tree = saved.model_dump(mode="json")
    for section in ONLY_TRAINING:
        del tree[section]
    # chunks follow from global_batch, which stays, and dp
    tree["batch"] |= {"chunks": None, "ramp": None}
    if has_own_rows:
        tree["batch"] |= {"chunks": 1, "global_batch": None, "balance": "index"}
    tree["train"]["compile"] = False
    tree["parallel"] |= {
        "zero": 1,
        "shard_factor": None,
        "reduce": None,
        "offload": False,
        "offload_directory": None,
    }
    drop_unused_options(tree["parallel"], changed_keys(saved, [*defaults, *overrides]))
    balance = tree["pipeline"]["balance"]
    tree["pipeline"] = {"schedule": "gpipe"} | (
        {} if isinstance(balance, list) else {"balance": balance}
    )
    tree["launch"] |= {"processes": "auto", "max_restarts": 0}
    return load_saved(tree, [*defaults, *overrides], place.source)


def open_inference_mesh(parallel: Parallel, launch: Launch, device: str) -> Mesh:
    """Open the mesh of a resolved configuration. Every rank calls it; blocks.
    ``device``: ``train.device``.
    """
    return open_mesh(
        Grid.of(parallel.degrees),
        device,
        timeout_s=launch.timeout_s + GROUP_TIMEOUT_MARGIN_S,
        tp_across_nodes=parallel.tp_across_nodes,
        ep_across_nodes=parallel.ep_across_nodes,
    )


def open_trained(
    blueprint: Blueprint, mesh: Mesh, place: ModelLocation, loss: Loss | None = None
) -> tuple[ForwardParts, CheckpointReader]:
    """Build this rank's stages in eval mode, with the weights of the newest sound checkpoint.

    Every rank calls it; blocks.

    Args:
        blueprint: this rank's own; its layers become the rank's layers.
        loss: function at the end of the last stage; None: the model's loss.

    Raises:
        CheckpointError: on every rank; no checkpoint is sound, or it belongs to another model.
    """
    config = blueprint.config
    mesh.compare_digests(blueprint.digest())
    # without running statistics it takes those of the batch in eval mode too
    join_replicas(blueprint.model.layers, mesh.replicas)
    path = newest_sound(place.run, mesh, print_warning, only=place.checkpoints)
    assert path is not None, place
    loss = loss or pick_loss(blueprint, mesh.tp, training=False)
    try:
        with open_checkpoint(path) as checkpoint:
            kind = _kind(checkpoint, place.weights)
            stages = {
                index: _stage(blueprint, index, checkpoint, mesh, loss, kind)
                for index in blueprint.schedule.stages_of(mesh.at.pp_rank)
            }
    except FileNotFoundError as error:
        raise CheckpointError(
            "MW-INFERENCE-012",
            f"{path} was deleted while it was read: the run continues and keeps only its newest"
            " checkpoints (checkpoint.keep_last); repeat the command to use the newest",
        ) from error
    if (saved := checkpoint.manifest.state.get(FINGERPRINT)) is not None:
        total = base_sum(_owned_base(blueprint, stages, mesh)).to(mesh.device)
        mesh.world.all_reduce(total).wait()
        check_base(saved, total, str(path), config.model.builder)
    current, metrics = blueprint.model.current, blueprint.metrics
    links = mesh.open_links(links_of([blueprint.schedule]))
    executor = Executor(
        blueprint.schedule, links, stages, mesh.device, current=current, metrics=metrics
    )
    return ForwardParts(config, mesh, blueprint, executor), checkpoint


def _owned_base(
    blueprint: Blueprint, stages: Mapping[int, Stage], mesh: Mesh
) -> Iterator[tuple[ParameterInfo, Tensor]]:
    """Yield the base weights that this rank adds to the fingerprint: of all ranks with a copy,
    one adds each.
    """
    holders_by_axis = open_holders(mesh)
    for stage in stages.values():
        for name, parameter in stage.layers.named_parameters():
            info = blueprint.infos[name]
            is_first_copy = blueprint.model.canonical(name) == name
            is_saved = is_first_copy and holders_by_axis[info.sliced_over].is_saved
            if is_saved and not is_adapter(name):
                yield info, parameter.detach()


def _kind(checkpoint: CheckpointReader, name: str) -> TensorKind:
    """Return the kind of tensors with this name. Raises CheckpointError:
    the checkpoint has none.
    """
    kind = next((each for each in checkpoint.kinds() if each == name), None)
    if kind is None:
        raise CheckpointError(
            "MW-INFERENCE-017",
            f"{checkpoint.path} has no tensors {name!r} to use as weights; it has"
            f" {', '.join(checkpoint.kinds())}",
        )
    return kind


def _stage(
    blueprint: Blueprint,
    index: int,
    checkpoint: CheckpointReader,
    mesh: Mesh,
    loss: Loss,
    kind: TensorKind,
) -> Stage:
    """Return a stage with the tensors of this kind as its weights;
    frozen parameters have weights only.
    """
    dtype, present = DTYPES[blueprint.config.train.dtype], set(checkpoint.parameters(kind))

    in_checkpoint = set(checkpoint.parameters(TensorKind.WEIGHTS))

    def read(info: ParameterInfo) -> Tensor:
        if info.name not in in_checkpoint and has_base_elsewhere(
            blueprint.config.adapter, blueprint.config.model
        ):
            return info.take(blueprint.model.initial(info.name))
        of = kind if info.name in present else TensorKind.WEIGHTS
        weight = checkpoint.read(of, info, dtype)
        assert weight is not None  # a missing weight raises in read
        return weight

    of_stage = blueprint.stage_layers(index), blueprint.model, blueprint.infos, dtype
    layers = materialise(*of_stage, mesh.device, read).eval().requires_grad_(False)
    for name, buffer in layers.named_buffers():
        if name in blueprint.running and is_saved(
            layers, name
        ):  # forward changes it, so it is saved state like the weights
            saved = checkpoint.read(
                TensorKind.WEIGHTS, ParameterInfo(name, tuple(buffer.shape)), buffer.dtype
            )
            assert saved is not None
            buffer.copy_(saved)
    return make_stage(blueprint, index, layers, (loss, loss), lambda name: None)
