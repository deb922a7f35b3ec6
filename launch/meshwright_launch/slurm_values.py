"""Values in a job script: #SBATCH lines cannot be quoted,
so each value there must match a pattern.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from meshwright.errors import ConfigError, UserError
from meshwright.system.bounded import read_text, shortened
from meshwright.system.numbers import whole_number

NAME = r"[A-Za-z0-9_][A-Za-z0-9_.@+-]*"
WORDS = {
    "time": (r"[0-9A-Za-z:-]+", "minutes, h:mm:ss or days-hours"),
    "partition": (rf"{NAME}(,{NAME})*", "names of letters, digits and _.@+-, with commas between"),
    "account": (NAME, "a name of letters, digits and _.@+-"),
    "qos": (NAME, "a name of letters, digits and _.@+-"),
    "constraint": (r"[A-Za-z0-9_\[(][A-Za-z0-9_.*&|,()\[\]-]*", "features, combined by &|,*()[]"),
    "exclude": (r"[A-Za-z0-9_][A-Za-z0-9_.,\[\]-]*", "nodes such as n1,n[3-4]"),
    "gres": (rf"{NAME}(:{NAME})*(,{NAME}(:{NAME})*)*", "resources such as gpu:h100:8"),
    "mem": (r"[0-9]+[KMGT]?", "a number with K, M, G or T, such as 500G; 0: all"),
    "reservation": (
        rf"{NAME}(,{NAME})*",
        "names of letters, digits and _.@+-, with commas between",
    ),
}
"""Option of sbatch -> (pattern of its value, description of that pattern)."""
OWN = {
    **{
        name: f"--{name.replace('_', '-')}"
        for name in (*WORDS, "nodes", "cpus_per_task", "exclusive")
    },
    **dict.fromkeys(
        ("job-name", "output", "error", "open-mode", "chdir"), "run.name and run.directory"
    ),
    **dict.fromkeys(("ntasks", "ntasks-per-node", "gpus", "gpus-per-node"), "--devices-per-node"),
    **{
        "requeue": "--no-requeue",
        "no-requeue": "--no-requeue",
        "signal": "--time",
        "dependency": "--chain",
    },
    "distribution": (
        "no option: the script's srun places ranks in blocks, which the mesh needs (edit the"
        " script)"
    ),
    **dict.fromkeys(
        ("wrap", "array", "parsable", "test-only", "wait"),
        "no option: the script needs a job of its own",
    ),
}
"""Option of sbatch that the script already has -> option or key of meshwright that sets it."""
PASSED = re.compile(r"--(?P<name>[a-z][a-z0-9-]*)(=[A-Za-z0-9_./:,@%+=*&|()\[\]-]+)?")
REGISTRY = re.compile(
    r"(?!(oci|oci-archive|docker-archive|docker-daemon):)[\w.-]+(/[\w.-]+)*:[\w.-]+"
)
"""Image of a registry without a scheme, as pyxis takes it: team/train:1."""
MAX_PROLOGUE_BYTES = 2**16
DAY_S = 86_400
MAX_DAYS = 10_000
"""Upper limit of a time limit, in days."""


def read_prologue(path: str) -> str:
    """Return the lines of the user's own shell code that run before srun,
    as they stand in the file.

    Raises:
        UserError: the file cannot be read, is too long, or is no text.
    """
    try:
        text = read_text(path, MAX_PROLOGUE_BYTES).replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it is no UTF-8 text"
        raise UserError(
            "MW-LAUNCH-063", f"--prologue {path}: {why}; name a file with lines of bash"
        ) from None
    bad = next((char for char in text if not (char.isprintable() or char in "\n\t")), None)
    if bad is not None:
        why = f"has the character {bad!r}"
        raise UserError(
            "MW-LAUNCH-067", f"--prologue {path}: it {why}; name a file with lines of bash"
        )
    return text.rstrip("\n")


def seconds_of(time: str) -> int | None:
    """Return the seconds of a Slurm time limit, or None for no limit.

    Slurm reads minutes, minutes:seconds, hours:minutes:seconds, and days-hours[:minutes[...]].

    Raises:
        UserError: the text has none of these forms.
    """
    if time.lower() in ("infinite", "unlimited", "0"):
        return None
    found = re.fullmatch(r"(?:([0-9]+)-)?([0-9]+)(?::([0-9]+))?(?::([0-9]+))?", time)
    numbers = (
        [whole_number(part or "0", high=MAX_DAYS * DAY_S) for part in found.groups()]
        if found
        else [None]
    )
    if found is None or None in numbers:
        raise _no_time_limit(time)
    days, first, second, third = (number or 0 for number in numbers)
    if found[1]:
        limit_s = ((days * 24 + first) * 60 + second) * 60 + third
    elif found[4]:
        limit_s = (first * 60 + second) * 60 + third
    else:
        limit_s = first * 60 + second
    if limit_s > MAX_DAYS * DAY_S:
        raise _no_time_limit(time)
    return limit_s


def _no_time_limit(time: str) -> UserError:
    return UserError(
        "MW-LAUNCH-048",
        f"--time {shortened(time, 80)!r} is not a time limit of Slurm, of at most {MAX_DAYS:,}"
        " days: give minutes, h:mm:ss or days-hours (90, 4:00:00, 2-12)",
    )


def as_word(path: Path) -> str:
    """Return a path for an #SBATCH line,
    where spaces cannot be quoted and some options expand %.
    """
    text = str(path)
    if not re.fullmatch(r"/[\w./+,:=@~-]*", text):
        raise ConfigError(
            "MW-LAUNCH-049",
            f"an #SBATCH line takes only paths of letters, digits and ./_-+,:=@~, and not {text!r}:"
            " choose another place",
        )
    return text


def check_options(options: argparse.Namespace) -> None:
    """Refuse values for #SBATCH lines that do not match their pattern:
    the shell does not unquote these lines.

    Raises:
        UserError: a value does not match; has the allowed form.
    """
    for name, (pattern, allowed) in WORDS.items():
        value = getattr(options, name)
        if value is not None and not re.fullmatch(pattern, value):
            raise UserError(
                "MW-LAUNCH-050",
                f"--{name} {shortened(value, 300)!r} cannot stand in a job script: give {allowed}",
            )
    for value in options.sbatch or ():
        found = PASSED.fullmatch(value)
        if found is None:
            raise UserError(
                "MW-LAUNCH-064",
                f"--sbatch {value!r} cannot stand in a job script: give one option of sbatch with"
                " its value, such as --sbatch=--mail-type=END, of letters, digits and"
                " ./_-:,@%+=*&|()[]",
            )
        if (
            instead := OWN.get(found["name"], OWN.get(found["name"].replace("-", "_")))
        ) is not None:
            raise UserError(
                "MW-LAUNCH-065",
                f"--sbatch {value!r}: the script has this option already; use {instead}",
            )


def check_lines(*values: str) -> None:
    """Refuse values with a line break or another control character;
    quoting does not make them safe.

    Raises:
        UserError: has the value.
    """
    for value in values:
        if not value.isprintable():
            raise UserError(
                "MW-LAUNCH-051",
                f"{value!r} cannot stand in a job script: it has a line break or a control"
                " character",
            )


def check_container(image: str | None, mounts: str | None, runtime: str) -> None:
    """Refuse an image or mounts that the container runtime would take for something else.

    Raises:
        UserError: mounts or a runtime without an image, a value that apptainer would read as an
            option, or an image in the form of the other runtime.
    """
    if image is None and (mounts is not None or runtime != "pyxis"):
        without = "--mounts" if mounts is not None else f"--runtime {runtime}"
        raise UserError(
            "MW-LAUNCH-069", f"{without} has no effect without a container: add --container IMAGE"
        )
    for name, value in (("container", image), ("mounts", mounts)):
        if (
            runtime == "apptainer"
            and value is not None
            and re.fullmatch(r"[A-Za-z0-9_./][^\s]*", value) is None
        ):
            raise UserError(
                "MW-LAUNCH-070",
                f"--{name} {value!r} is not valid for apptainer: give an image as /images/train.sif"
                " or docker://TEAM/IMAGE, mounts as /from:/to,/data, both without blanks",
            )
    if image is not None and runtime == "pyxis" and image.endswith(".sif"):
        raise UserError(
            "MW-LAUNCH-071",
            f"--container {image}: pyxis cannot start an apptainer image: add --runtime apptainer",
        )
    if (
        image is not None
        and runtime == "apptainer"
        and REGISTRY.fullmatch(image)
        and not Path(image).exists()
    ):
        raise UserError(
            "MW-LAUNCH-072",
            f"--container {image}: apptainer would read this as a file, which does not exist: for"
            f" an image of a registry give docker://{image}",
        )
