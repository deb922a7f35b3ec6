"""Plain torch models for comparison with layouts: from a run's newest checkpoint,
or with initial weights.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from meshwright.checkpoint import TensorKind, newest_valid
from meshwright.config import RunConfig, parse
from meshwright.model.build import PlainModel, configured_model
from meshwright.parameters import ParameterInfo


def load_plain(run_directory: Path) -> tuple[RunConfig, nn.Sequential]:
    """Load (resolved config, whole model) of a run: eval mode, float32 on CPU, without mesh,
    stages or schedule.
    """
    resolved = run_directory / "resolved.json"
    config = parse(resolved.read_text(), str(resolved))
    found = newest_valid(run_directory)
    assert found is not None
    model = configured_model(config)
    made: dict[str, nn.Parameter] = {}
    with found as checkpoint:
        for name, outline in list(model.layers.named_parameters(remove_duplicate=False)):
            canonical = model.canonical(name)
            if canonical not in made:
                info = ParameterInfo(canonical, tuple(outline.shape))
                tensor = checkpoint.read(TensorKind.WEIGHTS, info, torch.float32)
                assert tensor is not None
                made[canonical] = nn.Parameter(tensor, requires_grad=False)
            owner, _, attribute = name.rpartition(".")
            model.layers.get_submodule(owner)._parameters[attribute] = made[canonical]
        saved = set(checkpoint.parameters(TensorKind.WEIGHTS))
        for name, buffer in model.layers.named_buffers():
            if name in saved:  # forward changes it
                found_buffer = checkpoint.read(
                    TensorKind.WEIGHTS, ParameterInfo(name, tuple(buffer.shape)), buffer.dtype
                )
                assert found_buffer is not None
                buffer.copy_(found_buffer)
    return config, model.layers.eval()


def plain_layers(model: PlainModel, dtype: torch.dtype) -> nn.Sequential:
    """Fill the layers of a model on meta with its full initial weights;
    tied weights become one parameter.
    """
    made: dict[str, nn.Parameter] = {}
    for name, outline in list(model.layers.named_parameters(remove_duplicate=False)):
        canonical = model.canonical(name)
        if canonical not in made:
            made[canonical] = nn.Parameter(
                model.initial(canonical).to(dtype), requires_grad=outline.requires_grad
            )
        owner_name, _, attribute = name.rpartition(".")
        model.layers.get_submodule(owner_name)._parameters[attribute] = made[canonical]
    return model.layers
