"""``model.builder = "hf:DIRECTORY"``: a causal language model of transformers as the layers of an nn.Sequential.

The model is cut at the modules of its own pipeline plan (``_pp_plan``) and sharded by its own tensor-parallel plan
(``_tp_plan``). No code here is specific to one model. Computations between the planned modules run in the model's own
code, see frame.py. Parameters get new names::

    name in the Sequential                name in transformers
    embedding.embed_tokens.weight         model.embed_tokens.weight
    block0.layer.mlp.up_proj.weight       model.layers.0.mlp.up_proj.weight
    norm.norm.weight                      model.norm.weight
    head.lm_head.weight                   lm_head.weight

A model that cannot be restructured is refused with the reason.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from meshwright.errors import ModelError
from meshwright.model.build import parameters_on_meta
from meshwright.tools.interop.huggingface.restructure.directory import check_weights, configuration, open_weights
from meshwright.tools.interop.huggingface.restructure.frame import (
    ModelSkeleton,
    ModulePlaceholder,
    PipelineLayer,
    RunState,
)
from meshwright.tools.interop.huggingface.restructure.initial import ParameterInitialiser
from meshwright.tools.interop.huggingface.restructure.library import import_transformers
from meshwright.tools.interop.huggingface.restructure.plans import gathered_beside, kinds_of, sharding_of
from meshwright.tools.interop.huggingface.restructure.probe import probe

OWN_OPTIONS = ("weights", "attention")
"""Keys of model.options that are no keys of config.json."""
CHANGING_ROTARY = ("dynamic", "longrope")
"""Types of rotary embedding whose frequencies depend on the sequence lengths seen so far."""


class LayerModules(NamedTuple):
    """One layer of the Sequential: its name, and child name -> name in transformers, in order of execution."""

    name: str
    modules: dict[str, str]


def builder(path: str) -> Callable[..., nn.Sequential]:
    """Return the builder of one directory; its options are ``weights``, ``attention`` and keys of ``config.json``."""
    return partial(build, Path(path).expanduser())


def build(
    directory: Path, *, weights: bool | None = None, attention: str | None = None, **overrides: Any
) -> nn.Sequential:
    """Build the Sequential ``embedding``, ``block0`` .., final norm, ``head``, with parameters on the meta device.

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
    place = f"{directory} ({type(config).__name__.removesuffix('Config')})"
    found = open_weights(directory) if weights is not False else None
    if weights and found is None:
        raise ModelError("MW-INTEROP-066", f"model.options.weights = true, but {directory} holds no *.safetensors")
    model = _skeleton(config, place, attention)
    rename, layers = _cut(model, place)
    _check_parts(layers, model, place)
    names = {theirs: here for here, theirs in rename.items()}
    tied = _ties(layers)
    here = [name for name, _ in layers.named_parameters(remove_duplicate=False)]
    parameters = {name: _theirs(name, rename) for name in here}
    if found is not None:
        kept = {names[0]: names[1:] for names in tied}
        shapes = {
            parameters[name]: tuple(layers.get_parameter(name).shape)
            for name in here
            if not any(name in others for others in kept.values())
        }
        ignored = [*parameters.values(), *(name for name in found.tensors if name.endswith(".inv_freq"))]
        check_weights(found, shapes, ignored, bool(overrides))
        groups = [[parameters[name] for name in names] for names in tied]
        apart = [problem for first, *others in groups for problem in found.apart(first, others)]
        if apart:
            raise ModelError("MW-INTEROP-067", "\n".join(apart))
    every = {_theirs(name, rename): name for name, _ in layers.named_modules() if _is_inside(name, rename)}
    every |= {theirs: name for name, theirs in parameters.items()}
    kinds, problems = kinds_of(model._tp_plan, every)
    seen = probe(layers, kinds, gathered_beside(layers, kinds), place, config)
    sharding = sharding_of(kinds, problems, layers, tied, seen)
    carried: dict[str, object] = {
        "sharding_plan": sharding.plan,
        "divisible": sharding.divisible,
        "impossible": sharding.impossible,
        "tied_weights": tied,
        "initialise": ParameterInitialiser(
            model, parameters, {t: layers.get_submodule(h) for t, h in names.items()}, found
        ),
        "names_in_transformers": parameters,
    }
    for attribute, value in carried.items():
        setattr(layers, attribute, value)
    return layers


def _skeleton(config: Any, place: str, attention: str | None) -> Any:
    """Build the whole transformers model in training mode, with parameters on meta and constants materialised.

    Raises:
        ModelError: it is no causal LM, has no pipeline plan, or its rotary embedding changes during training.
    """
    transformers = import_transformers()
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(
            "MW-INTEROP-068",
            f"{place}: transformers has no causal language model of this architecture (AutoModelForCausalLM): only "
            f"such are restructured; bring another as code, see docs/huggingface-models.md",
        )
    kinds = {str(value.get("rope_type")) for value in _tables(getattr(config, "rope_parameters", None) or {})}
    if kinds & set(CHANGING_ROTARY):
        raise ModelError(
            "MW-INTEROP-069",
            f"{place}: rope_type = {(kinds & set(CHANGING_ROTARY)).pop()!r} changes the rotary frequencies by the "
            f"longest sequence seen so far, which is another one in each process: train with a rope_parameters of "
            f"another type (linear, llama3, yarn) in model.options",
        )
    if attention not in (None, "sdpa", "eager"):
        raise ModelError(
            "MW-INTEROP-070", f'model.options.attention = {attention!r}: use "sdpa" or "eager", or leave it out'
        )
    if not config.get_text_config().base_model_pp_plan:
        name = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__
        raise ModelError(
            "MW-INTEROP-071",
            f"{place}: {name} declares no plan for a pipeline (base_model_pp_plan), so nothing says where it may be "
            f"cut: bring it as code, see docs/huggingface-models.md",
        )
    chosen = {} if attention is None else {"attn_implementation": attention}
    try:
        with parameters_on_meta():
            model = transformers.AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, trust_remote_code=False, **chosen
            )
    except Exception as error:
        raise ModelError(
            "MW-INTEROP-072", f"{place}: transformers cannot build it: {type(error).__name__}: {error}"
        ) from error
    model.config.use_cache = False
    return model.train()


def _tables(value: Any) -> Iterator[dict[str, Any]]:
    """Yield a table and all tables nested in it."""
    if isinstance(value, dict):
        yield value
        for inner in value.values():
            yield from _tables(inner)


def _cut(model: Any, place: str) -> tuple[dict[str, str], nn.Sequential]:
    """Cut the model: replace its planned modules by marks, and group these modules into pieces.

    Returns:
        Name of each planned module in the Sequential -> its name in transformers, and the Sequential of pieces.

    Raises:
        ModelError: the plan names a module that the model lacks, a parameter belongs to no planned module, or the
            forward does not call each planned module exactly once.
    """
    planned: dict[str, nn.Module] = {}
    in_lists: set[str] = set()
    for name in model._pp_plan:
        try:
            module = model.get_submodule(name)
        except AttributeError as error:
            raise ModelError(
                "MW-INTEROP-073", f"{place}: its pipeline plan names {name}, and the model has none"
            ) from error
        if isinstance(module, nn.ModuleList):
            in_lists |= {f"{name}.{index}" for index in range(len(module))}
            planned |= {f"{name}.{index}": each for index, each in enumerate(module)}
        else:
            planned[name] = module
    play = RunState(model.config.get_text_config().hidden_size)
    for name, module in planned.items():
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, ModulePlaceholder(name, module, play))
    left = [name for name, _ in model.named_parameters()]
    if left:
        raise ModelError(
            "MW-INTEROP-074",
            f"{place}: {left[0]} belongs to no module of the pipeline plan ({', '.join(model._pp_plan)}), so nothing "
            f"says which stage holds it",
        )
    text = hashlib.sha256(repr(model.config).encode()).hexdigest()[:16]
    frame = ModelSkeleton(model, play, f"{type(model).__name__} {text}")
    try:
        order = frame.find_order()
    except Exception as error:
        raise ModelError(
            "MW-INTEROP-075",
            f"{place}: what {type(model).__name__} does between its planned modules needs more of them than to be "
            f"called: {type(error).__name__}: {error}",
        ) from error
    if sorted(order) != sorted(planned):
        again = [name for name in planned if order.count(name) != 1]
        raise ModelError(
            "MW-INTEROP-076",
            f"{place}: its forward calls {again[0]} {order.count(again[0])} times, not once: no pipeline",
        )
    rename: dict[str, str] = {}
    layers = OrderedDict[str, nn.Module]()
    position = 0
    for piece in _grouped(order, in_lists, planned):
        modules = {child: planned[theirs] for child, theirs in piece.modules.items()}
        layers[piece.name] = PipelineLayer(frame, position, list(modules), modules)
        rename |= {f"{piece.name}.{child}": theirs for child, theirs in piece.modules.items()}
        position += len(modules)
    return rename, nn.Sequential(layers)


def _grouped(order: list[str], in_lists: set[str], planned: Mapping[str, nn.Module]) -> list[LayerModules]:
    """Group the planned modules into pieces: one for each layer of a module list.

    A module without weights joins the piece before it. So does every module between the embedding and the first block.
    """
    pieces: list[LayerModules] = []
    blocks = 0
    for name in order:
        has_weights = any(True for _ in planned[name].parameters())
        if name in in_lists:
            pieces.append(LayerModules(f"block{blocks}", {"layer": name}))
            blocks += 1
        elif not pieces:
            pieces.append(LayerModules("embedding", {_child(name, {}): name}))
        elif blocks == 0 or not has_weights:
            pieces[-1].modules[_child(name, pieces[-1].modules)] = name
        elif name == order[-1]:
            pieces.append(LayerModules("head", {_child(name, {}): name}))
        else:
            taken = {piece.name for piece in pieces}
            own = _child(name, dict.fromkeys(taken, ""))
            pieces.append(LayerModules(own, {_child(name, {}): name}))
    return pieces


def _child(name: str, taken: Mapping[str, str]) -> str:
    """Return the last part of a dotted name, with a number appended if it is taken."""
    last = name.rpartition(".")[2]
    return last if last not in taken else f"{last}_{len(taken)}"


def _check_parts(layers: nn.Sequential, model: nn.Module, place: str) -> None:
    """Check that a pipeline can reproduce the model.

    Raises:
        ModelError: dropout between planned modules, fused expert weights, or persistent buffers.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            raise ModelError(
                "MW-INTEROP-077", f"{place}: {name} (dropout {module.p}) lies between planned modules: set it to 0"
            )
    for name, parameter in layers.named_parameters():
        owner = layers.get_submodule(name.rpartition(".")[0])
        if parameter.dim() > 2 and not isinstance(owner, nn.modules.conv._ConvNd):
            raise ModelError(
                "MW-INTEROP-078",
                f"{place}: {name} holds the weights of {len(parameter)} experts, {list(parameter.shape)}: a mixture of "
                f"experts, which sends each token where its numbers say, is not restructured",
            )
    own = {name for name, _ in [*layers.named_parameters(), *model.named_parameters()]}
    kept = [name for part in (layers, model) for name in part.state_dict() if name not in own]
    kept = [name for name in kept if name not in {n for n, _ in layers.named_parameters(remove_duplicate=False)}]
    if kept:
        raise ModelError(
            "MW-INTEROP-079",
            f"{place}: {kept[0]} is part of what is saved, and no parameter: such a state is not carried over",
        )


def _ties(layers: nn.Sequential) -> list[tuple[str, ...]]:
    """Return the groups of names that share one parameter object (tied weights), the canonical name first."""
    groups: dict[int, list[str]] = {}
    for name, parameter in layers.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return [tuple(names) for names in groups.values() if len(names) > 1]


def _is_inside(name: str, rename: Mapping[str, str]) -> bool:
    return any(f"{name}.".startswith(f"{here}.") for here in rename)


def _theirs(name: str, rename: Mapping[str, str]) -> str:
    """Return the transformers name of a module or parameter of the Sequential."""
    piece, _, rest = name.partition(".")
    child, _, inside = rest.partition(".")
    return f"{rename[f'{piece}.{child}']}.{inside}".rstrip(".")


def names_in_transformers(layers: nn.Sequential) -> dict[str, str]:
    """Return the transformers name of each parameter of a restructured model, by its name in the Sequential."""
    found = layers.names_in_transformers
    assert isinstance(found, dict)
    return found
