"""Text generation with a trained model, in one process or on the ranks of any layout;
greedy text is the same on all.

    prompts -> ids (B, L), padded at the end -> stages -> logits of each row's last token, whole, on the last stage
                 ^                                              | chosen there, broadcast to all ranks
                 +----------------- one token more -------------+

A model is any nn.Sequential of layers, so there is no key/value cache: the whole window runs for
every token. This serves to inspect a model; for serving, export it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.blueprint import Blueprint, draw_blueprint
from meshwright.config import RunConfig, resolve
from meshwright.config.combinations.axes import WHOLE_SAMPLES
from meshwright.config.functions import directory_of
from meshwright.data import fingerprint
from meshwright.data.tokenizer import begin_id, find_tokenizer, load
from meshwright.errors import ConfigError, ModelError
from meshwright.inference.choice import SamplingRequest, choose, make_generators
from meshwright.inference.load import (
    ModelLocation,
    config_for,
    locate,
    open_inference_mesh,
    open_trained,
)
from meshwright.inference.prompts import encode_prompt, ends_of_document, with_starts
from meshwright.mesh import Coordinates, Grid
from meshwright.mesh.comm import Group
from meshwright.mesh.mesh import Mesh, close_mesh, open_mesh
from meshwright.parts import ForwardParts
from meshwright.pipeline.plan import describe_boundaries
from meshwright.pipeline.values import Microbatch, ValueSpec
from meshwright.system.atomic import write_out
from meshwright.system.process import GiveUp, end_process
from meshwright.tensor_parallel.cross_entropy import split_vocab_size
from meshwright.terminal.output import print_lines

SHORTEST = 16
"""Tokens of the shortest window; each longer one is twice as long, up to data.sequence_length."""
SAME_TEXT = (
    "--train.dtype=float32",
    "--train.linear=dtype",
    "--train.fp8_keep=none",
    "--parallel.dp=1",
    "--parallel.sequence=false",
    *WHOLE_SAMPLES,
)
"""Overrides with which greedy text is the same on any layout:
rounding in bfloat16 would change the chosen tokens.
"""


class Continuation(NamedTuple):
    """Prompt and the model's continuation."""

    prompt: str
    text: str
    """Prompt and continuation."""
    ids: tuple[int, ...]
    """Generated tokens, without the end of the document."""
    ended: bool
    """True if the model has generated the end of the document."""


def sample(
    place: Path,
    prompt: str,
    num_tokens: int,
    temperature: float = 0.8,
    top_k: int = 40,
    *,
    trust_code: bool = False,
) -> str:
    """Return the prompt and its continuation by the newest model of a run, in this process.

    Raises:
        UserError: there is no run, no checkpoint, or the model cannot generate text.
    """
    where = locate(place, None)
    alone = ("--parallel.pp=1", "--parallel.tp=1")
    config = check(
        config_for(where, (), "sample", defaults=(*SAME_TEXT, *alone), trust_code=trust_code), 1, 1
    )
    mesh = open_mesh(Grid(), config.train.device)
    return generate(
        config, mesh, where, SamplingRequest((prompt,), num_tokens, temperature, top_k)
    )[0].text


def check(config: RunConfig, world_size: int, num_prompts: int) -> RunConfig:
    """Check before any process exists that the run can generate text;
    return the resolved configuration.

    All prompts form one micro-batch.

    Raises:
        ConfigError: the run was not trained on text, has no tokenizer, or dp is not 1.
    """
    if config.data.builder is not None or config.data.task != "causal":
        if config.data.builder:
            what = f"samples of {config.data.builder}"
        else:
            what = f'data.task = "{config.data.task}"'
        raise ConfigError(
            "MW-INFERENCE-013",
            f"the run was trained on {what}: only next-token (causal) models can continue a text",
        )
    tokenizer = find_tokenizer(config.data, directory_of(config.model.builder))
    if tokenizer is None:
        raise ConfigError(
            "MW-INFERENCE-014",
            "the run has no tokenizer, which decodes the generated tokens: there is none beside its"
            " corpus; name one with --data.tokenizer=PATH/tokenizer.json",
        )
    config = config.model_copy(
        update={"data": config.data.model_copy(update={"tokenizer": str(tokenizer)})}
    )
    for name in ("dp", "cp"):
        if getattr(config.parallel, name) != 1:
            raise ConfigError(
                "MW-INFERENCE-015",
                f"parallel.{name} has no use here: all prompts go through one replica; leave"
                " it out",
            )
    load(tokenizer)
    batch = config.batch.model_copy(
        update={"micro_batch_size": num_prompts, "chunks": 1, "global_batch": num_prompts}
    )
    config = resolve(config.model_copy(update={"batch": batch}), world_size)
    draw_blueprint(config)
    return config


@dataclass(frozen=True)
class Sampling:
    """Picklable job that the launcher runs on each rank."""

    place: ModelLocation
    request: SamplingRequest
    out: Path | None = None

    def __call__(self, config: RunConfig, give_up: GiveUp = end_process) -> None:
        """Run one rank; rank 0 prints the texts. ``config``: from :func:`check`."""
        mesh = open_inference_mesh(config.parallel, config.launch, config.train.device)
        continuations = generate(config, mesh, self.place, self.request)
        close_mesh(mesh)
        if mesh.rank == 0:
            print_lines(format_texts(continuations))
            if self.out is not None:
                lines = (
                    json.dumps(each._asdict(), ensure_ascii=False) + "\n" for each in continuations
                )
                write_out(self.out, "".join(lines))


def format_texts(found: Sequence[Continuation]) -> str:
    """Return the texts; if there are several, with a heading line before each."""
    if len(found) == 1:
        return found[0].text
    return "\n".join(
        f"--- {number} of {len(found)}\n{each.text}" for number, each in enumerate(found, start=1)
    )


def generate(
    config: RunConfig, mesh: Mesh, place: ModelLocation, request: SamplingRequest
) -> list[Continuation]:
    """Generate the continuations of all prompts. Every rank calls it and gets all texts; blocks.

    Per token the ranks exchange the stages' activations along pp. The last stage all-gathers (B,
    V/tp) logits over tp. The chosen tokens, B int64, are broadcast over all ranks.
    """
    assert config.data.tokenizer is not None
    tokenizer = load(Path(config.data.tokenizer))
    known = fingerprint.read(Path(config.data.tokenizer).parent)
    ends = ends_of_document(Path(config.data.tokenizer), tokenizer, known, config.data)
    blueprint = draw_blueprint(config, mesh.tp, mesh.cp, mesh.ep)
    windows = _windows(blueprint, len(request.prompts))
    logits = _LastLogits(
        mesh.tp,
        split_vocab_size(blueprint.model.layers, blueprint.infos),
        max(tokenizer.get_vocab().values()) + 1,
    )
    has_heads = bool(blueprint.model.loss_heads)
    # head 0: the next token
    ending = (lambda output, labels: logits(output[0], labels)) if has_heads else logits
    forward, _ = open_trained(blueprint, mesh, place, ending)
    rows = [
        encode_prompt(tokenizer, prompt, known, ends) or [min(ends, default=0)]
        for prompt in request.prompts
    ]
    prompt_lengths = [len(row) for row in rows]
    ended = [False] * len(rows)
    begin = begin_id(known, tokenizer)
    input_function = None
    if config.data.document_boundaries:
        input_function = partial(with_starts, ends=ends, begin=begin)
    generators = make_generators(request, config.run.seed)
    schedule = blueprint.schedule  # in a V the last stage is on the first pp rank
    last_rank = mesh.grid.rank(Coordinates(pp_rank=schedule.rank_of(schedule.num_stages - 1)))
    with torch.inference_mode():
        for _ in range(request.num_tokens):
            _run_forward(forward, rows, windows, logits, input_function)
            chosen = torch.zeros(len(rows), dtype=torch.int64, device=mesh.device)
            if logits.values is not None and mesh.at.tp_rank == 0:
                chosen.copy_(choose(logits.values, request, generators))
            mesh.world.broadcast(chosen, last_rank).wait()
            for index, token in enumerate(chosen.tolist()):
                ended[index] = ended[index] or token in ends
                if not ended[index]:
                    rows[index].append(token)
            if all(ended):
                break
    return [
        Continuation(prompt, str(tokenizer.decode(row)), tuple(row[first:]), is_over)
        for prompt, row, first, is_over in zip(
            request.prompts, rows, prompt_lengths, ended, strict=True
        )
    ]


@dataclass
class _LastLogits:
    """Replacement for the loss function: stores the logits at each row's last token,
    and returns zeros as losses.
    """

    tp: Group
    vocab_size: int | None
    """Vocabulary size of the model if its logits are sharded over tp; None:
    each rank has all logits.
    """
    num_tokens: int
    """Vocabulary size of the tokenizer; the model's may be larger, padded for the device."""
    last: Tensor | None = None
    """(B,) int64: position of each row's last token."""
    values: Tensor | None = None
    """(B, V) logits; None: this rank has no last stage."""

    def __call__(self, output: Any, labels: Tensor) -> Tensor:
        if not isinstance(output, Tensor) or output.shape[:-1] != labels.shape:
            raise ModelError(
                "MW-INFERENCE-016",
                "the last layer does not return logits for each token, (batch, sequence,"
                " vocabulary): the model cannot generate text",
            )
        assert self.last is not None
        # (B, V) or (B, V/tp)
        mine = output[torch.arange(len(labels), device=output.device), self.last].contiguous()
        if self.vocab_size is not None:
            parts = mine.new_empty((self.tp.size * mine.shape[0], mine.shape[1]))
            self.tp.all_gather(parts, mine).wait()
            mine = (
                parts.view(self.tp.size, len(labels), -1)
                .transpose(0, 1)
                .flatten(1)[:, : self.vocab_size]
            )
        self.values = mine[:, : self.num_tokens]
        return labels.new_zeros(labels.shape, dtype=torch.float32)


class _PromptBatch(NamedTuple):
    """Feed of one micro-batch, the prompts; see :class:`meshwright.parts.StepFeed`."""

    batch: Microbatch

    def microbatch(self, m: int) -> Microbatch:
        return self.batch

    def sample_indices(self, m: int) -> Tensor:
        return self.batch.sample_indices


def _run_forward(
    forward: ForwardParts,
    rows: Sequence[Sequence[int]],
    windows: dict[int, list[ValueSpec]],
    logits: _LastLogits,
    input_function: Callable[[Tensor], dict[str, Tensor]] | None,
) -> None:
    """Run one forward over the last window of each row; ``logits`` keeps the result.
    Every rank calls it; blocks.

    ``input_function`` maps (B, S) int64 ids to the model's inputs; None: the ids themselves.
    """
    window = max(windows)
    seen = [row[-window:] for row in rows]
    length = min(size for size in windows if size >= max(map(len, seen)))
    ids = torch.zeros((len(rows), length), dtype=torch.int64)
    for index, row in enumerate(seen):
        ids[index, : len(row)] = torch.tensor(row)
    device, boundaries = forward.mesh.device, windows[length]
    for index, stage in forward.executor.stages.items():
        stage.input_spec = boundaries[index - 1] if index > 0 else None
        stage.output_spec = boundaries[index] if index < len(boundaries) else None
    # messages have the shapes of this window
    forward.executor.set_schedule(forward.executor.schedule)
    logits.last = torch.tensor([len(row) - 1 for row in seen], device=device)
    ids = ids.to(device)
    inputs = ids if input_function is None else input_function(ids)
    forward.executor.validate(
        _PromptBatch(
            Microbatch(inputs, torch.zeros_like(ids), torch.arange(len(rows), device=device))
        )
    )


def _windows(blueprint: Blueprint, num_rows: int) -> dict[int, list[ValueSpec]]:
    """Return window length -> specs of the values sent between stages, from a forward on meta."""
    lengths = [longest := blueprint.config.data.sequence_length]
    while (shorter := SHORTEST * 2 ** (len(lengths) - 1)) < longest:
        lengths.append(shorter)
    found = {}
    for length in lengths:
        ids = torch.zeros((num_rows, length), dtype=torch.int64, device="meta")
        inputs: Tensor | dict[str, Tensor] = ids
        if blueprint.config.data.document_boundaries:
            inputs = {"tokens": ids, "starts": ids.bool()}
        found[length] = describe_boundaries(blueprint.model.layers, blueprint.stages, inputs)[0]
    return found
