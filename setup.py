"""Packages of the wheel: framework, models, launch, configs, examples and docs install as parts of ``meshwright``."""

from setuptools import find_packages, setup

FOLDERS = {
    "meshwright": "framework",
    "meshwright.models": "models",
    "meshwright.launch": "launch",
    "meshwright.configs": "configs",
    "meshwright.examples": "examples",
    "meshwright.docs": "docs",
}

setup(
    package_dir=FOLDERS,
    packages=[
        ".".join([package, *filter(None, [inner])])
        for package, folder in FOLDERS.items()
        for inner in ["", *find_packages(folder)]
    ],
    package_data={
        "meshwright": ["py.typed"],
        "meshwright.configs": ["*.toml", "clusters/*.toml"],
        "meshwright.examples": ["*/*.toml", "*/*.md"],
        "meshwright.docs": ["*.md", "tasks/*.md"],
        "": ["templates/*", "tables/*", "*.cpp"],
    },
)
