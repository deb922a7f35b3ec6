"""Functions that a configuration names: ``package.module:function``, and where in a user's code an error was raised.

NOTE [import order]: installed packages come first, the working directory last, and only once a function of the user's
is imported. meshwright's own packages are imported from beside this file, so that no folder ``models`` hides ours.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from framework.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
OWN_PACKAGES = ("framework", "launch", "models")
OWN_BUILDERS = ("models.gpt2:build", "models.llama:build", "models.t5:build")
"""The builders of meshwright itself, which any file may name."""
SCHEMES = {
    "hf": ("framework.huggingface.restructure.layers:builder", "framework.huggingface.restructure.directory:vocabulary")
}
"""``SCHEME:PATH`` as a builder -> the functions of PATH that give it, and the size of its vocabulary. Named, and not
imported, as a user's own is. They run no code of PATH, so any file may name them too."""


def place(error: BaseException) -> str:
    """ " at FILE:LINE", the innermost place in the user's code where an error was raised."""
    if isinstance(error, SyntaxError):
        return f" at {error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first is the caller's own
    outside = [f for f in frames if "site-packages" not in f.filename and not f.filename.startswith("<")]
    watching = str(ROOT / "framework")  # records what a builder does, and so is the innermost where a call fails
    theirs = [f for f in outside if not f.filename.startswith(watching)] or outside
    return f" at {theirs[-1].filename}:{theirs[-1].lineno}" if theirs else ""


def is_own_builder(path: str) -> bool:
    """Check whether a builder is one of meshwright's own: an exact name, or a scheme that runs no code of its path."""
    return path in OWN_BUILDERS or path.partition(":")[0] in SCHEMES


def find_function(path: str, key: str, wanted: str, error_type: type[UserError]) -> Callable[..., Any]:
    """``package.module:function`` -> the function. The working directory is searched last (see NOTE [import order]).

    Raises ``error_type`` for no such module or function; an import inside the module that fails is told with its
    reason. ``key`` is the configuration's, ``wanted`` says what the function should be.
    """
    module_name, _, function_name = path.partition(":")
    package = module_name.partition(".")[0]
    try:
        if package in OWN_PACKAGES:
            _load_own(package)
        else:
            _append_working_directory()
        module = importlib.import_module(module_name)
    except ImportError as error:
        move = _hidden(package) or "Run from the directory that holds it, or install it into this environment"
        raise error_type(f"{key} = {path!r}: cannot import {module_name} ({error}). {move}") from error
    except (Exception, SystemExit) as error:
        raise error_type(
            f"{key} = {path!r}: importing {module_name} failed{place(error)}: {type(error).__name__}: {error}"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        public = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        close = difflib.get_close_matches(function_name, public, 1)
        hint = f"did you mean {module_name}:{close[0]}?" if close else _hidden(package) or f"name {wanted}"
        raise error_type(f"{key} = {path!r}: {module_name} has no function {function_name}; {hint}")
    return function  # type: ignore[no-any-return]


def find_source(path: str) -> str | None:
    """Return the file that ``package.module:function`` would be imported from; None: no such module is found.

    Searches as :func:`find_function` imports, and executes nothing: not even the packages around a module.
    """
    parts = path.partition(":")[0].split(".")
    spec = _find_top(parts[0])
    for at, part in enumerate(parts[1:], start=1):
        if spec is None or spec.submodule_search_locations is None:
            spec = None
            break
        spec = PathFinder.find_spec(part, _folders(spec))
        if spec is not None:
            spec.name = ".".join(parts[: at + 1])
    loaded = sys.modules.get(".".join(parts))
    if spec is None:  # os.path: a module that another one has put there
        return getattr(loaded, "__file__", None)
    if spec.has_location:
        return spec.origin
    if spec.origin is None:
        return ", ".join(_folders(spec))
    return getattr(loaded, "__file__", None) or f"Python itself ({spec.origin})"


def _find_top(package: str) -> ModuleSpec | None:
    """Find a package or module that lies in no other one. For such a name Python's finders execute nothing."""
    if package in OWN_PACKAGES:
        return PathFinder.find_spec(package, [str(ROOT)])
    with suppress(ImportError, ValueError):  # ValueError: of a module without a spec, such as __main__
        found = importlib.util.find_spec(package)
        if found is not None:
            return found
    return PathFinder.find_spec(package, [str(folder) for folder in _working_directory()])


def _folders(spec: ModuleSpec) -> list[str]:
    """The folders of a package. Those of a namespace package inside another one are known without importing that."""
    locations: Any = spec.submodule_search_locations
    return list(getattr(locations, "_path", locations))


def _load_own(package: str) -> None:
    """Import a package of meshwright from beside this file.

    Raises:
        ImportError: another package of this name has been imported already.
    """
    loaded = sys.modules.get(package)
    if loaded is not None:
        folders = [Path(folder).resolve() for folder in getattr(loaded, "__path__", [])]
        if ROOT / package not in folders:
            there = loaded.__file__ or ", ".join(map(str, folders))
            raise ImportError(f"{there} has been imported as {package}, which is the name of meshwright's own package")
        return
    spec = PathFinder.find_spec(package, [str(ROOT)])
    assert spec is not None and spec.loader is not None, ROOT
    module = importlib.util.module_from_spec(spec)
    sys.modules[package] = module
    spec.loader.exec_module(module)


def _working_directory() -> list[Path]:
    """The working directory; nothing where it has been deleted."""
    try:
        return [Path.cwd()]
    except OSError:
        return []


def _append_working_directory() -> None:
    sys.path.extend(str(folder) for folder in _working_directory() if not {"", str(folder)} & set(sys.path))


def _hidden(package: str) -> str | None:
    """The next move where the working directory holds a module of this name that Python does not reach."""
    source = find_source(f"{package}:")
    for folder in _working_directory():
        mine = [path for path in (folder / package, folder / f"{package}.py") if path.exists()]
        if mine and source is not None and not Path(source).is_relative_to(folder):
            whose = "meshwright's own" if package in OWN_PACKAGES else "an installed"
            return f"{package} is {whose} package, {source}, and hides {mine[0]}: rename yours"
    return None
