"""Import of functions that a configuration names as ``package.module:function``,
and the place of errors in user code.

NOTE [import order]: installed packages are searched first and the working directory last. The
working directory enters the search path only when a user's function is imported, so that no folder
of it hides ``meshwright_models``; one that PYTHONPATH names does.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
import sysconfig
import traceback
from collections.abc import Callable
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from meshwright.config.schemes import is_own_scheme, scheme_of
from meshwright.errors import UserError, reason_of
from meshwright.system.packages import OWN_PACKAGES, own_code

STANDARD = sysconfig.get_path("stdlib")
OWN_BUILDERS = tuple(
    f"meshwright_models.{name}:build" for name in ("decoder", "gpt2", "llama", "t5")
)
"""Builders of meshwright itself: a configuration file
of any origin may name them (run/trust.py).
"""
FORMER_BUILDERS = {
    former + path.removeprefix("meshwright_models"): path
    for path in OWN_BUILDERS
    for former in ("models", "meshwright.models")
}
"""Former names of these builders -> their present names. Configurations,
runs and checkpoints may hold them.
"""


def directory_of(builder: str) -> Path | None:
    """Return the directory of a builder ``SCHEME:DIRECTORY``; None for another builder."""
    scheme = scheme_of(builder)
    return Path(scheme.place).expanduser() if scheme else None


def error_place(error: BaseException) -> str:
    """Return " at FILE:LINE", the innermost place in the user's code where an error was raised."""
    if isinstance(error, SyntaxError):
        return f" at {error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first is the caller's own
    outside = [
        f
        for f in frames
        if "site-packages" not in f.filename and not f.filename.startswith(("<", STANDARD))
    ]
    # this package traces the builder, so its frames may be innermost where a call fails
    own = own_code()
    user = [f for f in outside if not f.filename.startswith(own)] or outside
    return f" at {user[-1].filename}:{user[-1].lineno}" if user else ""


def current_name(path: str) -> str:
    """Return the present name of a builder: ``meshwright.models.gpt2:build`` becomes
    ``meshwright_models.gpt2:build``.

    A module ``models.gpt2`` of the user keeps its name, and the user's module is imported. A folder
    ``models/gpt2`` without code, such as one with weights, is no module.
    """
    if path not in FORMER_BUILDERS:
        return path
    found = find_source(path)
    is_users = found is not None and Path(found).is_file()
    return path if is_users else FORMER_BUILDERS[path]


def is_own_builder(path: str) -> bool:
    """Check whether a builder is one of meshwright's own: an exact name,
    or a scheme that runs no code of its path.
    """
    return path in OWN_BUILDERS or is_own_scheme(path)


def find_function(
    path: str, key: str, wanted: str, error_type: type[UserError]
) -> Callable[..., Any]:
    """Import ``package.module:function`` and return the function.

    The working directory is searched last (NOTE [import order]).

    Args:
        path: The function's name.
        key: Configuration key that contains it, for the error.
        wanted: Description of the function that is needed, for the error.
        error_type: Type of the error.

    Raises:
        error_type: The module or function does not exist, or the module's import fails; the text
            contains the reason.
    """
    module_name, _, function_name = path.partition(":")
    package = module_name.partition(".")[0]
    try:
        if package not in OWN_PACKAGES:
            _append_working_directory()
        module = importlib.import_module(module_name)
    except ImportError as error:
        advice = (
            _renamed(error.name)
            or _hidden(package)
            or "Run from the directory that holds it, or install it into this environment"
        )
        raise error_type(
            "MW-CONFIG-008", f"{key} = {path!r}: cannot import {module_name} ({error}). {advice}"
        ) from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise error_type(
            "MW-CONFIG-009",
            f"{key} = {path!r}: importing {module_name} failed{error_place(error)}:"
            f" {reason_of(error)}",
        ) from error
    try:
        function = getattr(module, function_name, None)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise error_type(
            "MW-CONFIG-080",
            f"{key} = {path!r}: {module_name} fails when asked for {function_name} (its"
            f" __getattr__){error_place(error)}: {reason_of(error)}; define the function itself",
        ) from error
    if not callable(function):
        public = [
            name
            for name, value in vars(module).items()
            if callable(value) and not name.startswith("_")
        ]
        close = difflib.get_close_matches(function_name, public, 1)
        if close:
            hint = f"did you mean {module_name}:{close[0]}?"
        else:
            hint = _hidden(package) or f"name {wanted}"
        raise error_type(
            "MW-CONFIG-010",
            f"{key} = {path!r}: {module_name} has no function {function_name}; {hint}",
        )
    return function  # type: ignore[no-any-return]


def find_source(path: str) -> str | None:
    """Return the file that ``package.module:function`` would be imported from,
    or None when no such module is found.

    The search order is that of :func:`find_function`. Nothing is executed, not even the packages
    around a module.
    """
    parts = path.partition(":")[0].split(".")
    if parts[0] in OWN_PACKAGES:
        return _find_own(".".join(parts))
    spec = _find_top(parts[0])
    for at, part in enumerate(parts[1:], start=1):
        if spec is None or spec.submodule_search_locations is None:
            spec = None
            break
        spec = PathFinder.find_spec(part, _folders(spec))
        if spec is not None:
            spec.name = ".".join(parts[: at + 1])
    loaded = sys.modules.get(".".join(parts))
    if spec is None:  # such as os.path, which another module put into sys.modules
        return getattr(loaded, "__file__", None)
    if spec.has_location:
        return spec.origin
    if spec.origin is None:
        return ", ".join(_folders(spec))
    return getattr(loaded, "__file__", None) or f"Python itself ({spec.origin})"


def _find_top(package: str) -> ModuleSpec | None:
    """Find a top-level package or module. For such a name Python's finders execute nothing."""
    with suppress(ImportError, ValueError):  # ValueError: a module without a spec, such as __main__
        found = importlib.util.find_spec(package)
        if found is not None:
            return found
    return PathFinder.find_spec(package, [str(folder) for folder in _working_directory()])


def _folders(spec: ModuleSpec) -> list[str]:
    """Return the folders of a package. A namespace package's parent is not imported."""
    locations: Any = spec.submodule_search_locations
    return list(getattr(locations, "_path", locations))


def _find_own(module: str) -> str | None:
    """Return the file of a module of meshwright.
    Finding it imports meshwright's packages around it.
    """
    try:
        spec = importlib.util.find_spec(module)
    except ImportError:
        return None
    return None if spec is None else spec.origin


def _working_directory() -> list[Path]:
    """Return the working directory in a list; empty when it has been deleted."""
    try:
        return [Path.cwd()]
    except OSError:
        return []


def _append_working_directory() -> None:
    sys.path.extend(
        str(folder) for folder in _working_directory() if not {"", str(folder)} & set(sys.path)
    )


def _renamed(module: str | None) -> str | None:
    """Return advice for a module by the former name of ``meshwright_models``, or None."""
    is_former = f"{module}.".startswith("meshwright.models.")
    return "meshwright.models is meshwright_models now" if is_former else None


def _hidden(package: str) -> str | None:
    """Return advice for a module in the working directory that an installed package hides,
    or None.
    """
    source = find_source(f"{package}:")
    for folder in _working_directory():
        hidden = [path for path in (folder / package, folder / f"{package}.py") if path.exists()]
        if hidden and source is not None and not Path(source).is_relative_to(folder):
            whose = "meshwright's own" if package in OWN_PACKAGES else "an installed"
            return f"{package} is {whose} package, {source}, and hides {hidden[0]}: rename yours"
    return None
