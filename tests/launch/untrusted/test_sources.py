"""No file of ours unpickles, evaluates or shells out,
and each importer of a configured function is known.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.support.sources import ROOT, dotted, files

SOURCES = [*files(), *(ROOT / "examples").rglob("*.py")]
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
    (
        "launch/meshwright_launch/pool.py",
        "pickle.loads",
    ): "pipes between processes that this one has forked",
    ("launch/meshwright_launch/worker.py", "pickle.loads"): "the same pipes, from the forked side",
    (
        "framework/meshwright/data/worker_process.py",
        "pickle.loads",
    ): "a pipe from a process that this one has started",
    (
        "framework/meshwright/data/worker_main.py",
        "pickle.loads",
    ): "the pipe from the process that has started this one",
    (
        "framework/meshwright/config/functions.py",
        "importlib.import_module",
    ): "the door: framework/meshwright/run/trust.py says for whom it opens",
    (
        "launch/meshwright_launch/forking.py",
        "importlib.import_module",
    ): "a constant list of torch's modules",
    ("framework/meshwright/__init__.py", "importlib.import_module"): "the table of public names",
    (
        "framework/meshwright/data/prepare/chat/rendering.py",
        "environment.from_string",
    ): "jinja2's sandbox, in a process with limits of time and memory",
    (
        "framework/meshwright/launch/__init__.py",
        "runpy.run_module",
    ): "a constant name, of our launcher",
    (
        "launch/meshwright_launch/arguments/common.py",
        "importlib.import_module",
    ): "the functions of our own commands, named in their parsers",
}
IMPORTERS = {
    "framework/meshwright/model/builder.py": "model.builder; see BUILDERS",
    "framework/meshwright/model/own_attention.py": (
        "model.attention of a configuration judged as model.builder was"
    ),
    "framework/meshwright/model/groups.py": (
        "model.parameter_groups of a configuration judged as model.builder was"
    ),
    "framework/meshwright/optimizer/own.py": (
        "optimizer.builder and .schedule, judged as model.builder was"
    ),
    "framework/meshwright/optimizer/own_defaults.py": (
        "the same optimizer.builder, in a run that was judged"
    ),
    "framework/meshwright/verify/plain_optimizer.py": "the same optimizer.builder",
    "framework/meshwright/verify/plain_rate.py": "the same optimizer.schedule",
    "framework/meshwright/schedule/own.py": (
        "pipeline.schedule, judged as model.builder was; not in a report"
    ),
    "framework/meshwright/data/dataset.py": (
        "data.builder of a configuration that was judged as model.builder was"
    ),
    "framework/meshwright/data/collate.py": (
        "data.collate of a configuration that was judged as model.builder was"
    ),
    "tools/meshwright_interop/huggingface/convert/families.py": (
        "only the builders of FAMILIES, which are ours"
    ),
    "launch/meshwright_launch/callbacks.py": (
        "train.callbacks of a configuration that was judged as model.builder was"
    ),
    "framework/meshwright/tracking/observer.py": (
        "tracking.sinks of a configuration judged as model.builder was"
    ),
}
BUILDERS = {
    "framework/meshwright/verify/magnify.py": (
        "the configuration of `meshwright verify`, with other rates"
    ),
    "framework/meshwright/verify/trials.py": (
        "the configuration of `meshwright verify`, with other sizes"
    ),
    "framework/meshwright/blueprint.py": "the configuration of a command line, or of inference/",
    "tools/meshwright_plan/planner/model_cache.py": "the configuration of a command line",
    "framework/meshwright/verify/reference.py": "the configuration of a command line",
    "framework/meshwright/verify/initial.py": "the configuration of a command line",
    "framework/meshwright/verify/rank.py": "the configuration of a command line",
    "framework/meshwright/verify/run.py": "the configuration of a command line",
    "framework/meshwright/traits.py": "the configuration of a command line",
    "tools/meshwright_interop/huggingface/convert/opening.py": (
        "only the builders of FAMILIES, which are ours"
    ),
    "tools/meshwright_interop/start.py": "hf:DIRECTORY, or that of a command line",
    "tools/meshwright_interop/huggingface/restructure/export.py": "hf:DIRECTORY, and no other",
    "tools/meshwright_interop/huggingface/peft_import.py": (
        "hf:DIRECTORY, or that of a command line"
    ),
    "tools/meshwright_interop/huggingface/restructure/adapters.py": (
        "hf:DIRECTORY, or that of a command line"
    ),
    "tools/meshwright_interop/huggingface/convert/adapters.py": (
        "after a plan of export, which takes FAMILIES' alone"
    ),
    "tools/meshwright_interop/huggingface/adapters.py": (
        "after a plan of export, which takes FAMILIES' or hf:DIRECTORY"
    ),
}
READERS = {
    "framework/meshwright/inference/load.py": "sample and eval: check_trusted",
    "tools/meshwright_interop/huggingface/convert/importing.py": (
        "only FAMILIES' builders, and the user's own words"
    ),
    "tools/meshwright_interop/huggingface/export.py": (
        "only the builders of FAMILIES, which are ours, or hf:DIRECTORY"
    ),
    "tools/meshwright_interop/huggingface/convert/adapters.py": (
        "a base run's, after the same plan of export"
    ),
    "tools/meshwright_interop/huggingface/restructure/adapters.py": "of peft's file the directory",
    "tools/meshwright_interop/huggingface/peft_import.py": "of peft's file rank, scale, dropout",
    "tools/meshwright_interop/huggingface/adapters.py": (
        "the same builders, without parameter groups: model_of"
    ),
    "tools/meshwright_interop/configs/convert.py": "written as a file, and not built",
    "tools/meshwright_plan/report/run.py": "shown, and not built",
    "framework/meshwright/run/places.py": "the path of its checkpoints in an object store, checked",
    "framework/meshwright/verify/rank.py": (
        "the configuration of a command line, from the process that forked the rank"
    ),
    "tools/meshwright_plan/commands/pages.py": "plot: the paths of the corpus",
    "launch/meshwright_launch/replicas.py": "the configuration of this very run, for another dp",
    "launch/meshwright_launch/python.py": (
        "make_config: the sections that the caller's own code gives"
    ),
}
"""They make a configuration of what a run, a checkpoint or another framework's file says."""


@cache
def calls_of(path: Path) -> tuple[ast.Call, ...]:
    return tuple(
        node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
    )


@cache
def calls(path: Path) -> frozenset[str]:
    """Return names that are called in a file, dotted as they stand there."""
    return frozenset(dotted(node.func) or ast.unparse(node.func) for node in calls_of(path))


def callers(*names: str) -> set[str]:
    return {str(path.relative_to(ROOT)) for path in SOURCES if calls(path) & set(names)}


def importers(module: str, *names: str) -> set[str]:
    found = set()
    for path in SOURCES:
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if module in text else ():
            if (
                isinstance(node, ast.ImportFrom)
                and node.module == module
                and {n.name for n in node.names} & {*names}
            ):
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
        assert given.get("shell", False) is False and not given.get("allow_pickle"), (
            f"{here}:{node.lineno}"
        )
        assert given.get("trust_remote_code", False) is False, f"{here}:{node.lineno}"


def test_what_is_allowed_is_still_there() -> None:
    assert all(name in calls(ROOT / file) for file, name in ALLOWED)


def test_who_imports_what_a_configuration_names() -> None:
    """A new caller is judged by where its path comes from, and put into the table with that."""
    assert (
        callers("find_function") - {"framework/meshwright/config/functions.py"} == IMPORTERS.keys()
    )
    assert (
        callers("build_model", "configured_model") - {"framework/meshwright/model/build.py"}
        == BUILDERS.keys()
    )


def test_who_reads_saved_configurations() -> None:
    assert importers("meshwright.config", "parse", "load_saved", "read_resolved") == READERS.keys()
