"""Names of a run in a tracking service: those of the configuration,
else those of the service's environment variables.

A key that is set wins over the variable, so that a saved configuration goes on under the same names
anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.config import Run, Tracking

DEFAULT_PROJECT = "meshwright"
MAX_ID_BYTES = 4096
"""Most bytes that are read of a file with the id of a run in a tracking service."""


def project_name(tracking: Tracking, variable: str, environment: Mapping[str, str]) -> str:
    """Return ``tracking.project``; where it is unset the value of the variable,
    else ``DEFAULT_PROJECT``.
    """
    return tracking.project or environment.get(variable) or DEFAULT_PROJECT


def display_name(run: Run, variable: str, environment: Mapping[str, str]) -> str:
    """Return ``run.name``; where it is the default the value of the variable, if that is set."""
    is_set = run.name != Run.model_fields["name"].default
    return run.name if is_set else environment.get(variable) or run.name
