"""Commands that show the present and past of a run, and shell completion."""

from __future__ import annotations

from pathlib import Path

from meshwright.launch import commands
from meshwright.launch.arguments.common import Added, command


def status(added: Added) -> None:
    parser = command(
        added,
        "status",
        commands.status,
        "where a run stands: its step, the time left, what each rank does",
        "Reads what the run's first rank writes down every few seconds, from any machine that sees the run's "
        "directory: no torch, and nothing is asked of the run itself.",
        "meshwright status runs/demo",
    )
    parser.add_argument("directory", metavar="RUN", type=Path, help="a run directory, such as runs/demo")


def report(added: Added) -> None:
    parser = command(
        added,
        "report",
        commands.report,
        "a page for a run, or several side by side",
        "One HTML file that needs no network: curves, where the time went, the schedule simulated and measured, where "
        "the ranks stand, starts and checkpoints, the configuration; of several runs also their curves over each "
        "other, their figures and what differs in their configurations. Of a run that goes on, too. No torch.",
        "meshwright report runs/demo\n  meshwright report runs/demo runs/deep --out compared.html",
    )
    parser.add_argument("runs", metavar="RUN", type=Path, nargs="+", help="run directories, such as runs/demo")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="default: report.html in the run directory, of several runs here"
    )


def plot(added: Added) -> None:
    parser = command(
        added,
        "plot",
        commands.plot,
        "draw the loss curve of a run",
        "Reads metrics.jsonl and writes a PNG beside it.",
        "meshwright plot runs/demo",
    )
    parser.add_argument("directory", metavar="RUN", type=Path, help="a run directory, such as runs/demo")
    parser.add_argument("--out", type=Path, metavar="PNG", help="default: loss.png in the run directory")


def completion(added: Added) -> None:
    parser = command(
        added,
        "completion",
        commands.completion,
        "a script with which a shell completes commands, options and keys",
        "For bash, zsh or fish: commands, options, files, and the keys of the configuration with the words they allow. "
        "Evaluate it when the shell starts, as in the example (fish: meshwright completion fish | source).",
        "meshwright completion bash\n  echo 'eval \"$(meshwright completion bash)\"' >> ~/.bashrc",
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))
