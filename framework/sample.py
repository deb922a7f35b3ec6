"""Read a run's newest checkpoint into one plain process, whatever layout wrote it, and let it write."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from framework.checkpoint import Kind, newest_valid
from framework.config import RunConfig, parse
from framework.data.tokenizer import end_of_document_id, ending_ids, load
from framework.errors import CheckpointError, ConfigError
from framework.model import build_model
from framework.parameters import ParameterInfo
from framework.seeding import derive


def load_plain(run_directory: Path) -> tuple[RunConfig, nn.Sequential]:
    """The resolved config and the whole model of a run, in eval mode, float32 on CPU, from its newest sound checkpoint.

    Raises:
        ConfigError, CheckpointError: no run, no checkpoint, or none that verifies.
    """
    resolved = run_directory / "resolved.json"
    if not resolved.is_file():
        raise ConfigError(f"{run_directory} is no run directory: {resolved} is missing. Train first, or name another")
    config = parse(resolved.read_text(), str(resolved))
    found = newest_valid(run_directory)
    if found is None:
        raise CheckpointError(f"{run_directory} has no checkpoint yet: let it train to its first (checkpoint.every)")
    model = build_model(config.model.builder, config.model.options, config.run.seed)
    made: dict[str, nn.Parameter] = {}
    with found as checkpoint:
        for name, outline in list(model.layers.named_parameters(remove_duplicate=False)):
            canonical = model.canonical(name)
            if canonical not in made:
                info = ParameterInfo(canonical, tuple(outline.shape))
                tensor = checkpoint.read(Kind.WEIGHTS, info, torch.float32)
                if tensor is None:
                    raise CheckpointError(f"{checkpoint.path} has no weights of {canonical}: it is of another model")
                made[canonical] = nn.Parameter(tensor, requires_grad=False)
            owner, _, attribute = name.rpartition(".")
            model.layers.get_submodule(owner)._parameters[attribute] = made[canonical]
        saved = set(checkpoint.parameters(Kind.WEIGHTS))
        for name, buffer in model.layers.named_buffers():
            if name in saved:  # forward changes it
                found_buffer = checkpoint.read(Kind.WEIGHTS, ParameterInfo(name, tuple(buffer.shape)), buffer.dtype)
                assert found_buffer is not None
                buffer.copy_(found_buffer)
    return config, model.layers.eval()


def sample(run_directory: Path, prompt: str, num_tokens: int, temperature: float = 0.8, top_k: int = 40) -> str:
    """The prompt and what the model writes after it; temperature 0 takes the likeliest token each time.

    The draw is seeded by the run's seed: the same call writes the same text. The whole window goes through the model
    for each token: short texts only.
    """
    config, layers = load_plain(run_directory)
    if config.data.builder is not None or config.data.task != "causal":
        what = f"samples of {config.data.builder}" if config.data.builder else f'data.task = "{config.data.task}"'
        raise ConfigError(f"{run_directory} was trained on {what}: only a model of the next token can continue a text")
    if config.data.tokenizer is None:
        raise ConfigError("data.tokenizer is not set: without it the tokens that the model writes are only numbers")
    tokenizer = load(Path(config.data.tokenizer))
    end, ends = end_of_document_id(tokenizer), ending_ids(Path(config.data.tokenizer), tokenizer)
    ids: list[int] = tokenizer.encode(prompt).ids or ([end] if end is not None else [0])
    generator = torch.Generator().manual_seed(derive(config.run.seed, "sample", prompt))
    window = config.data.sequence_length
    with torch.inference_mode():
        for _ in range(num_tokens):
            logits = layers(torch.tensor([ids[-window:]]))[0, -1].float()
            if temperature <= 0:
                chosen = int(logits.argmax())
            else:
                values, tokens = logits.topk(min(top_k, logits.numel()))
                shares = torch.softmax(values / temperature, dim=-1)
                chosen = int(tokens[torch.multinomial(shares, 1, generator=generator)])
            if chosen in ends:
                break
            ids.append(chosen)
    return str(tokenizer.decode(ids))
