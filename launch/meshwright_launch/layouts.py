"""Command ``meshwright layouts``: which layouts a configuration can have, and why not the others."""

from __future__ import annotations

import argparse
import copy
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from meshwright.errors import UserError
from meshwright.terminal.output import put

if TYPE_CHECKING:
    from meshwright.blueprint import WholeModel
    from meshwright.config import RunConfig
    from meshwright.config.combinations.features import Traits
    from meshwright.config.combinations.layout import Layout

MOST_LINES = 40
"""Most combinations of degrees that are listed."""
AXIS_OF = {"sequence": "tp", "order": "cp", "exchange": "cp", "schedule": "pp"}
"""Field of a layout that a word sets -> the axis that the word is tried with; others: dp."""


class Answer(NamedTuple):
    """Answer to the question whether a layout is possible."""

    refusal: str = ""
    """First line of the error that refuses it, with its code; "" if it is possible."""
    code: str = ""


class DescribedModel(NamedTuple):
    """Configuration with its model, described once for all layouts."""

    config: RunConfig
    whole: WholeModel
    traits: Traits
    global_batch: int
    samples_together: int
    """The configuration's own micro-batch size; with nn.SyncBatchNorm that of all replicas."""

    def sized(self, layout: Layout) -> Layout:
        """Return a layout with the configuration's own micro-batch size, where that divides the
        batch: fewer micro-batches than with single samples, whose schedules take long to draw.
        With nn.SyncBatchNorm the replicas share these samples.
        """
        sized = self.traits.with_samples(layout, self.samples_together)
        if sized is None or self.global_batch % (sized.dp * sized.micro_batch_size):
            return layout
        return sized

    def try_layout(self, layout: Layout) -> Answer:
        """Draw the blueprint of a layout, as a launch does."""
        from meshwright.blueprint import draw_blueprint
        from meshwright.config import resolve
        from meshwright.config.combinations.apply import with_layout
        from meshwright.config.combinations.features import features_of
        from meshwright.config.combinations.refused import find_refused

        try:
            config = with_layout(self.config, layout, self.global_batch)
            config = config.replace(launch={"processes": "auto"})
            whole = None  # with recompute the model is described anew: its parts must be called
            if layout.recompute == "none":
                # a model is sharded in place: each layout gets a copy, on meta
                whole = self.whole._replace(plain=copy.deepcopy(self.whole.plain))
            draw_blueprint(resolve(config, layout.size), whole=whole)
        except UserError as error:
            problem = error.problems[0]
            reason = problem.message.splitlines()[0].removeprefix(f"layout {layout}: ")
            return Answer(f"{reason} [{problem.code}]", problem.code)
        # what only ranks find, when they build
        row = find_refused(features_of(layout, self.traits), always=True)
        if row is not None:
            return Answer(f"{row.first} with {row.second}: {row.why} [{row.code}]", row.code)
        return Answer()


def layouts(options: argparse.Namespace, overrides: list[str]) -> int:
    """Print which degrees and words of a layout are possible, with the reason of each other.

    Return 1 if a layout of ``--layout`` is not possible, else 0.
    """
    from meshwright.config import default_world_size, load
    from meshwright.config.combinations.layout import parse_layout

    config = load(options.config, overrides)
    wanted = [parse_layout(text) for text in options.layout or []]
    ranks = options.ranks or default_world_size(config.parallel, config.launch, 0)
    described = _describe(config, ranks)
    put(
        f"{config.model.builder}, {described.traits.num_layers} layers,"
        f" {described.traits.num_parameters:,} parameters; {described.global_batch} samples in a step"
    )
    if wanted:
        answers = [described.try_layout(layout) for layout in wanted]
        for layout, answer in zip(wanted, answers, strict=True):
            put(f"  {layout}: {answer.refusal or 'possible'}")
        return 1 if any(answer.refusal for answer in answers) else 0
    degrees = _put_axes(described, ranks)
    _put_words(described, degrees)
    _put_combinations(described, degrees, ranks)
    return 0


def _describe(config: RunConfig, ranks: int) -> DescribedModel:
    """Build the model once, on one rank, for the samples of a step on ``ranks`` ranks.

    Raises:
        UserError: the model or the samples cannot be built.
    """
    from meshwright.blueprint import describe
    from meshwright.config import batch_numbers, default_world_size, resolve
    from meshwright.config.combinations.apply import with_layout
    from meshwright.config.combinations.layout import Layout
    from meshwright.traits import find_traits

    size = default_world_size(config.parallel, config.launch, 0)
    if config.parallel.known_dp is None and ranks % config.parallel.ranks_per_batch == 0:
        size = ranks
    config = resolve(config, size)
    batch = batch_numbers(config.batch)
    own = Layout(micro_batch_size=batch.micro_batch_size)
    alone = with_layout(config, own, batch.global_batch)
    whole = describe(alone)
    traits = find_traits(alone, whole.plain, whole.shapes, whole.forward.running)
    run = own._replace(dp=config.parallel.known_dp or 1)
    together = traits.samples_together(run) if traits.is_synchronised else own.micro_batch_size
    return DescribedModel(config, whole, traits, batch.global_batch, together)


def _put_axes(described: DescribedModel, ranks: int) -> dict[str, list[int]]:
    """Print the degrees of each axis that the model can have by itself; return them."""
    from meshwright.config.combinations.axes import AXES
    from meshwright.config.combinations.layout import Layout

    put(f"\ndegrees, each alone, of the divisors of {ranks} ranks:")
    possible: dict[str, list[int]] = {}
    for axis in AXES:
        refusals: dict[str, tuple[str, list[int]]] = {}  # by code: the first reason stands for all
        possible[axis.name] = [1]
        for degree in range(2, ranks + 1):
            if ranks % degree:
                continue
            values: dict[str, Any] = {axis.name: degree}
            layout = Layout(**values)
            if axis.name == "ep":  # the ranks that share experts are replicas
                layout = layout._replace(dp=degree)
            answer = described.try_layout(described.sized(layout))
            if answer.refusal:
                refusals.setdefault(answer.code, (answer.refusal, []))[1].append(degree)
            else:
                possible[axis.name].append(degree)
        found = " ".join(map(str, possible[axis.name]))
        put(f"  {axis.name}  {found:<16} splits the {axis.parts}")
        for refusal, refused in refusals.values():
            put(f"      not {' '.join(map(str, refused))}: {refusal}")
    return possible


def _put_words(described: DescribedModel, degrees: dict[str, list[int]]) -> None:
    """Print the words of a layout that are possible, and the reason of each other."""
    possible, refused = [], []
    for word, axis, layout in _words(degrees):
        if layout is None:
            refused.append(f"{word}: needs {axis} > 1, which is not possible here")
            continue
        answer = described.try_layout(described.sized(layout))
        if answer.refusal:
            refused.append(f"{word}: {answer.refusal}")
        else:
            possible.append(word)
    put(f"\nwords of a layout (docs/verify.md):\n  possible: {', '.join(possible)}")
    for line in refused:
        put(f"  not {line}")


def _words(degrees: dict[str, list[int]]) -> Iterator[tuple[str, str, Layout | None]]:
    """Yield each word with its axis and the smallest layout that it means something in; None: the
    axis has one rank in every layout.
    """
    from meshwright.config.combinations.layout import SCHEDULE_FILE, SWITCHES, parse_layout

    words = {f"zero{stage}": "zero" for stage in range(4)}
    words |= {word: next(iter(values)) for word, values in SWITCHES.items()}
    for word, field in words.items():
        if word in ("zigzag", SCHEDULE_FILE):  # the default; it needs a file
            continue
        axis = AXIS_OF.get(field, "dp")
        degree = next((degree for degree in degrees[axis] if degree > 1), None)
        if degree is None and axis != "dp":
            yield word, axis, None
            continue
        prefix = f"{axis}{degree}," if degree is not None else ""
        if word == "step":  # the default below ZeRO-2
            prefix += "zero2,"
        yield word, axis, parse_layout(prefix + word)


def _put_combinations(described: DescribedModel, degrees: dict[str, list[int]], ranks: int) -> None:
    """Print the combinations of possible degrees that fill the ranks, with their ep."""
    from meshwright.config.combinations.features import features_of
    from meshwright.config.combinations.layout import Layout
    from meshwright.config.combinations.refused import find_refused
    from meshwright.config.combinations.sizes import LayoutSizes, fits

    data = described.config.data
    length = data.sequence_length if data.builder is None else 0
    sizes = LayoutSizes.of(described.traits, described.global_batch, length)
    lines = []
    axes = ("dp", "pp", "cp", "tp")
    for combination in itertools.product(*(sorted(degrees[axis])[::-1] for axis in axes)):
        values: dict[str, Any] = dict(zip(axes, combination, strict=True))
        layout = Layout(**values)
        if layout.size != ranks:
            continue
        eps = []
        for ep in degrees["ep"]:
            with_ep = layout._replace(ep=ep, sequence=ep > 1 and layout.tp > 1)
            refused = find_refused(features_of(with_ep, described.traits), always=True)
            if fits(with_ep, sizes) and refused is None:
                eps.append(str(ep))
        if eps:
            named = [f"{axis}{n}" for axis, n in zip(axes, combination, strict=True) if n > 1]
            shared = f"  ep {' '.join(eps)}" if eps != ["1"] else ""
            lines.append(f"  {','.join(named) or 'dp1'}{shared}")
    put(f"\n{len(lines)} combinations of these degrees fill {ranks} ranks:")
    for line in lines[:MOST_LINES]:
        put(line)
    if len(lines) > MOST_LINES:
        put(f"  and {len(lines) - MOST_LINES} more")
    put("\nTry one: meshwright layouts CONFIG --layout dp2,pp2,zb_v; its cost: meshwright plan")
