"""Commands that show the present and past of a run, and shell completion."""

from __future__ import annotations

from pathlib import Path

from meshwright.launch.arguments.common import Added, command, output


def status(added: Added) -> None:
    parser = command(
        added,
        "status",
        "status:status",
        "print the state of a run: step, time left, activity of each rank",
        "Reads the status file that rank 0 updates every few seconds, on any machine that sees the run's directory. "
        "Needs no torch, and does not contact the run.",
        "meshwright status runs/demo",
    )
    parser.add_argument("directory", metavar="RUN", type=Path, help="a run directory, such as runs/demo")


def report(added: Added) -> None:
    parser = command(
        added,
        "report",
        "commands:report",
        "write an HTML page for a run, or for several side by side",
        "Writes one HTML file that needs no network: curves, time by activity, the schedule simulated and measured, "
        "placement of ranks, starts, checkpoints and the configuration. For several runs: their curves in one chart, "
        "their figures, and the differences of their configurations. The run may be live. Needs no torch.",
        "meshwright report runs/demo\n  meshwright report runs/demo runs/deep --out compared.html",
    )
    parser.add_argument("runs", metavar="RUN", type=Path, nargs="+", help="run directories, such as runs/demo")
    default = "report.html in the run directory; for several runs in this directory"
    output(parser, "FILE", f"default: {default}", "report.html")


def plot(added: Added) -> None:
    parser = command(
        added,
        "plot",
        "commands:plot",
        "draw the loss curve of a run",
        "Reads metrics.jsonl and writes a PNG beside it.",
        "meshwright plot runs/demo",
    )
    parser.add_argument("directory", metavar="RUN", type=Path, help="a run directory, such as runs/demo")
    output(parser, "PNG", "default: loss.png in the run directory", "loss.png")


def completion(added: Added) -> None:
    parser = command(
        added,
        "completion",
        "completion:completion",
        "print a shell script that completes commands, options and keys",
        "For bash, zsh or fish: commands, options, files, and configuration keys with their allowed words. "
        "Evaluate it when the shell starts, as in the example (fish: meshwright completion fish | source).",
        "meshwright completion bash\n  echo 'eval \"$(meshwright completion bash)\"' >> ~/.bashrc",
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))
