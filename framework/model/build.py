"""Construction of the user's model on the meta device, and materialisation of a stage's weights.

A model is an ``nn.Sequential`` of named elements, called layers here. Plain attributes that it may have:

    sharding_plan   {pattern of module names: "column" | "row" | "vocab" | ... | a function}, all of them in
                    framework/tensor_parallel/plan.py and unsplit.py
    tied_weights    [(canonical parameter name, other name, ...), ...]
    shared_units    {pattern: (rows of the parts of a unit, number of the last that are copied, attribute)} of column
                    linears, for tp above the number of units: ranks then share a unit, tensor_parallel/shared_units.py
    initialise      (parameter name, tensor) -> None: fill the whole tensor, drawing from torch's default generator
    divisible       {pattern: number of units (heads, kv groups) that tensor parallelism must not cut}
    loss            (output of the last layer, labels) -> loss per label, zero where the label is -100. Default:
                    cross-entropy of logits (..., classes) and labels (...)
    label_smoothing, z_loss   numbers: options of the default loss in training
    loss_heads      [(shift of the labels, weight), ...]: the last layer returns a tuple of so many logits
    selective_recompute  [pattern of submodule names]: cheap to recompute and expensive to store
    impossible      {"tp" | "cp" | "sequence": reason why the model does not support it}
    parameter_groups  as the configuration's ``model.parameter_groups``; factors of both multiply
    matrices        {pattern: how a weight splits into matrices}, for optimizer.name = "muon": see matrices.py

A model without any of these attributes trains with dp and pp. The ``reset_parameters`` of its modules initialises it.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from meshwright.adapters.attach import attach, freeze_base
from meshwright.config import ParameterGroup, RunConfig
from meshwright.config.functions import SCHEMES, error_place, find_function
from meshwright.errors import ModelError, UserError
from meshwright.fp8.convert import convert_linears
from meshwright.model import requirements
from meshwright.model.first_values import (
    GIVEN,
    ParameterOwner,
    WriteRecord,
    check_first_values,
    find_owners,
    first_value,
)
from meshwright.model.groups import find_groups, freeze
from meshwright.model.matrices import find_matrices
from meshwright.model.own_loss import in_float32
from meshwright.model.shared_draw import StageRanks, initial_values
from meshwright.parameters import ParameterInfo
from meshwright.seeding import Draw, seed_dropouts, seeded

Initialise = Callable[[str, Tensor], None]
M = TypeVar("M", bound=nn.Module)


@dataclass
class PlainModel:
    """User's model as built: parameters on meta (no memory), buffers real, dropouts seeded by name."""

    layers: nn.Sequential
    plan: dict[str, Any] = field(default_factory=dict)
    tied: list[tuple[str, ...]] = field(default_factory=list)
    divisible: dict[str, int] = field(default_factory=dict)
    shared_units: dict[str, Any] = field(default_factory=dict)
    initialise: Initialise | None = None
    loss: Callable[[Any, Tensor], Tensor] | None = None
    loss_options: dict[str, Any] = field(default_factory=dict)
    """Options of the cross-entropy in training, if not zero: ``label_smoothing``, ``z_loss``."""
    loss_heads: list[tuple[int, float]] = field(default_factory=list)
    """Shift of the labels and weight of the loss, for each logits in a tuple; empty: the last layer returns one."""
    selective_recompute: list[str] = field(default_factory=list)
    impossible: dict[str, str] = field(default_factory=dict)
    """"tp", "cp", "sequence" -> reason why the model does not support it."""
    draw: Draw = field(default_factory=Draw)
    seed: int = 0
    owners: dict[str, ParameterOwner] = field(default_factory=dict)
    """Parameter name -> module whose reset (or, of adapters, rule) initialises it."""
    groups: dict[str, ParameterGroup] = field(default_factory=dict)
    """Canonical parameter name -> its group of ``model.parameter_groups``."""
    matrices: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Canonical name of each weight that Muon steps -> rows of the parts that are its matrices; (): one matrix."""

    def canonical(self, name: str) -> str:
        """Return the name that a weight is stored, initialised and optimised under: the first of its tied set."""
        for names in self.tied:
            if name in names:
                return names[0]
        return name

    def freeze(self, layers: nn.Sequential) -> None:
        """Freeze the parameters of frozen groups in ``layers``, which has this model's names."""
        freeze(layers, self.canonical, self.groups)

    def initial(self, name: str) -> Tensor:
        """Return the full initial tensor of a parameter, float32 on CPU: a pure function of (seed, canonical name)."""
        name = self.canonical(name)
        owner = self.owners[name]
        with seeded(self.seed, "initialise", name):
            if self.initialise is not None:
                full = torch.empty(owner.module.get_parameter(owner.path).shape, dtype=torch.float32)
                with torch.no_grad():
                    self.initialise(name, full)
                return full
            return first_value(owner)


def _on_meta(parameter: nn.Parameter, given: float | str | None) -> nn.Parameter:
    """Return an empty copy of a parameter on meta. Attributes record hooks and class of the original, and ``given``."""
    outline = torch.empty_like(parameter, device="meta").as_subclass(Tensor).detach()
    found = nn.Parameter(outline, requires_grad=parameter.requires_grad)
    if requirements.has_hooks(parameter):
        setattr(found, requirements.HAS_HOOKS, True)
    if type(parameter) is not nn.Parameter:
        setattr(found, requirements.CLASS, type(parameter).__name__)
    if given is not None:
        setattr(found, GIVEN, given)
    return found


@contextmanager
def parameters_on_meta(record: WriteRecord | None = None) -> Iterator[None]:
    """Move each nn.Parameter to the meta device as it is registered, inside this context; buffers stay real.

    ``record``: the record of the builder's writes, which finds parameters that had values when they were registered.
    """
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        is_lazy = isinstance(parameter, UninitializedParameter)
        if parameter is not None and not parameter.is_meta and not is_lazy:
            parameter = _on_meta(parameter, None if record is None else record.value_of(parameter))
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def find_builder(path: str) -> Callable[..., Any]:
    """Return the function that ``model.builder`` names: ``package.module:function``, or ``hf:DIRECTORY``."""
    scheme, _, rest = path.partition(":")
    if scheme in SCHEMES:
        return find_function(SCHEMES[scheme][0], "model.builder", "a builder", ModelError)(rest)  # type: ignore[no-any-return]
    return find_function(path, "model.builder", "a function that returns an nn.Sequential", ModelError)


def vocabulary_size(path: str, options: dict[str, Any]) -> int | None:
    """Return the vocabulary size, from the model's options or its directory; None if neither contains it."""
    scheme, _, rest = path.partition(":")
    found = options.get("vocab_size")
    if found is None and scheme in SCHEMES:
        found = find_function(SCHEMES[scheme][1], "model.builder", "a builder", ModelError)(rest)
    return found if isinstance(found, int) else None


def build_model(path: str, options: dict[str, Any], seed: int) -> PlainModel:
    """Build the user's model with parameters on meta and seeded random buffers, check it, seed its dropouts by name.

    Raises:
        ModelError: The model cannot be cut into stages, or its builder failed. The text names the builder.
    """
    builder = find_builder(path)
    requirements.check_options(path, builder, options)
    try:
        with WriteRecord() as record, parameters_on_meta(record), seeded(seed, "builder"):
            layers = builder(**options)
    except UserError:
        raise
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if (tool := requirements.parametrization_message(error)) is not None:
            raise ModelError(
                "MW-MODEL-002", f"{path} with model.options {options} failed{error_place(error)}: {tool}"
            ) from error
        raise ModelError(
            "MW-MODEL-003",
            f"{path} with model.options {options} failed{error_place(error)}: {type(error).__name__}: {error}",
        ) from error
    if not isinstance(layers, nn.Sequential):
        raise ModelError(
            "MW-MODEL-004",
            f"{path} returned a {type(layers).__name__}: a pipeline is cut between the elements of an nn.Sequential. "
            f"Return nn.Sequential(embedding, block, ..., head)",
        )
    if len(layers) == 0:
        raise ModelError("MW-MODEL-005", f"{path} returned an empty nn.Sequential: there is nothing to train")
    if not any(True for _ in layers.parameters()):
        raise ModelError("MW-MODEL-006", f"{path} returned a model without parameters: there is nothing to train")
    if not any(parameter.requires_grad for parameter in layers.parameters()):
        raise ModelError(
            "MW-MODEL-007",
            f"{path} returned a model of which no parameter requires a gradient: there is nothing to train",
        )
    tied = requirements.check_model(path, layers)
    owners = find_owners(layers)
    if getattr(layers, "initialise", None) is None:
        check_first_values(path, layers, owners, record, {name for names in tied for name in names[1:]})
    return PlainModel(
        layers=layers,
        plan=dict(getattr(layers, "sharding_plan", {})),
        tied=tied,
        divisible=dict(getattr(layers, "divisible", {})),
        shared_units=dict(getattr(layers, "shared_units", {})),
        initialise=getattr(layers, "initialise", None),
        loss=in_float32(getattr(layers, "loss", None)),
        loss_options={name: float(given) for name in requirements.LOSS_OPTIONS if (given := getattr(layers, name, 0))},
        loss_heads=[(shift, float(weight)) for shift, weight in getattr(layers, "loss_heads", None) or ()],
        selective_recompute=list(getattr(layers, "selective_recompute", [])),
        impossible=dict(getattr(layers, "impossible", {})),
        draw=seed_dropouts(layers, seed),
        seed=seed,
        owners=owners,
    )


def configured_model(config: RunConfig) -> PlainModel:
    """Build the model of a configuration, with its adapters and parameter groups; see :func:`build_model`.

    Raises:
        ModelError: see there; or adapters or groups do not fit the model.
    """
    model = build_model(config.model.builder, config.model.options, config.run.seed)
    convert_linears(model.layers, model.plan, config.train)
    adapters = attach(model, config)
    model.owners |= {name: ParameterOwner(module, "weight") for name, module in adapters.items()}
    model.groups = find_groups(model.layers, model.canonical, config)
    freeze_base(model, adapters)
    model.freeze(model.layers)
    if not any(parameter.requires_grad for parameter in model.layers.parameters()):
        raise ModelError("MW-MODEL-029", "model.parameter_groups freezes every parameter: there is nothing to train")
    model.matrices = find_matrices(model.layers, model.canonical, model.plan, model.groups, config)
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
    """Materialise the weights of one stage: this tp rank's slices, in the training dtype, on the device.

    Parameters tied inside the stage stay one object. Collective over ``ranks``, if they are given.

    Args:
        layers: The stage, with parameters on the meta device in this tp rank's local shapes; changed in place.
        model: The whole model, with ties and initial values.
        infos: Canonical parameter name -> its global shape and this rank's slice.
        local_of: Returns this rank's slice of a parameter. None: the initial weights. Each full tensor is then drawn in
            float32 on CPU by the parameter's name, sliced and cast: the same bits in every layout and on any device.
        ranks: Groups of the ranks with the same stage, which draw a large stage together. None: draw all of it.
    """
    if local_of is None:
        names = dict.fromkeys(model.canonical(name) for name, _ in layers.named_parameters(remove_duplicate=False))
        local_of = initial_values({name: infos[name] for name in names}, model.initial, dtype, ranks)
    made: dict[str, nn.Parameter] = {}
    for name, outline in list(layers.named_parameters(remove_duplicate=False)):
        canonical = model.canonical(name)
        if canonical not in made:
            local = local_of(infos[canonical])
            assert local.shape == outline.shape, (name, tuple(local.shape), tuple(outline.shape))
            made[canonical] = nn.Parameter(local.to(device=device, dtype=dtype), requires_grad=outline.requires_grad)
        owner, _, attribute = name.rpartition(".")
        layers.get_submodule(owner)._parameters[attribute] = made[canonical]
    for module in layers.modules():
        module._buffers.update({name: b.to(device) for name, b in module._buffers.items() if b is not None})
    return layers


def meta_copy(layers: nn.Sequential) -> nn.Sequential:
    """Return a copy on the meta device, for forwards that only compute shapes. The original is unchanged."""
    return copy_module(layers, {}).to("meta")


def copy_module(module: M, twins: dict[int, Any]) -> M:
    """Return a deep copy, faster than ``copy.deepcopy``: the empty hook dicts of modules are not traversed.

    ``twins``: replacements of objects in the copy, by id of the original; it may be changed.
    """
    for each in module.modules():
        for value in vars(each).values():
            if type(value) is OrderedDict and not value:
                twins[id(value)] = OrderedDict()
    return copy.deepcopy(module, twins)
