"""Who may know whom: the plan of the house as a table, held against every import in the source.

A room is a folder or a file right below ``framework``, or ``models``, or ``launch``. All imports count, also those
inside functions and those that are only for types.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {"meshwright": "framework", "meshwright.models": "models", "meshwright.launch": "launch"}
"""Package -> its folder in the repository."""

GROUND = {"errors", "system", "terminal"}
AXES = {"tensor_parallel", "pipeline", "data_parallel"}
SERVICES = {"data", "checkpoint", "tracking"}

MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "system": {"errors", "terminal"},
    "terminal": {"errors"},
    "config": GROUND,
    "parameters": GROUND,
    "seeding": GROUND,
    "model": GROUND | {"config", "parameters", "seeding"},
    "mesh": GROUND,
    "schedule": GROUND | {"config"},
    "optimizer": GROUND | {"config", "parameters", "mesh"},
    "tensor_parallel": GROUND | {"mesh", "parameters", "seeding"},
    "pipeline": GROUND | {"mesh", "model", "parameters", "seeding", "schedule"},
    "data_parallel": GROUND | {"mesh", "parameters", "seeding", "optimizer"},
    "data": GROUND | {"config", "model", "parameters", "seeding"},
    "checkpoint": GROUND | {"config", "parameters", "seeding"},
    "tracking": GROUND | {"config", "parameters", "seeding"},
}
"""Rooms of framework that may be known only so much. A room that is not here joins others (see JOINING)."""

JOINING = [
    "blueprint",
    "build",
    "parts",
    "step",
    "watch",
    "run",
    "train",
    "tools",
]
"""They put rooms together and may import any of framework; those of the table may import none of these."""

ON_TOP = {"train", "tools"}
"""Nobody in framework imports them: they are what the command line calls."""

PURE = ("meshwright.schedule", "meshwright.mesh.grid", "meshwright.mesh.view", "meshwright.pipeline.partition")
"""No torch: planning runs on any machine. meshwright.errors and meshwright.config too, for the command line's sake."""
PURE += (
    "meshwright.errors",
    "meshwright.config",
    "meshwright.tools.interop.configs",
    "meshwright.schedule.load",
    "meshwright.run.directory",
)
PURE += ("meshwright.system", "meshwright.terminal")
PURE += (
    "meshwright.mesh.activity",
    "meshwright.watch.hang.heartbeat",
    "meshwright.watch.hang.diagnosis",
    "meshwright.launch.status",
)

FSDP_DOOR = "meshwright.data_parallel.fully_sharded"
"""It may say what torch's fully_shard is made of; collectives go by our groups there too."""
FSDP = ("torch.distributed.fsdp", "torch.distributed.device_mesh", "torch.distributed.tensor")

HUGGINGFACE = "meshwright.tools.interop.huggingface"
HALVES = (f"{HUGGINGFACE}.convert", f"{HUGGINGFACE}.restructure")
"""Neither knows the other, and what both stand on knows neither."""
TRANSFORMERS_DOOR = f"{HUGGINGFACE}.restructure.library"

MEGATRON_DOORS = ("meshwright.tensor_parallel.megatron", "meshwright.data.indexed")


def modules() -> dict[str, Path]:
    """Every module of the three packages: dotted name -> file. A package goes by its folder's name."""
    found: dict[str, Path] = {}
    for package, folder in PACKAGES.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join([package, *(parts[:-1] if parts[-1] == "__init__" else parts)])] = path
    return found


def room_of(module: str) -> str:
    """meshwright.mesh.grid -> mesh; meshwright.models.gpt2 -> models."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def package_of(module: str) -> str:
    """framework, models or launch: the folder that a module lies in."""
    return PACKAGES[max((package for package in PACKAGES if below(module, package)), key=len)]


def below(module: str, *tops: str) -> bool:
    """Whether a module is one of these or lies inside one."""
    return any(module == top or module.startswith(top + ".") for top in tops)


def imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[str]:
    """Everything that a module imports or names: ``from a import b`` counts as a.b, ``torch.distributed.x`` too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".") if is_package else module.split(".")[:-1]
                base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [base])])
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and node.attr == "distributed" and isinstance(node.value, ast.Name):
            if node.value.id == "torch":
                yield "torch.distributed"
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.args[0].value


def violations(module: str, source: str, is_package: bool = False) -> list[str]:
    """What a module imports and may not, each with the rule."""
    package, room, found = package_of(module), room_of(module), []
    for name in sorted(set(imports(ast.parse(source), module, is_package))):
        other = room_of(name)
        at_door = module == FSDP_DOOR and below(name, *FSDP)
        if (
            below(name, "torch.distributed")
            and not at_door
            and not below(module, "meshwright.mesh", "meshwright.launch")
        ):
            found.append(f"{module} says {name}: only framework/mesh may")
        if below(name, "torch") and below(module, *PURE):
            found.append(f"{module} imports {name}: it is pure, and must run where there is no torch")
        if below(name, "megatron") and module not in MEGATRON_DOORS:
            found.append(f"{module} imports {name}: only {' and '.join(MEGATRON_DOORS)} may")
        if below(name, "transformers") and module != TRANSFORMERS_DOOR:
            found.append(f"{module} imports {name}: only {TRANSFORMERS_DOOR} may")
        if below(module, HUGGINGFACE) and below(name, *(half for half in HALVES if not below(module, half))):
            found.append(f"{module} imports {name}: the halves of {HUGGINGFACE} stand apart")
        if package == "framework" and below(name, "meshwright.models", "meshwright.launch"):
            found.append(f"{module} imports {name}: framework knows neither models nor launch")
        if package == "models" and below(name, "meshwright") and not below(name, "meshwright.models"):
            found.append(f"{module} imports {name}: models are plain torch")
        if package == "framework" and below(name, "meshwright") and other != room:
            if other in ON_TOP:
                found.append(f"{module} imports {name}: {other} is on top")
            elif other != "meshwright" and room in MAY_IMPORT and other not in MAY_IMPORT[room]:
                allowed = ", ".join(sorted(MAY_IMPORT[room])) or "nothing of framework"
                found.append(f"{module} imports {name}: {room} may import {allowed}")
    return found


def at_import(tree: ast.Module) -> ast.Module:
    """The tree without what runs later or never: functions, and blocks that are only for types."""

    class Later(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
            return None

        def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
            return None

        def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
            return node.orelse if "TYPE_CHECKING" in ast.unparse(node.test) else self.generic_visit(node)

    return ast.fix_missing_locations(Later().visit(tree))


def cycle(graph: dict[str, set[str]]) -> list[str] | None:
    """One cycle as a list that ends where it starts, or None."""
    done: set[str] = set()

    def walk(node: str, path: list[str]) -> list[str] | None:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return None
        for other in sorted(graph.get(node, ())):
            found = walk(other, [*path, node])
            if found:
                return found
        done.add(node)
        return None

    return next(filter(None, (walk(node, []) for node in sorted(graph))), None)


def known(name: str, names: dict[str, Path]) -> str | None:
    """The module that an imported name is, or is in; None when it is not one of ours."""
    while name and name not in names:
        name = name.rpartition(".")[0]
    return name or None


def test_every_import_keeps_to_the_table() -> None:
    found = [
        line
        for module, path in modules().items()
        for line in violations(module, path.read_text(), path.name == "__init__.py")
    ]
    assert not found, "\n".join(found)


def test_the_table_keeps_axes_and_services_apart() -> None:
    for axis in AXES:
        assert not MAY_IMPORT[axis] & (AXES | SERVICES)
    for service in SERVICES:
        assert not MAY_IMPORT[service] & (AXES | SERVICES | {"schedule", "mesh"})


def test_every_room_is_in_the_table() -> None:
    rooms = {room_of(module) for module in modules() if package_of(module) == "framework"} - {"meshwright"}
    assert rooms <= MAY_IMPORT.keys() | set(JOINING), (
        f"a room without a rule: {rooms - MAY_IMPORT.keys() - set(JOINING)}; add it to MAY_IMPORT or JOINING"
    )


def test_no_import_cycles_between_modules() -> None:
    names = modules()
    graph: dict[str, set[str]] = {}
    for module, path in names.items():
        tree = at_import(ast.parse(path.read_text()))
        found = {known(name, names) for name in imports(tree, module, path.name == "__init__.py")}
        graph[module] = {name for name in found if name and name != module}
    assert cycle(graph) is None


def test_no_import_cycles_between_rooms() -> None:
    names = modules()
    graph: dict[str, set[str]] = {}
    for module, path in names.items():
        found = {
            known(name, names) for name in imports(ast.parse(path.read_text()), module, path.name == "__init__.py")
        }
        rooms = {room_of(name) for name in found if name} - {room_of(module), "meshwright"}
        graph.setdefault(room_of(module), set()).update(rooms)
    assert cycle(graph) is None


@pytest.mark.parametrize(
    ("module", "source", "said"),
    [
        ("meshwright.pipeline.stage", "import torch.distributed as dist", "only framework/mesh"),
        ("meshwright.step", "from torch import distributed", "only framework/mesh"),
        ("meshwright.step", "import torch\ntorch.distributed.barrier()", "only framework/mesh"),
        ("meshwright.models.gpt2", "from torch.distributed import get_rank", "only framework/mesh"),
        ("meshwright.schedule.build", "def f():\n    import torch", "it is pure"),
        ("meshwright.mesh.grid", "from torch import Tensor", "it is pure"),
        ("meshwright.train", "import meshwright.models.gpt2", "neither models nor launch"),
        (
            "meshwright.train",
            "import importlib\nimportlib.import_module('meshwright.launch.pool')",
            "neither models nor launch",
        ),
        ("meshwright.models.gpt2", "from meshwright.errors import ModelError", "plain torch"),
        ("meshwright.pipeline.stage", "from meshwright.tensor_parallel import plan", "pipeline may import"),
        ("meshwright.pipeline.stage", "from meshwright import data_parallel", "pipeline may import"),
        ("meshwright.pipeline.stage", "from ..data_parallel import buckets", "pipeline may import"),
        ("meshwright.tensor_parallel", "from ..pipeline import stage", "tensor_parallel may import"),
        ("meshwright.checkpoint.save", "from meshwright.data_parallel.buckets import Bucket", "checkpoint may import"),
        ("meshwright.data.causal", "from meshwright.build import Parts", "data may import"),
        ("meshwright.run.resume", "from meshwright.train import work", "train is on top"),
        ("meshwright.data.causal", "from megatron.core.datasets import indexed_dataset", "only meshwright.tensor"),
        ("meshwright.launch.cli", "import megatron.core", "only meshwright.tensor"),
        (
            "meshwright.tools.interop.huggingface.convert.exporting",
            "def f():\n    import transformers",
            "only meshwright.tools.interop.huggingface.restr",
        ),
        (
            "meshwright.tools.interop.huggingface.convert.exporting",
            "from meshwright.tools.interop.huggingface.restructure import export",
            "stand apart",
        ),
        ("meshwright.tools.interop.huggingface.restructure.export", "from ..convert import side_files", "stand apart"),
        (
            "meshwright.tools.interop.huggingface.writing",
            "from meshwright.tools.interop.huggingface.convert import side_files",
            "stand apart",
        ),
    ],
)
def test_a_broken_rule_is_found(module: str, source: str, said: str) -> None:
    is_package = module.count(".") == 1 and module.startswith("meshwright.") and room_of(module) in MAY_IMPORT
    assert any(said in line for line in violations(module, source, is_package))


def test_what_is_allowed_passes() -> None:
    assert not violations(
        "meshwright.mesh.mesh", "import torch.distributed as dist\nfrom meshwright.errors import MeshError"
    )
    assert not violations(
        "meshwright.train", "from meshwright.pipeline import stage\nfrom meshwright.data import order"
    )
    assert not violations("meshwright.tensor_parallel.megatron", "from megatron.core import tensor_parallel")
    assert not violations("meshwright.launch.pool", "import torch.distributed")
    assert not violations(TRANSFORMERS_DOOR, "import transformers")
    assert not violations(
        "meshwright.tools.interop.huggingface.convert.exporting", "from ..rules import Rule\nfrom . import side_files"
    )


def test_a_cycle_is_found() -> None:
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) is None
    later = ast.parse(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import a\ndef f():\n    import b\nimport c"
    )
    assert list(imports(at_import(later), "m", False)) == ["typing.TYPE_CHECKING", "c"]
