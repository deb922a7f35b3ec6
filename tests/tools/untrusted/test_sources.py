"""No file of ours unpickles, evaluates or shells out, and each importer of a configured function is known."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SOURCES = [path for folder in ("framework", "launch", "models", "examples") for path in (ROOT / folder).rglob("*.py")]
UNSAFE = re.compile(
    r"(eval|exec|compile|__import__|input)"
    r"|(pickle|cPickle|dill|cloudpickle|joblib|marshal|shelve|torch)\.(loads?|Unpickler|open)"
    r"|torch\.(package\.\w+|hub\.\w+|jit\.load)"
    r"|(np|numpy)\.(load|loadtxt|genfromtxt)"
    r"|yaml\.(load|load_all|full_load|unsafe_load|Loader|UnsafeLoader|FullLoader|CLoader)"
    r"|os\.(system|popen|exec\w*|spawn\w*)"
    r"|subprocess\.(getoutput|getstatusoutput)"
    r"|importlib\.(import_module|util\.module_from_spec|reload)|runpy\.\w+"
    r"|jinja2\.Template|.*\.from_string|plt\.style\.use|matplotlib\.style\.use|.*\.from_pretrained"
)
ALLOWED = {
    ("launch/pool.py", "pickle.loads"): "pipes between processes that this one has forked",
    ("launch/worker.py", "pickle.loads"): "the same pipes, from the forked side",
    ("framework/data/worker_process.py", "pickle.loads"): "a pipe from a process that this one has started",
    ("framework/data/worker_main.py", "pickle.loads"): "the pipe from the process that has started this one",
    (
        "framework/config/functions.py",
        "importlib.import_module",
    ): "the door: framework/run/trust.py says for whom it opens",
    ("launch/forking.py", "importlib.import_module"): "a constant list of torch's modules",
    ("framework/__init__.py", "importlib.import_module"): "the table of public names",
    (
        "launch/arguments/common.py",
        "importlib.import_module",
    ): "the functions of our own commands, named in their parsers",
}
IMPORTERS = {
    "framework/model/build.py": "model.builder; see BUILDERS",
    "framework/model/groups.py": "model.parameter_groups of a configuration that was judged as model.builder was",
    "framework/optimizer/own.py": "optimizer.builder and .schedule of a configuration judged as model.builder was",
    "framework/optimizer/own_defaults.py": "the same optimizer.builder, in a run, a verify or a plan that was judged",
    "framework/tools/verify/plain_optimizer.py": "the same optimizer.builder",
    "framework/tools/verify/plain_rate.py": "the same optimizer.schedule",
    "framework/schedule/own.py": "pipeline.schedule of a configuration judged as model.builder was; not in a report",
    "framework/data/dataset.py": "data.builder of a configuration that was judged as model.builder was",
    "framework/data/collate.py": "data.collate of a configuration that was judged as model.builder was",
    "framework/tools/interop/huggingface/convert/families.py": "only the builders of FAMILIES, which are ours",
    "launch/callbacks.py": "train.callbacks of a configuration that was judged as model.builder was",
    "framework/tracking/observer.py": "tracking.sinks of a configuration that was judged as model.builder was",
}
BUILDERS = {
    "framework/tools/verify/magnify.py": "the configuration of `meshwright verify`, with other rates",
    "framework/tools/verify/trials.py": "the configuration of `meshwright verify`, with other sizes",
    "framework/blueprint.py": "the configuration of a command line, of tools/inference/load.py or tools/reshard.py",
    "framework/tools/planner/model_cache.py": "the configuration of a command line",
    "framework/tools/verify/reference.py": "the configuration of a command line",
    "framework/tools/verify/initial.py": "the configuration of a command line",
    "framework/tools/verify/rank.py": "the configuration of a command line",
    "framework/tools/verify/run.py": "the configuration of a command line",
    "framework/tools/verify/traits.py": "the configuration of a command line",
    "framework/tools/interop/huggingface/convert/importing.py": "only the builders of FAMILIES, which are ours",
    "framework/tools/interop/huggingface/restructure/export.py": "hf:DIRECTORY, and no other",
    "framework/tools/interop/huggingface/restructure/adapters.py": "hf:DIRECTORY, or that of a command line",
    "framework/tools/interop/huggingface/convert/adapters.py": "after a plan of export, which takes FAMILIES' alone",
    "framework/tools/interop/huggingface/adapters.py": "after a plan of export, which takes FAMILIES' or hf:DIRECTORY",
}
READERS = {
    "framework/tools/inference/load.py": "sample and eval: check_trusted",
    "framework/tools/reshard.py": "check_trusted",
    "framework/tools/interop/huggingface/convert/importing.py": "only FAMILIES' builders, and the user's own words",
    "framework/tools/interop/huggingface/export.py": "only the builders of FAMILIES, which are ours, or hf:DIRECTORY",
    "framework/tools/interop/huggingface/convert/adapters.py": "a base run's, after the same plan of export",
    "framework/tools/interop/huggingface/adapters.py": "the same builders, without parameter groups: model_of",
    "framework/tools/interop/huggingface/restructure/adapters.py": "of peft's file rank, scale, dropout, directory",
    "framework/tools/interop/configs/convert.py": "written as a file, and not built",
    "framework/tools/report/run.py": "shown, and not built",
    "framework/tools/dryrun/cuda/__main__.py": "the configuration of a command line, from the process that started it",
    "framework/tools/verify/rank.py": "the configuration of a command line, from the process that forked the rank",
    "launch/commands.py": "plot: the paths of the corpus",
    "launch/python.py": "make_config: the sections that the caller's own code gives",
}
"""They make a configuration of what a run, a checkpoint or another framework's file says."""


@cache
def calls_of(path: Path) -> tuple[ast.Call, ...]:
    return tuple(node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))


@cache
def calls(path: Path) -> frozenset[str]:
    """Names that are called in a file, dotted as they stand there."""
    return frozenset(ast.unparse(node.func) for node in calls_of(path))


def callers(*names: str) -> set[str]:
    return {str(path.relative_to(ROOT)) for path in SOURCES if calls(path) & set(names)}


def importers(module: str, *names: str) -> set[str]:
    found = set()
    for path in SOURCES:
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if module in text else ():
            if isinstance(node, ast.ImportFrom) and node.module == module and {n.name for n in node.names} & {*names}:
                found.add(str(path.relative_to(ROOT)))
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_runs_what_a_file_says(path: Path) -> None:
    here = str(path.relative_to(ROOT))
    found = {name for name in calls(path) if UNSAFE.fullmatch(name) and (here, name) not in ALLOWED}
    found -= {"re.compile", "torch.compile"}
    assert not found, f"{here} calls {found}: not on anything that a file may say"
    for node in calls_of(path):
        given = {word.arg: getattr(word.value, "value", None) for word in node.keywords}
        assert given.get("shell", False) is False and not given.get("allow_pickle"), f"{here}:{node.lineno}"
        assert given.get("trust_remote_code", False) is False, f"{here}:{node.lineno}"


def test_what_is_allowed_is_still_there() -> None:
    assert all(name in calls(ROOT / file) for file, name in ALLOWED)


def test_who_imports_what_a_configuration_names() -> None:
    """A new caller is judged by where its path comes from, and put into the table with that."""
    assert callers("find_function") - {"framework/config/functions.py"} == IMPORTERS.keys()
    assert callers("build_model", "configured_model") - {"framework/model/build.py"} == BUILDERS.keys()


def test_who_reads_saved_configurations() -> None:
    assert importers("meshwright.config", "parse", "load_saved", "read_resolved") == READERS.keys()
