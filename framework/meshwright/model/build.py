"""Construction of the user's model on the meta device, and materialisation of a stage's weights.

A model is an ``nn.Sequential`` of named elements, called layers here. Plain attributes that it may
have:

    sharding_plan   {pattern of module names: "column" | "row" | "vocab" | ... | a function}, all of them in
                    framework/meshwright/tensor_parallel/plan.py and unsplit.py
    tied_weights    [(canonical parameter name, other name, ...), ...]
    shared_units    {pattern: (rows of the parts of a unit, number of the last that are copied, attribute)} of column
                    linears, for tp above the number of units: ranks then share a unit,
                    tensor_parallel/shared_units.py
    initialise      (parameter name, tensor) -> None: fill the tensor, or change the value that torch would have there,
                    drawing from torch's default generator
    divisible       {pattern: number of units (heads, kv groups) that tensor parallelism must not cut}
    loss            (output of the last layer, labels) -> loss per label, zero where the label is -100. Default:
                    cross-entropy of logits (..., classes) and labels (...)
    label_smoothing, z_loss   numbers: options of the default loss in training
    loss_heads      [(shift of the labels, weight), ...]: the last layer returns a tuple of so many logits
    selective_recompute  [pattern of submodule names]: cheap to recompute and expensive to store
    weights_note    a line of the summary before step 1, on the first weights
    impossible      {"tp" | "cp" | "sequence" | "trim": reason why the model does not support it}
    parameter_groups  as the configuration's ``model.parameter_groups``; factors of both multiply
    matrices        {pattern: how a weight splits into matrices}, for an optimizer of matrices: see matrices.py

A model without any of these attributes trains with dp and pp. The ``reset_parameters`` of its
modules initialises it, or the builder itself: see builder_run.py.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from meshwright.adapters.attach import attach, freeze_base
from meshwright.config import ParameterGroup, RunConfig
from meshwright.config.functions import error_place
from meshwright.config.schemes import is_scheme
from meshwright.current import CurrentMicrobatch
from meshwright.errors import ModelError, UserError, reason_of
from meshwright.fp8.convert import convert_linears
from meshwright.model import requirements
from meshwright.model.builder import find_builder
from meshwright.model.builder_run import BuilderRun
from meshwright.model.first_values import ParameterOwner, find_owners, first_value, unwritten_error
from meshwright.model.groups import find_groups, freeze
from meshwright.model.matrices import find_matrices
from meshwright.model.outline import ModelOutline
from meshwright.model.own_attention import use_own_attention
from meshwright.model.own_loss import in_float32
from meshwright.model.shared_draw import StageRanks, initial_values
from meshwright.model.sync_batch_norm import use_replica_statistics
from meshwright.model.unwritten import MARKED_UP_TO, FilledAtFirstTouch, is_marked
from meshwright.parameters import ParameterInfo
from meshwright.seeding import seed_dropouts, seeded

Initialise = Callable[[str, Tensor], None]
M = TypeVar("M", bound=nn.Module)


@dataclass
class PlainModel:
    """User's model as built: parameters on meta (no memory), buffers real,
    dropouts seeded by name.
    """

    layers: nn.Sequential
    builder: str = ""
    """Name of the builder, for messages."""
    plan: dict[str, Any] = field(default_factory=dict)
    tied: list[tuple[str, ...]] = field(default_factory=list)
    divisible: dict[str, int] = field(default_factory=dict)
    shared_units: dict[str, Any] = field(default_factory=dict)
    initialise: Initialise | None = None
    copy_rows: Callable[[str, Tensor, int], None] | None = None
    """Function that fills a tensor with rows of a parameter's first value, from the given one on:
    it is in files, of which the others stay unread. None: there is none.
    """
    builder_run: BuilderRun | None = None
    """Run of the builder that gives first values; None:
    the resets of the modules give all of them.
    """
    is_dry: bool = False
    """True in a dry run: initial weights have a size and no values."""
    loss: Callable[[Any, Tensor], Tensor] | None = None
    loss_options: dict[str, Any] = field(default_factory=dict)
    """Options of the cross-entropy in training, if not zero: ``label_smoothing``, ``z_loss``."""
    loss_heads: list[tuple[int, float]] = field(default_factory=list)
    """Shift of the labels and weight of the loss, for each logits in a tuple; empty:
    the last layer returns one.
    """
    selective_recompute: list[str] = field(default_factory=list)
    impossible: dict[str, str] = field(default_factory=dict)
    """"tp", "cp", "sequence" -> reason why the model does not support it."""
    weights_note: str = ""
    """Line of the summary on the first weights, such as that files were dequantised; empty: none."""
    current: CurrentMicrobatch = field(default_factory=CurrentMicrobatch)
    seed: int = 0
    owners: dict[str, ParameterOwner] = field(default_factory=dict)
    """Parameter name -> module whose reset (or, of adapters, rule) initialises it."""
    groups: dict[str, ParameterGroup] = field(default_factory=dict)
    """Canonical parameter name -> its group of ``model.parameter_groups``."""
    matrices: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Canonical name of each weight that is stepped as matrices -> rows of the parts that are its matrices; ():
    one matrix.
    """

    def canonical(self, name: str) -> str:
        """Return the name that a weight is stored, initialised and optimised under:
        the first of its tied set.
        """
        for names in self.tied:
            if name in names:
                return names[0]
        return name

    def freeze(self, layers: nn.Sequential) -> None:
        """Freeze the parameters of frozen groups in ``layers``, which has this model's names."""
        freeze(layers, self.canonical, self.groups)

    def initial(self, name: str) -> Tensor:
        """Return the full initial tensor of a parameter, float32 on CPU: a pure function of (seed,
        canonical name).

        Raises:
            ModelError: nothing gives some of its elements a value.
        """
        name = self.canonical(name)
        if self.is_dry:
            return torch.empty(self._shape(name), dtype=torch.float32)
        full = self._filled(name)
        if is_marked(full):
            run = self.builder_run if self.initialise is None else None
            raise unwritten_error(self.builder, "parameter", (run and run.unwritten()) or [name])
        return full

    def reads_part(self, info: ParameterInfo) -> bool:
        """Return whether :meth:`initial_part` reads no more than this rank's slice."""
        return self.copy_rows is not None and info.sliced_over == "ep"

    def initial_part(self, info: ParameterInfo) -> Tensor:
        """Return this rank's slice of :meth:`initial`: experts, read from files without the others."""
        part = torch.zeros(info.local_shape)
        if self.copy_rows is not None and info.slice is not None and not self.is_dry:
            self.copy_rows(info.name, part, info.slice.start)
        return part

    def _filled(self, name: str) -> Tensor:
        """Return :meth:`initial`, with a mark in the elements that nothing has written."""
        if self.initialise is None:
            return self._first(name)
        full = torch.empty(self._shape(name), dtype=torch.float32)
        filling = FilledAtFirstTouch(full, lambda: self._first(name))
        with seeded(self.seed, "initialise", name), torch.no_grad(), filling:
            self.initialise(name, full)
        filling.fill()
        return full

    def check_unset(self, names: Sequence[str]) -> None:
        """Raise :class:`ModelError` for those of these parameters that ``initialise`` leaves alone,
        if they are small.

        Their builder gives them no value, or none that a seed repeats.

        Large ones are checked in the process that trains them.
        """
        small = [
            name for name in names if self._shape(self.canonical(name)).numel() <= MARKED_UP_TO
        ]
        unwritten = [name for name in small if is_marked(self._filled(self.canonical(name)))]
        if unwritten:
            raise unwritten_error(self.builder, "parameter", unwritten)

    def is_built(self, name: str) -> bool:
        """Return whether a run of the builder gives a parameter its first value."""
        return self.builder_run is not None and self.canonical(name) in self.builder_run.names

    def _first(self, name: str) -> Tensor:
        """Return a parameter as the builder or its owner's reset sets it, before ``initialise``."""
        if self.builder_run is not None and name in self.builder_run.names:
            return self.builder_run.value(name)
        with seeded(self.seed, "initialise", name):
            return first_value(self.owners[name])

    def _shape(self, name: str) -> torch.Size:
        owner = self.owners[name]
        return owner.module.get_parameter(owner.path).shape

    def release(self) -> None:
        """Free the first values that a run of the builder has left in memory."""
        if self.builder_run is not None:
            self.builder_run.release()


def build_model(
    path: str, options: dict[str, Any], seed: int, problems_found: list[ModelError] | None = None
) -> PlainModel:
    """Build the user's model with parameters on meta and seeded random buffers, check it,
    seed its dropouts by name.

    ``problems_found``: takes problems in spite of which the model can be described, instead of an
        error.

    Raises:
        ModelError: The model cannot be cut into stages, or its builder failed. The text names the
            builder, and all problems of the model.
    """
    builder = find_builder(path)
    requirements.check_options(path, builder, options)
    run = BuilderRun(path, partial(builder, **options), seed)
    outline = _outline(options, run)
    layers = outline.layers
    requirements.check_kind(path, layers)
    tied, problems = requirements.find_problems(path, layers)
    if any(problem.code in requirements.UNFINISHED for problem in problems):
        raise requirements.joined(problems)
    owners = find_owners(layers)
    if not is_scheme(path):  # a restructured model fills all tensors, or names those that it cannot
        problems += run.take_over(outline, owners, {name for names in tied for name in names[1:]})
    problems += requirements.buffer_problems(path, layers)
    problems += use_replica_statistics(path, layers)
    if problems_found is not None and all(
        problem.code in requirements.DESCRIBABLE for problem in problems
    ):
        problems_found += problems
    elif problems:
        raise requirements.joined(problems)
    model = PlainModel(
        layers=layers,
        builder=path,
        plan=dict(getattr(layers, "sharding_plan", {})),
        tied=tied,
        divisible=dict(getattr(layers, "divisible", {})),
        shared_units=dict(getattr(layers, "shared_units", {})),
        initialise=getattr(layers, "initialise", None),
        copy_rows=getattr(layers, "copy_rows", None),
        builder_run=run if run.names else None,
        loss=in_float32(getattr(layers, "loss", None)),
        loss_options={
            name: float(given)
            for name in requirements.LOSS_OPTIONS
            if (given := getattr(layers, name, 0))
        },
        loss_heads=[
            (shift, float(weight)) for shift, weight in getattr(layers, "loss_heads", None) or ()
        ],
        selective_recompute=list(getattr(layers, "selective_recompute", [])),
        impossible=dict(getattr(layers, "impossible", {})),
        weights_note=str(getattr(layers, "weights_note", "")),
        current=seed_dropouts(layers, seed),
        seed=seed,
        owners=owners,
    )
    if not problems:
        model.check_unset([*run.unset, *sorted(run.unrepeated)])
    return model


def _outline(options: dict[str, Any], run: BuilderRun) -> ModelOutline:
    """Return the outline of a model; where its builder reads values of parameters,
    that of a run on the CPU.

    Raises:
        ModelError: the builder fails in plain torch as well.
    """
    try:
        return run.draw()
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException:
        pass  # it reads values of parameters, or its own error comes again
    try:
        return run.outline()
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise ModelError(
            "MW-MODEL-003",
            f"{run.path} with model.options {options} failed{error_place(error)}:"
            f" {reason_of(error)}",
        ) from error


def configured_model(config: RunConfig, problems: list[ModelError] | None = None) -> PlainModel:
    """Build the model of a configuration, with its adapters and parameter groups;
    see :func:`build_model`.

    ``problems``: takes those in spite of which the model can be described.

    Raises:
        ModelError: see there; or adapters or groups do not fit the model.
    """
    model = build_model(config.model.builder, config.model.options, config.run.seed, problems)
    model.impossible |= use_own_attention(model.layers, config.model.attention)
    convert_linears(model.layers, model.plan, config.train)
    adapters = attach(model, config.adapter)
    model.owners |= {name: ParameterOwner(module, "weight") for name, module in adapters.items()}
    model.groups = find_groups(
        model.layers, model.canonical, config.model.parameter_groups, config.optimizer
    )
    freeze_base(model, adapters)
    model.freeze(model.layers)
    if not any(parameter.requires_grad for parameter in model.layers.parameters()):
        raise ModelError(
            "MW-MODEL-029",
            "model.parameter_groups freezes every parameter: there is nothing to train",
        )
    model.matrices = find_matrices(
        model.layers, model.canonical, model.plan, model.groups, config.optimizer
    )
    return model


def materialise(
    layers: nn.Sequential,
    model: PlainModel,
    infos: Mapping[str, ParameterInfo],
    dtype: torch.dtype,
    device: torch.device,
    local_of: Callable[[ParameterInfo], Tensor] | None = None,
    ranks: StageRanks | None = None,
) -> nn.Sequential:
    """Materialise the weights of one stage: this tp rank's slices, in the training dtype,
    on the device.

    Parameters tied inside the stage stay one object. Collective over ``ranks``, if they are given.

    Args:
        layers: The stage, with parameters on the meta device in this tp rank's local shapes;
            changed in place.
        model: The whole model, with ties and initial values.
        infos: Canonical parameter name -> its global shape and this rank's slice.
        local_of: Returns this rank's slice of a parameter. None: the initial weights. Each full
            tensor is then drawn in float32 on CPU by the parameter's name, sliced and cast: the
            same bits in every layout and on any device.
        ranks: Groups of the ranks with the same stage, which draw a large stage together. None:
            draw all of it.
    """
    if local_of is None:
        names = dict.fromkeys(
            model.canonical(name) for name, _ in layers.named_parameters(remove_duplicate=False)
        )
        # each that draws runs the whole builder, and holds the whole model
        by_one = model.builder_run is not None
        whole = {name: infos[name] for name in names if not model.reads_part(infos[name])}
        drawn = initial_values(whole, model.initial, dtype, ranks, by_one_rank=by_one)

        def local_of(info: ParameterInfo) -> Tensor:
            return drawn(info) if info.name in whole else model.initial_part(info)

    made: dict[str, nn.Parameter] = {}
    for name, outline in list(layers.named_parameters(remove_duplicate=False)):
        canonical = model.canonical(name)
        if canonical not in made:
            local = local_of(infos[canonical])
            assert local.shape == outline.shape, (name, tuple(local.shape), tuple(outline.shape))
            made[canonical] = nn.Parameter(
                local.to(device=device, dtype=dtype), requires_grad=outline.requires_grad
            )
        owner, _, attribute = name.rpartition(".")
        layers.get_submodule(owner)._parameters[attribute] = made[canonical]
    for module in layers.modules():
        module._buffers.update(
            {name: b.to(device) for name, b in module._buffers.items() if b is not None}
        )
    return layers


def meta_copy(layers: nn.Sequential) -> nn.Sequential:
    """Return a copy on the meta device, for forwards that only compute shapes.
    The original is unchanged.
    """
    return copy_module(layers, {}).to("meta")


def copy_module(module: M, twins: dict[int, Any]) -> M:
    """Return a deep copy, faster than ``copy.deepcopy``:
    the empty hook dicts of modules are not traversed.

    ``twins``: replacements of objects in the copy, by id of the original; it may be changed.
    """
    for each in module.modules():
        for value in vars(each).values():
            if type(value) is OrderedDict and not value:
                twins[id(value)] = OrderedDict()
    return copy.deepcopy(module, twins)
