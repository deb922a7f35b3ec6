"""Commands that show the present and past of a run, error codes, and shell completion."""

from __future__ import annotations

from pathlib import Path

from meshwright_launch.arguments.common import Added, command


def status(added: Added) -> None:
    parser = command(
        added,
        "status",
        "status:status",
        "print the state of a run: step, time left, activity of each rank",
        "Reads the status file that rank 0 updates every few seconds, on any machine that sees the"
        " run's directory. Needs no torch, and does not contact the run.",
        "meshwright status runs/demo",
    )
    parser.add_argument(
        "directory", metavar="RUN", type=Path, help="a run directory, such as runs/demo"
    )


def errors(added: Added) -> None:
    parser = command(
        added,
        "errors",
        "errors:errors",
        "list the error codes, or show one with the place that raises it",
        "Prints code, exit code and message of every error that a user can cause, by room. With a"
        " code: its message, class, module and line. A code stays with its cause when the words of"
        " the message change.",
        "meshwright errors MW-DATA-001\n  meshwright errors",
    )
    parser.add_argument(
        "code", nargs="?", metavar="CODE", help="as a message prints it, or short: data-1"
    )


def completion(added: Added) -> None:
    parser = command(
        added,
        "completion",
        "completion:completion",
        "print a shell script that completes commands, options and keys",
        "For bash, zsh or fish: commands, options, files, and configuration keys with their allowed"
        " words. Evaluate it when the shell starts, as in the example (fish: meshwright completion"
        " fish | source).",
        "meshwright completion bash\n  echo 'eval \"$(meshwright completion bash)\"' >> ~/.bashrc",
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))
