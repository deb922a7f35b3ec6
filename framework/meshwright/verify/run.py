"""Driver of verify: each layout runs on a pool of ranks, the plain model in this process."""

from __future__ import annotations

import functools
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from meshwright.blueprint import draw_blueprint
from meshwright.config import RunConfig
from meshwright.config.combinations.layout import Layout
from meshwright.errors import UserError
from meshwright.expert_parallel.routing import NO_ROUTING, RoutingPlan
from meshwright.model.build import configured_model
from meshwright.optimizer import peak_rate
from meshwright.parameters import DTYPES
from meshwright.traits import traits_of
from meshwright.verify.compare import ROUNDING_MARGIN, compare, relative_distances
from meshwright.verify.initial import initial_problems
from meshwright.verify.layouts import layout_config
from meshwright.verify.near_ties import NearestTie
from meshwright.verify.probe import probe_coupling
from meshwright.verify.rank import Pause, RankFindings, merge, open_verify_source, run_layout
from meshwright.verify.reference import RunNumbers, run_reference
from meshwright.verify.repetition import compare_moved, resumed_after
from meshwright.verify.report import Report, VerdictRow
from meshwright.verify.routes import Routes, of_layout, open_routes
from meshwright.verify.sources import VerifySource
from meshwright.verify.tolerance import SAME_ROUNDING, tolerance_of

RESCALED = 1.25
"""Loss factor of the float64 runs that measure rounding; not a power of two,
so that every product rounds anew.
"""
NEIGHBOURS_APART = 2.0**-7
"""Largest relative distance of neighbouring bfloat16 numbers."""
BYTES_PER_ELEMENT, MAX_SAVED_BYTES = 32, 4 * 2**30
"""Bytes of a checkpoint per parameter at most (weight, master, two states),
and the largest that verify writes.
"""
MIN_TIMEOUT_S, TIMEOUT_FACTOR = 120.0, 20.0
"""Time limit of a layout: this many times the plain run's time, but at least two minutes."""


class Pool(Protocol):
    """Pool of worker ranks; implemented by ``meshwright_launch.pool.RankPool``."""

    def run(
        self, function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = ...
    ) -> list[Any]:
        """Run ``function(rank, world_size, *args)`` on each rank and return the results
        in rank order.
        """


def micro_batch_sizes_of(global_batch: int) -> list[int]:
    """Return up to four micro-batch sizes above 1 that divide the global batch, smallest first."""
    return [size for size in range(2, global_batch + 1) if global_batch % size == 0][:4]


class Reference(NamedTuple):
    """Numbers of the plain run and its own rounding error."""

    findings: RunNumbers
    rounding: dict[str, float]
    """Rounding error of the weights, per parameter; filled for float32 only."""
    noise: dict[str, float]
    """Rounding error of the gradients, per parameter; filled for 16 bits only."""
    duration_s: float
    dtype: str

    def noise_in(self, layout: Layout, tied: Collection[str]) -> dict[str, float]:
        """Return the gradient noise that applies to a layout.

        Where all activations are rounded as in the plain run, only the ``tied`` weights have noise:
        torch sums their gradients in 16 bits, pipeline stages sum them in float32.
        """
        alike = tolerance_of(self.dtype, layout) is SAME_ROUNDING
        return {name: value for name, value in self.noise.items() if not alike or name in tied}


def reference_of(
    plain: RunConfig,
    source: VerifySource,
    steps: int,
    dtype: str,
    micro_batch_size: int,
    others: Sequence[int],
    routes: Routes | None = None,
) -> Reference:
    """Run the plain model and measure its rounding error.

    AdamW divides each gradient element by its own magnitude, so an element near zero moves by its
    rounding error alone. A single run may by chance round such an element well, hence several runs.

    Args:
        others: Micro-batch sizes of the further runs. The samples are the same; the order of
            summation differs, as it does between layouts.
        routes: recordings of the routers' choices; None: routers are neither recorded nor replayed.
    """
    start_s = time.monotonic()
    first = NO_ROUTING if routes is None else routes.of_reference(micro_batch_size)
    again = NO_ROUTING if routes is None else routes.of_rounding(micro_batch_size)
    found = run_reference(plain, source, steps, DTYPES[dtype], micro_batch_size, routing=first)
    duration_s = time.monotonic() - start_s

    def rounding_errors(
        steps: int, tensors_of: Callable[[RunNumbers], dict[str, Tensor]]
    ) -> dict[str, float]:
        """Return, per parameter, the largest distance of the runs from a float64 run."""
        exact = tensors_of(
            run_reference(plain, source, steps, torch.float64, micro_batch_size, routing=again)
        )
        runs = [
            found,
            *(
                run_reference(plain, source, steps, DTYPES[dtype], size, routing=again)
                for size in others
            ),
        ]
        distances = [relative_distances(tensors_of(run), exact) for run in runs]
        return {name: max(distance[name] for distance in distances) for name in distances[0]}

    rounding, noise = {}, {}
    if dtype == "float32":
        rounding = rounding_errors(steps, lambda run: run.weights)
        if plain.optimizer.state_dtype == "bfloat16":
            other = other_rounding_of_a_moment(found.weights, peak_rate(plain.optimizer))
            rounding = {name: max(error, other[name]) for name, error in rounding.items()}
    # two gradients of step 1 may lie apart by twice their rounding error
    if dtype in ("bfloat16", "float16"):
        noise = {
            name: 2.0 * error
            for name, error in rounding_errors(1, lambda run: run.gradients).items()
        }
    return Reference(found, rounding, noise, duration_s, dtype)


def other_rounding_of_a_moment(
    weights: Mapping[str, Tensor], learning_rate: float
) -> dict[str, float]:
    """Return, per parameter, the relative distance of weights of
    which one had its moment rounded the other way.

    Where a float32 moment lies at the border that its random bits set, two orders of summation
    round it to different neighbours in bfloat16. The weight's next update then differs by their
    distance, as a share of ``learning_rate``.
    """
    moved = {
        name: tensor.clone(memory_format=torch.contiguous_format)
        for name, tensor in weights.items()
    }
    for tensor in moved.values():
        tensor.view(-1)[:1] += NEIGHBOURS_APART * learning_rate
    return relative_distances(moved, weights)


class Rounding(NamedTuple):
    """Relative rounding errors of a float64 reference,
    per parameter (see :func:`relative_distances`).
    """

    weights: dict[str, float]
    gradients: dict[str, float]

    @property
    def noise(self) -> dict[str, float]:
        """Distance that rounding alone may put between the gradients of a layout
        and the reference's.
        """
        return {name: ROUNDING_MARGIN * error for name, error in self.gradients.items()}


def rounding_of(
    found: RunNumbers,
    plain: RunConfig,
    source: VerifySource,
    steps: int,
    sizes: Sequence[int],
    routing: RoutingPlan = NO_ROUTING,
) -> Rounding:
    """Return the rounding errors of a float64 run.

    They are the largest distances between ``found``, that run, and plain runs that differ by
    rounding alone. Other micro-batch ``sizes`` sum in another order, and a loss scaled by
    :data:`RESCALED` rounds backward's products anew.
    """
    runs = [
        run_reference(plain, source, steps, torch.float64, size, RESCALED, routing)
        for size in sizes
    ]

    def largest(tensors_of: Callable[[RunNumbers], dict[str, Tensor]]) -> dict[str, float]:
        distances = [relative_distances(tensors_of(run), tensors_of(found)) for run in runs]
        return {name: max(distance[name] for distance in distances) for name in distances[0]}

    return Rounding(largest(lambda run: run.weights), largest(lambda run: run.gradients))


def failure_of(error: Exception) -> str:
    """Return ``refused: reason`` for what a user can change, ``cannot run:
    reason`` with file and line for the rest.
    """
    cause = error if isinstance(error, UserError) else error.__cause__
    if isinstance(cause, UserError):
        return f"{'refused' if cause.exit_code == 2 else 'cannot run'}: {cause}"
    lines = str(error).splitlines() or [type(error).__name__]
    ranks = getattr(error, "ranks", None)
    if ranks is not None:  # a timeout: each silent rank's stack, innermost frame first
        stacks = re.findall(
            r"^rank (\d+):\n(?:(?!rank |  File).*\n)*  (File .*)", str(error), re.MULTILINE
        )
        return f"cannot run: {lines[0]} {'; '.join(f'rank {rank}: {frame}' for rank, frame in stacks)}".rstrip()
    frames = re.findall(r'^  File "(.+)", line (\d+)', str(error), re.MULTILINE)
    frames = [frame for frame in frames if "site-packages" not in frame[0]] or frames
    where = f" (at {frames[-1][0]}:{frames[-1][1]})" if frames else ""
    return f"cannot run: {lines[0]}{where}"


class Verification:
    """Comparison of layouts of one model with its plain run, on the same samples.

    Raises:
        UserError: the model or its samples cannot be built, or the model does not train in plain
            torch.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        global_batch: int,
        steps: int = 10,
        dtype: str = "float64",
        random_tokens: bool,
        routing: tuple[str | None, Path | None] = (None, None),
    ) -> None:
        """Build the model once. ``routing``: "record" or "replay", and a directory:
        see routes.py.
        """
        self.config, self.global_batch, self.steps, self.dtype = config, global_batch, steps, dtype
        self.random_tokens = random_tokens
        self.plain = layout_config(config, Layout(), global_batch, dtype)
        # one error for a model that no layout supports, not one per layout
        drawn = draw_blueprint(self.plain)
        self.routes = open_routes(drawn, *routing, random_tokens)
        self.source = open_verify_source(self.plain, random_tokens)
        self.traits = probe_coupling(traits_of(self.plain), self.plain, self.source)
        model = configured_model(self.plain)
        self.problems = initial_problems(self.plain.model, self.plain.run, model)
        self.tied = {names[0] for names in model.tied}
        self.nearest_tie = NearestTie()
        self._folder = tempfile.TemporaryDirectory(prefix="meshwright-verify-")
        self._saved: tuple[Layout, Pause] | None = None
        """Last layout that was stopped in the middle, and the place of its checkpoint."""
        self.saves = BYTES_PER_ELEMENT * self.traits.num_parameters <= MAX_SAVED_BYTES
        """False for a model too large for checkpoints in a temporary folder:
        layouts are then not resumed.
        """
        self._reference = functools.cache(self._run_reference)
        self._rounding = functools.cache(self._measure_rounding)

    def _run_reference(self, micro_batch_size: int) -> Reference:
        others = () if self.traits.couples_samples else micro_batch_sizes_of(self.global_batch)
        of_run = self.source, self.steps, self.dtype, micro_batch_size, others
        found = reference_of(self.plain, *of_run, self.routes)
        self.nearest_tie = min(self.nearest_tie, found.findings.nearest_tie)
        return found

    def _measure_rounding(self, micro_batch_size: int) -> Rounding:
        """Measure the rounding of a float64 reference, by up to three more plain runs."""
        others = () if self.traits.couples_samples else micro_batch_sizes_of(self.global_batch)[:2]
        found = self._reference(micro_batch_size).findings
        routing = NO_ROUTING
        if self.routes is not None:
            routing = self.routes.of_rounding(micro_batch_size)
        return rounding_of(
            found, self.plain, self.source, self.steps, (micro_batch_size, *others), routing
        )

    def compare_layout(self, layout: Layout, pool: Pool, *, is_repeated: bool = True) -> VerdictRow:
        """Run a layout and compare it with the reference by the tolerances of the precision.

        A layout that is refused, raises, hangs or loses a rank gives a row with the reason.

        Args:
            is_repeated: True to run the layout twice; the runs must agree bit for bit.
        """
        # samples that depend on each other need the same micro-batches in the plain run
        micro_batch_size = self.traits.samples_together(layout)
        expected = self._reference(micro_batch_size)
        timeout_s = max(MIN_TIMEOUT_S, TIMEOUT_FACTOR * expected.duration_s)
        moved: tuple[list[str], str] = [], ""
        pause: Pause | None = None
        try:
            config = layout_config(self.config, layout, self.global_batch, self.dtype)
            draw_blueprint(config)  # refuse an impossible layout before any rank starts
            arguments = (config.model_dump_json(), self.steps, self.random_tokens)
            run = partial(pool.run, run_layout, layout.size, *arguments, timeout_s=timeout_s)
            with of_layout(self.routes, micro_batch_size) as routing:
                runs = [run(routing)]
                other = ""
                if self.routes is not None:
                    other = self.routes.difference(routing.record, micro_batch_size)
                if is_repeated:
                    pause = self._pause()
                    runs.append(run(routing, pause))
                    if pause is not None:
                        moved = self._compare_moved(
                            layout, expected.findings, partial(run, routing)
                        )
        except Exception as error:  # a defect of one layout, in whatever form
            return VerdictRow(str(layout), failure=failure_of(error))
        found, again = merge(runs[0]), None
        if is_repeated:
            again = merge(runs[1])._replace(resumed_after=0 if pause is None else pause.step)
        tolerance, noise = tolerance_of(self.dtype, layout), expected.noise_in(layout, self.tied)
        row = compare(
            str(layout), found, again, expected.findings, tolerance, expected.rounding, noise
        )
        if not row.passed and self.dtype == "float64" and not other:
            # rounding is measured for a layout that misses a tolerance, and costs nothing otherwise
            rounding = self._rounding(micro_batch_size)
            row = compare(
                str(layout),
                found,
                again,
                expected.findings,
                tolerance,
                rounding.weights,
                rounding.noise,
            )
        problems = [*row.problems, *filter(None, [other]), *moved[0]]
        row = row._replace(problems=problems, suspect=row.suspect or moved[1])
        if pause is not None:
            self._keep(layout, pause, row)
        return row

    def _pause(self) -> Pause | None:
        """Return the stop in the middle of a layout's second run; None for a run of one step,
        or a large model.
        """
        after = resumed_after(self.steps)
        if not after or not self.saves:
            return None
        return Pause(after, Path(tempfile.mkdtemp(dir=self._folder.name)))

    def _compare_moved(
        self, layout: Layout, expected: RunNumbers, run: Callable[[Pause], list[RankFindings]]
    ) -> tuple[list[str], str]:
        """Resume a layout from the checkpoint of the last right one,
        and compare the rest of the run.
        """
        if self._saved is None:
            return [], ""
        other, pause = self._saved
        together = self.traits.samples_together
        fits = together(other) == together(layout)
        if other == layout or not fits:
            return [], ""
        found = merge(run(pause._replace(is_saved=True)))
        return compare_moved(str(other), found, expected, tolerance_of(self.dtype, layout))

    def _keep(self, layout: Layout, pause: Pause, row: VerdictRow) -> None:
        """Keep the checkpoint of a layout that is right for the next one,
        whose verdict a wrong one would falsify.
        """
        if not row.passed:
            shutil.rmtree(pause.directory)
            return
        if self._saved is not None:
            shutil.rmtree(self._saved[1].directory)
        self._saved = layout, pause

    def report(self, rows: list[VerdictRow]) -> Report:
        """Return the report of these rows."""
        data = self.config.data
        length = "" if data.builder is not None else f" of {data.sequence_length} tokens"
        title = (
            f"{self.config.model.builder}, {self.traits.num_parameters:,} parameters, {self.dtype},"
            f" {self.steps} steps of {self.global_batch} samples{length}, against one plain process"
        )
        return Report(
            title, rows, self.problems, tuple(filter(None, [self.nearest_tie.sentence(self.dtype)]))
        )


def verify(
    config: RunConfig,
    layouts: Sequence[Layout],
    pool: Pool,
    *,
    global_batch: int,
    steps: int = 10,
    dtype: str = "float64",
    random_tokens: bool = False,
) -> Report:
    """Compare each layout, run twice, with the plain run (:class:`Verification`)."""
    verification = Verification(
        config, global_batch=global_batch, steps=steps, dtype=dtype, random_tokens=random_tokens
    )
    return verification.report([verification.compare_layout(layout, pool) for layout in layouts])
