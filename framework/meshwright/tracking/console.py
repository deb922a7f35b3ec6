"""Console output: a progress bar on a terminal, plain lines elsewhere (a log file, CI, srun)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.text import Text

from meshwright.terminal.format import format_count, format_duration, format_gib
from meshwright.terminal.output import make_printable, visible
from meshwright.tracking.record import StepRecord

SMOOTHING = 0.9
"""Weight of earlier steps in the running mean of the step time, which gives the remaining time."""


def step_lines(
    record: StepRecord, total_steps: int, left_s: float, unit: str = "tokens"
) -> list[str]:
    """Format a step as one plain line, in forms of falling length. ``left_s``:
    estimated remaining seconds.
    """
    step = f"step {record.step:>{len(str(total_steps))}}/{total_steps}"
    left = format_duration(left_s)
    forms = ["  ".join([step, *numbers, f"{left} left"]) for numbers in _numbers(record, unit)]
    return [*forms, "  ".join([step, *_numbers(record, unit)[-1], left])]


def validation_line(record: StepRecord) -> str:
    """Format the validation of a record as one line. The record must have one."""
    assert record.validation_loss is not None
    text = f"validation at step {record.step}: loss {record.validation_loss:.4f}"
    if record.validation_perplexity is not None:
        text += f", perplexity {record.validation_perplexity:.4g}"
    return text


def _numbers(record: StepRecord, unit: str) -> list[list[str]]:
    """Return the numbers of a step in forms of falling length;
    each omits the least important of the form before.
    """
    loss = f"loss {record.loss:.4f}{' (skipped)' if record.skipped else ''}"
    if record.loss_scale is not None:
        loss += f"  scale {record.loss_scale:.3g}"
    norm, rate = f"norm {record.grad_norm:.3g}", f"lr {record.learning_rate:.2e}"
    speed, step_s = format_count(record.tokens_per_s), f"{record.step_s:.3g} s/step"
    memory = format_gib(record.memory_bytes)
    return [
        [loss, f"grad {norm}", rate, f"{speed} {unit}/s", step_s, memory],
        [loss, f"grad {norm}", rate, f"{speed} {unit}/s", memory],
        [loss, norm, rate, f"{speed} {unit}/s", memory],
        [loss, norm, rate, f"{speed} {unit}/s"],
        [loss, norm, rate, f"{speed}/s"],
        [loss, norm, rate],
        [loss, norm],
        [loss],
    ]


class _Fitting:
    """Choice of the longest form that fits. Once shortened it stays so:
    the lines of a run keep the same columns.
    """

    def __init__(self) -> None:
        self._form = 0

    def __call__(self, forms: Sequence[str], width: int) -> str:
        """Return the first form that has at most ``width`` columns, or the shortest one."""
        while len(forms[self._form]) > width and self._form + 1 < len(forms):
            self._form += 1
        return forms[self._form]


class _Bar(Progress):
    """Progress bar with the numbers on a line below, which fit into the terminal."""

    def __init__(self, console: Console) -> None:
        self.numbers = ""
        columns = (
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:.0f} %"),
            TextColumn("{task.fields[left]} left"),
        )
        super().__init__(*columns, console=console, expand=True, refresh_per_second=4)

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        yield Text(self.numbers)


class ConsoleSink:
    """Sink of the console: a bar on a terminal, with validations above it, otherwise plain lines.

    Lines fit into the terminal, or into COLUMNS, or into 80 columns: shorter forms leave out what
    matters less. Plain lines appear every ``log_every`` steps, for the first step of this process
    and for the last of the run.
    """

    def __init__(
        self,
        total_steps: int,
        log_every: int = 1,
        console: Console | None = None,
        unit: str = "tokens",
    ) -> None:
        self.total_steps = total_steps
        self.unit = unit
        self.log_every = log_every
        make_printable()  # a script of the user's own may have its streams as Python opened them
        self._console = console or Console()
        self._bar: _Bar | None = None
        self._task = TaskID(0)
        self._fit = _Fitting()
        self._num_steps = 0
        self._step_s = 0.0

    def open(self) -> None:
        """Show nothing yet: the bar appears with the first record,
        because other output uses the screen until then.
        """

    def write(self, record: StepRecord) -> None:
        left_s = self._left_s(record)
        if self._console.is_terminal:
            self._draw(record, left_s)
        elif (
            self._num_steps == 1
            or record.step % self.log_every == 0
            or record.step >= self.total_steps
        ):
            self._print(
                self._fit(
                    step_lines(record, self.total_steps, left_s, self.unit), self._console.width
                )
            )
        if record.validation_loss is not None:
            self._print(validation_line(record))

    def close(self, failed: bool = False) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _draw(self, record: StepRecord, left_s: float) -> None:
        if self._bar is None:
            self._bar = _Bar(self._console)
            self._task = self._bar.add_task("", total=self.total_steps, left="")
            self._bar.start()
        forms = ["  ".join(numbers) for numbers in _numbers(record, self.unit)]
        self._bar.numbers = self._fit(forms, self._console.width)
        self._bar.update(self._task, completed=record.step, left=format_duration(left_s))

    def _print(self, line: str) -> None:
        """Print one whole line, without wrapping or colour, and flush it."""
        self._console.print(visible(line), soft_wrap=True, markup=False, highlight=False)
        self._console.file.flush()

    def _left_s(self, record: StepRecord) -> float:
        """Estimate the remaining seconds from a running mean of the step time,
        without the first step (warm-up).
        """
        self._num_steps += 1
        if self._num_steps <= 2:
            self._step_s = record.step_s
        else:
            self._step_s = SMOOTHING * self._step_s + (1 - SMOOTHING) * record.step_s
        return self._step_s * max(0, self.total_steps - record.step)
