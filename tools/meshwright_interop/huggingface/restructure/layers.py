"""``model.builder = "hf:DIRECTORY"``: a causal language model of transformers as the layers
of an nn.Sequential.

The model is cut at the modules of its own pipeline plan (``_pp_plan``), or of a derived one, see
cut.py. It is sharded by its own tensor-parallel plan (``_tp_plan``). No code here is specific to
one model. Computations between the planned modules run in the model's own code, see frame.py.
Parameters get new names::

    name in the Sequential                name in transformers
    embedding.embed_tokens.weight         model.embed_tokens.weight
    block0.layer.mlp.up_proj.weight       model.layers.0.mlp.up_proj.weight
    norm.norm.weight                      model.norm.weight
    head.lm_head.weight                   lm_head.weight

A model that cannot be restructured is refused with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwright.errors import ModelError
from meshwright.model.outline import parameters_on_meta
from meshwright.system.numbers import whole_number
from meshwright_interop.huggingface.files import CONFIG
from meshwright_interop.huggingface.quantised import note_of, quantisation_of, with_values
from meshwright_interop.huggingface.restructure.bounds import FillLimit
from meshwright_interop.huggingface.restructure.buffers import freeze_buffers
from meshwright_interop.huggingface.restructure.cut import cut, cut_by_trace
from meshwright_interop.huggingface.restructure.directory import (
    LAYERS,
    configuration,
    fields_of,
    return_logits_alone,
)
from meshwright_interop.huggingface.restructure.documents import refuse_documents
from meshwright_interop.huggingface.restructure.experts import (
    around_experts,
    implementation,
    matrices_of_experts,
    plan_of_experts,
    without_parameters,
)
from meshwright_interop.huggingface.restructure.initial import ParameterInitialiser
from meshwright_interop.huggingface.restructure.library import import_transformers
from meshwright_interop.huggingface.restructure.losses import balance_routers, losses_of
from meshwright_interop.huggingface.restructure.plans import (
    context_plan,
    gathered_beside,
    kinds_of,
    sharding_of,
)
from meshwright_interop.huggingface.restructure.probe import probe
from meshwright_interop.huggingface.restructure.released import (
    PLAIN_NAME,
    Conversions,
    under_module_names,
)
from meshwright_interop.huggingface.restructure.rotary import (
    choose_by_length,
    refuse_dynamic,
    trim_refusal,
)
from meshwright_interop.huggingface.restructure.routers import KIND as ROUTER
from meshwright_interop.huggingface.restructure.routers import prepare_routers
from meshwright_interop.huggingface.restructure.untouched import check_untouched
from meshwright_interop.huggingface.rules import TensorMapping
from meshwright_interop.huggingface.source import SafetensorsDirectory, open_source

OWN_OPTIONS = ("weights", "attention")
"""Keys of model.options that are no keys of config.json."""
FRESH_WEIGHTS = "set model.options.weights = false to draw fresh weights"
"""Alternative in error messages about the files."""
EXACT_IN_FLOAT32 = ("F32", "BF16", "F16")
"""Accepted element types of weights: training starts from float32, which holds all their values."""


def builder(path: str) -> Callable[..., nn.Sequential]:
    """Return the builder of one directory; its options are ``weights``,
    ``attention`` and keys of ``config.json``.
    """
    return partial(build, Path(path).expanduser())


def build(
    directory: Path, *, weights: bool | None = None, attention: str | None = None, **overrides: Any
) -> nn.Sequential:
    """Build the Sequential ``embedding``, ``block0`` .., final norm, ``head``,
    with parameters on the meta device.

    Its forward: token ids (B, S) int64 -> logits (B, S, V).

    Args:
        directory: holds ``config.json``, and optionally safetensors files.
        weights: start from the weights of the directory; None: if it has any.
        attention: "sdpa" or "eager"; None: the default of transformers for this model.
        overrides: keys of ``config.json`` with values that replace the file's.

    Raises:
        ModelError: the model cannot be restructured, with the reason.
    """
    config = configuration(directory, overrides)
    losses = losses_of(config, overrides, directory)
    return_logits_alone(config)
    place = f"{directory} ({type(config).__name__.removesuffix('Config')})"
    quantisation = quantisation_of(fields_of(directory), str(directory / CONFIG))
    files = open_source(directory, f", or {FRESH_WEIGHTS}") if weights is not False else None
    files = None if files is None else with_values(files, quantisation)
    if weights and files is None:
        raise ModelError(
            "MW-INTEROP-066",
            f"model.options.weights = true, but {directory} holds no *.safetensors",
        )
    model = _skeleton(config, place, attention)
    constants = freeze_buffers(model)
    conversions = Conversions(model)
    untouched = partial(check_untouched, config, place, attention)
    planned, layers = _cut(model, place, untouched)
    tied = _ties(layers)
    parameters = {
        name: _transformers_name(name, planned)
        for name, _ in layers.named_parameters(remove_duplicate=False)
    }
    left_over: list[str] = []
    source = None
    if files is not None:
        source = under_module_names(files, conversions)
        left_over = _check_weights(source, layers, parameters, tied, model, overrides)
    own_names = {
        _transformers_name(name, planned): name
        for name, _ in layers.named_modules()
        if _is_inside(name, planned)
    }
    own_names |= {theirs: name for name, theirs in parameters.items()}
    kinds, problems = kinds_of(without_parameters(model._tp_plan, own_names, layers), own_names)
    observations = probe(layers, kinds, gathered_beside(layers, kinds), place, config, attention)
    sharding = sharding_of(kinds, problems, layers, tied, observations)
    modules = {theirs: layers.get_submodule(name) for name, theirs in planned.items()}
    of_tokens, impossible = context_plan(layers, config, observations)
    refuse_documents(layers, getattr(config.get_text_config(), "layer_types", None) or ())
    routers = prepare_routers(layers)
    balances = balance_routers(model, routers, len(around_experts(layers)), losses.routers, place)
    of_routers = dict.fromkeys((*routers, *balances), ROUTER)
    initialise = ParameterInitialiser(model, parameters, modules, source, constants)
    vars(layers).update(
        sharding_plan=plan_of_experts(layers, sharding.plan) | of_tokens | of_routers,
        z_loss=losses.logits,
        matrices=matrices_of_experts(layers),
        divisible=sharding.divisible,
        shared_units=dict(sharding.shared),
        impossible=sharding.impossible | impossible | trim_refusal(config),
        tied_weights=tied,
        initialise=initialise,
        copy_rows=None if source is None else initialise.copy_rows,
        names_in_transformers=parameters,
        conversions=conversions,
        left_over=left_over,
        weights_note=note_of(files, quantisation, left_over),
    )
    return layers


def _check_weights(
    source: SafetensorsDirectory,
    layers: nn.Sequential,
    names: Mapping[str, str],
    tied: Sequence[tuple[str, ...]],
    model: Any,
    overrides: Mapping[str, Any],
) -> list[str]:
    """Check that the files hold exactly the parameters of the layers, and nothing else but what
    transformers leaves out too, or ``overrides`` do; return the names of these others.

    Raises:
        ModelError: they do not.
    """
    unread = [re.compile(each) for each in model._keys_to_ignore_on_load_unexpected or ()]

    def is_ignored(name: str) -> bool:
        is_named = PLAIN_NAME.fullmatch(name) is not None
        return (
            name.endswith(".inv_freq")
            or _is_left_out(name, model.config, overrides)
            or (is_named and any(each.search(name) for each in unread))
        )

    source.check(
        _rules_of(layers, names, tied),
        {name: tuple(parameter.shape) for name, parameter in layers.named_parameters()},
        is_ignored,
        type(model).__name__,
        f"leave model.options as they are in {CONFIG}, get the files again, or {FRESH_WEIGHTS}",
        EXACT_IN_FLOAT32,
    )
    return [name for name in source.tensors if name not in names.values() and is_ignored(name)]


def _rules_of(
    layers: nn.Sequential, names: Mapping[str, str], tied: Sequence[tuple[str, ...]]
) -> list[TensorMapping]:
    """Return the rules of the parameters, of tied ones that of the first name.

    Args:
        layers: the layers.
        names: name in the Sequential -> name in transformers.
        tied: groups of names that share one parameter, the canonical name first.
    """
    copies = {first: tuple(names[other] for other in others) for first, *others in tied}
    return [
        TensorMapping(name, (names[name],), same_as=copies.get(name, ()))
        for name, _ in layers.named_parameters()
    ]


def _is_left_out(name: str, config: Any, overrides: Mapping[str, Any]) -> bool:
    """Return whether a tensor is of a layer beyond those that ``overrides`` ask for."""
    layers = next((getattr(config, key) for key in LAYERS if key in overrides), None)
    return layers is not None and any(
        whole_number(part, layers) is not None for part in name.split(".")
    )


def _skeleton(config: Any, place: str, attention: str | None) -> Any:
    """Build the whole transformers model in training mode,
    with parameters on meta and constants materialised.

    Raises:
        ModelError: it is no causal LM, its rotary embedding changes during training, or its experts
            cannot be replaced.
    """
    transformers = import_transformers()
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(
            "MW-INTEROP-068",
            f"{place}: transformers has no causal language model of this architecture"
            " (AutoModelForCausalLM): only those are restructured; write this one as code, see"
            " docs/huggingface-models.md",
        )
    refuse_dynamic(config, place)
    if attention not in (None, "sdpa", "eager"):
        raise ModelError(
            "MW-INTEROP-070",
            f'model.options.attention = {attention!r}: use "sdpa" or "eager", or leave it out',
        )
    chosen = implementation(config) | (
        {} if attention is None else {"attn_implementation": attention}
    )
    try:
        with parameters_on_meta(), FillLimit(place):
            model = transformers.AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, trust_remote_code=False, **chosen
            )
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            "MW-INTEROP-072",
            f"{place}: transformers cannot build it: {type(error).__name__}: {error}",
        ) from error
    choose_by_length(model, place)
    model.config.use_cache = False
    return model.train()


def _cut(
    model: Any, place: str, untouched: Callable[[], None]
) -> tuple[dict[str, str], nn.Sequential]:
    """Cut the model at its own plan, or at a derived one, see cut.py, and check the parts.

    Raises:
        ModelError: that of ``untouched``, if transformers cannot run the model either; or the
            reason of the cut.
    """
    has_plan = model.config.get_text_config().base_model_pp_plan
    try:
        planned, layers = _cut_at_plan(model, place) if has_plan else cut_by_trace(model, place)
    except ModelError:
        untouched()
        raise
    _check_parts(layers, model, place)
    return planned, layers


def _cut_at_plan(model: Any, place: str) -> tuple[dict[str, str], nn.Sequential]:
    """Cut the model at its own plan; where this leaves out modules, or its blocks return tuples, at
    a derived one.

    Raises:
        ModelError: neither is the same model; the reason of its own plan.
    """
    try:
        return cut(model, place)
    except ModelError as error:
        try:
            return cut_by_trace(model, place)
        except ModelError:
            raise error from None


def _check_parts(layers: nn.Sequential, model: nn.Module, place: str) -> None:
    """Check that a pipeline can reproduce the model.

    Raises:
        ModelError: dropout between planned modules, or a persistent buffer of whole numbers.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            raise ModelError(
                "MW-INTEROP-077",
                f"{place}: {name} (dropout {module.p}) lies between planned modules: set it to 0",
            )
    parameters = {
        name
        for part in (layers, model)
        for name, _ in part.named_parameters(remove_duplicate=False)
    }
    buffers = [
        name for part in (layers, model) for name in part.state_dict() if name not in parameters
    ]
    if buffers:
        raise ModelError(
            "MW-INTEROP-079",
            f"{place}: {buffers[0]} is a persistent buffer of whole numbers: such a state is not"
            " carried over",
        )


def _ties(layers: nn.Sequential) -> list[tuple[str, ...]]:
    """Return the groups of names that share one parameter object (tied weights),
    the canonical name first.
    """
    groups: dict[int, list[str]] = {}
    for name, parameter in layers.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return [tuple(names) for names in groups.values() if len(names) > 1]


def _is_inside(name: str, planned: Mapping[str, str]) -> bool:
    return any(f"{name}.".startswith(f"{module}.") for module in planned)


def _transformers_name(name: str, planned: Mapping[str, str]) -> str:
    """Return the transformers name of a module or parameter of the Sequential."""
    layer, _, rest = name.partition(".")
    child, _, inside = rest.partition(".")
    return f"{planned[f'{layer}.{child}']}.{inside}".rstrip(".")


def left_over_of(layers: nn.Sequential) -> list[str]:
    """Return the names of the files' tensors that belong to no parameter of a restructured model,
    and that transformers leaves out too, or ``model.options``.
    """
    names = layers.left_over
    assert isinstance(names, list)
    return names


def conversions_of_layers(layers: nn.Sequential) -> Conversions:
    """Return the mapping between files and parameters of a restructured model."""
    conversions = layers.conversions
    assert isinstance(conversions, Conversions)
    return conversions


def names_in_transformers(layers: nn.Sequential) -> dict[str, str]:
    """Return the transformers name of each parameter of a restructured model,
    by its name in the Sequential.
    """
    names = layers.names_in_transformers
    assert isinstance(names, dict)
    return names
