"""Driver of verify: run each layout on a pool of ranks, the plain model in this process, and compare."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from meshwright.blueprint import DTYPES, draw_blueprint
from meshwright.config import RunConfig
from meshwright.errors import UserError
from meshwright.model.build import build_model
from meshwright.tools.verify.compare import SAME_ROUNDING, bar_of, compare, relative_distances
from meshwright.tools.verify.initial import initial_problems
from meshwright.tools.verify.layouts import Layout, layout_config
from meshwright.tools.verify.rank import RankFindings, merge, open_verify_source, run_layout
from meshwright.tools.verify.reference import RunNumbers, run_reference
from meshwright.tools.verify.report import Report, VerdictRow
from meshwright.tools.verify.sources import VerifySource
from meshwright.tools.verify.traits import probe_coupling, traits_of

__all__ = [
    "Pool",
    "RankFindings",
    "groupings",
    "merge",
    "open_verify_source",
    "run_layout",
    "verify",
]

LEAST_TIMEOUT_S, TIMEOUT_FACTOR = 120.0, 20.0
"""Time limit of a layout: this many times the plain run's time, but at least two minutes."""


class Pool(Protocol):
    """Pool of worker ranks; implemented by ``meshwright.launch.pool.RankPool``."""

    def run(self, function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = ...) -> list[Any]:
        """Run ``function(rank, world_size, *args)`` on each rank and return the results in rank order."""


def groupings(global_batch: int) -> list[int]:
    """Return up to four micro-batch sizes above 1 that divide the global batch, smallest first."""
    return [size for size in range(2, global_batch + 1) if global_batch % size == 0][:4]


class Reference(NamedTuple):
    """Findings of the plain run and its own rounding error."""

    findings: RunNumbers
    rounding: dict[str, float]
    """Rounding error of the weights, per parameter; filled for float32 only."""
    noise: dict[str, float]
    """Rounding error of the gradients, per parameter; filled for bfloat16 only."""
    passed_s: float

    def noise_in(self, layout: Layout, tied: Collection[str]) -> dict[str, float]:
        """Return the gradient noise that applies to a layout.

        Where all activations are rounded as in the plain run, only the ``tied`` weights have noise: torch sums their
        gradients in bfloat16, pipeline stages sum them in float32.
        """
        alike = bar_of("bfloat16", layout) is SAME_ROUNDING
        return {name: value for name, value in self.noise.items() if not alike or name in tied}


def reference_of(
    plain: RunConfig, source: VerifySource, steps: int, dtype: str, micro_batch_size: int, others: Sequence[int]
) -> Reference:
    """Run the plain model and measure its rounding error.

    AdamW divides each gradient element by its own magnitude, so an element near zero moves by its rounding error alone.
    A single run may by chance round such an element well, hence several runs.

    Args:
        others: micro-batch sizes of the further runs. The samples are the same; the order of summation differs, as it
            does between layouts.
    """
    start_s = time.monotonic()
    found = run_reference(plain, source, steps, DTYPES[dtype], micro_batch_size)
    passed_s = time.monotonic() - start_s

    def rounding_errors(steps: int, tensors_of: Callable[[RunNumbers], dict[str, Tensor]]) -> dict[str, float]:
        """Return, per parameter, the largest distance of the runs from a float64 run."""
        exact = tensors_of(run_reference(plain, source, steps, torch.float64, micro_batch_size))
        runs = [found, *(run_reference(plain, source, steps, DTYPES[dtype], size) for size in others)]
        distances = [relative_distances(tensors_of(run), exact) for run in runs]
        return {name: max(distance[name] for distance in distances) for name in distances[0]}

    rounding, noise = {}, {}
    if dtype == "float32":
        rounding = rounding_errors(steps, lambda run: run.weights)
    if dtype == "bfloat16":  # two gradients of step 1 may lie apart by twice their rounding error
        noise = {name: 2.0 * error for name, error in rounding_errors(1, lambda run: run.gradients).items()}
    return Reference(found, rounding, noise, passed_s)


def failure_of(error: Exception) -> str:
    """Return ``refused: reason`` for what a user can change, ``cannot run: reason`` with file and line for the rest."""
    cause = error if isinstance(error, UserError) else error.__cause__
    if isinstance(cause, UserError):
        return f"{'refused' if cause.exit_code == 2 else 'cannot run'}: {cause}"
    lines = str(error).splitlines() or [type(error).__name__]
    ranks = getattr(error, "ranks", None)
    if ranks is not None:  # a timeout: each silent rank's stack, innermost frame first
        stacks = re.findall(r"^rank (\d+):\n(?:(?!rank |  File).*\n)*  (File .*)", str(error), re.MULTILINE)
        return f"cannot run: {lines[0]} {'; '.join(f'rank {rank}: {frame}' for rank, frame in stacks)}".rstrip()
    frames = re.findall(r'^  File "(.+)", line (\d+)', str(error), re.MULTILINE)
    frames = [frame for frame in frames if "site-packages" not in frame[0]] or frames
    where = f" (at {frames[-1][0]}:{frames[-1][1]})" if frames else ""
    return f"cannot run: {lines[0]}{where}"


def verify(
    config: RunConfig,
    layouts: Sequence[Layout],
    pool: Pool,
    *,
    global_batch: int,
    steps: int = 10,
    dtype: str = "float64",
    random_tokens: bool = False,
    twice: Collection[Layout] | None = None,
    on_row: Callable[[VerdictRow], None] = lambda row: None,
) -> Report:
    """Run the reference once and each layout, and compare them by the tolerances of the precision.

    A layout that is refused, raises, hangs or loses a rank becomes a row with the reason; the other layouts still run.

    Args:
        twice: layouts to run a second time, which must repeat bit for bit; None: all layouts.
        on_row: called with each row as soon as it is finished.

    Raises:
        UserError: the model or its samples cannot be built, or the model does not train in plain torch.
    """
    plain = layout_config(config, Layout(), global_batch, dtype)
    draw_blueprint(plain)  # a model that no layout takes is one message
    source = open_verify_source(plain, random_tokens)
    traits = probe_coupling(traits_of(plain), plain, source)
    model = build_model(plain.model.builder, plain.model.options, plain.run.seed)
    problems, tied = initial_problems(plain, model), {names[0] for names in model.tied}

    @functools.cache
    def reference(micro_batch_size: int) -> Reference:
        others = () if traits.couples_samples else groupings(global_batch)
        return reference_of(plain, source, steps, dtype, micro_batch_size, others)

    rows = []
    for layout in layouts:
        # samples that see each other in their micro-batch must have the same company in the plain run
        expected = reference(layout.micro_batch_size if traits.couples_samples else 1)
        timeout_s = max(LEAST_TIMEOUT_S, TIMEOUT_FACTOR * expected.passed_s)
        try:
            laid_out = layout_config(config, layout, global_batch, dtype)
            draw_blueprint(laid_out)  # what cannot be is said here, before anything runs
            text, runs = laid_out.model_dump_json(), []
            for _ in range(2 if twice is None or layout in twice else 1):
                runs.append(pool.run(run_layout, layout.size, text, steps, random_tokens, timeout_s=timeout_s))
        except Exception as error:  # a defect of one layout, in whatever form
            row = VerdictRow(str(layout), failure=failure_of(error))
        else:
            found = [merge(each) for each in runs]
            again = found[1] if len(found) > 1 else None
            bar, noise = bar_of(dtype, layout), expected.noise_in(layout, tied)
            row = compare(str(layout), found[0], again, expected.findings, bar, expected.rounding, noise)
        rows.append(row)
        on_row(row)
    of_tokens = "" if config.data.builder is not None else f" of {config.data.sequence_length} tokens"
    return Report(
        f"{config.model.builder}, {traits.num_parameters:,} parameters, {dtype}, {steps} steps of "
        f"{global_batch} samples{of_tokens}, against one plain process",
        rows,
        problems,
    )
