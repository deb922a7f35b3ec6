"""Whole numbers from text of any origin: environment variables, options, names of files. The only
place that parses them.

``int()`` also accepts digits of other scripts, blanks and underscores, and raises ValueError beyond
4,300 digits.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from meshwright.errors import MeshError
from meshwright.system.bounded import shortened

MAX_INT64 = 2**63 - 1
MAX_RANKS = 2**20
"""Maximum number of ranks of a job, as in a configuration."""
MAX_PORT = 65_535
_WHOLE = re.compile(r"-?[0-9]{1,19}")


def whole_number(text: str, low: int = 0, high: int = MAX_INT64) -> int | None:
    """Return the whole number from ``low`` to ``high`` that ``text`` is in decimal digits,
    else None. Never raises.
    """
    if _WHOLE.fullmatch(text) is None:
        return None
    number = int(text)
    return number if low <= number <= high else None


def environment_number(
    name: str,
    default: int,
    low: int = 0,
    high: int = MAX_INT64,
    env: Mapping[str, str] = os.environ,
) -> int:
    """Return the whole number in an environment variable; ``default`` if it is unset or empty.

    Raises:
        MeshError: it is no whole number from ``low`` to ``high``.
    """
    text = env.get(name)
    if not text:
        return default
    number = whole_number(text, low, high)
    if number is None:
        raise MeshError(
            "MW-SYSTEM-008",
            f"the environment has {name} = {shortened(text, 80)!r}, which is no whole number from"
            f" {low:,} to {high:,}: start with `meshwright train`, torchrun or srun, which set it,"
            " or unset it",
        )
    return number


def job_restarts(env: Mapping[str, str] = os.environ) -> int:
    """Return how often Slurm has requeued this job; 0 outside of Slurm.

    Raises:
        MeshError: SLURM_RESTART_COUNT is no number.
    """
    if env.get("SLURM_JOB_ID"):
        return environment_number("SLURM_RESTART_COUNT", 0, high=2**31, env=env)
    return 0
