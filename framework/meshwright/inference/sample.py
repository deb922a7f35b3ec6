"""Text generation with a trained model, in one process or on the ranks of any layout;
greedy text is the same on all.

This serves to inspect a model; for serving, export it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from meshwright.blueprint import draw_blueprint
from meshwright.config import RunConfig, resolve
from meshwright.config.combinations.axes import WHOLE_SAMPLES
from meshwright.config.functions import directory_of
from meshwright.data import fingerprint
from meshwright.data.tokenizer import find_tokenizer, load
from meshwright.errors import ConfigError
from meshwright.inference.choice import SamplingRequest, choose, make_generators
from meshwright.inference.generation import continue_rows
from meshwright.inference.load import (
    ModelLocation,
    config_for,
    locate,
    open_inference_mesh,
)
from meshwright.inference.prompts import encode_prompt, ends_of_document
from meshwright.inference.rows import open_rows
from meshwright.mesh import Grid
from meshwright.mesh.mesh import Mesh, close_mesh, open_mesh
from meshwright.system.atomic import write_out
from meshwright.system.process import GiveUp, end_process
from meshwright.terminal.output import print_lines

SAME_NUMBERS = ("--train.dtype=float32", "--train.linear=dtype", "--train.fp8_keep=none")
"""Overrides with which logits are the same on any layout, up to rounding in float32."""
SAME_TEXT = (
    *SAME_NUMBERS,
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
    config = text_config(config)
    for name in ("dp", "cp"):
        if getattr(config.parallel, name) != 1:
            raise ConfigError(
                "MW-INFERENCE-015",
                f"parallel.{name} has no use here: all prompts go through one replica; leave"
                " it out",
            )
    batch = config.batch.model_copy(
        update={"micro_batch_size": num_prompts, "chunks": 1, "global_batch": num_prompts}
    )
    config = resolve(config.model_copy(update={"batch": batch}), world_size)
    draw_blueprint(config)
    return config


def text_config(config: RunConfig) -> RunConfig:
    """Return the configuration of a run that was trained on text, with its tokenizer.

    Raises:
        ConfigError: it was trained on something else, or has no tokenizer.
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
    load(tokenizer)
    data = config.data.model_copy(update={"tokenizer": str(tokenizer)})
    return config.model_copy(update={"data": data})


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
    """Generate the continuations of all prompts. Every rank calls it and gets all texts; blocks."""
    assert config.data.tokenizer is not None
    tokenizer = load(Path(config.data.tokenizer))
    known = fingerprint.read(Path(config.data.tokenizer).parent)
    ends = ends_of_document(Path(config.data.tokenizer), tokenizer, known, config.data)
    forward, _ = open_rows(config, mesh, place, tokenizer, known, ends)
    rows = [
        encode_prompt(tokenizer, prompt, known, ends) or [min(ends, default=0)]
        for prompt in request.prompts
    ]
    generators = make_generators(request, config.run.seed)

    def choose_tokens(due: Sequence[int], logits: Tensor) -> Tensor:
        return choose(logits, request, [generators[row] for row in due])

    found = continue_rows(
        forward,
        rows,
        [request.num_tokens] * len(rows),
        ends,
        choose_tokens,
        max(tokenizer.get_vocab().values()) + 1,
    )
    return [
        Continuation(prompt, str(tokenizer.decode([*row, *new.ids])), new.ids, new.ended)
        for prompt, row, new in zip(request.prompts, rows, found, strict=True)
    ]
