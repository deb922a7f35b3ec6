"""Packages of the wheel: the folders framework, models, launch and configs install as parts of ``meshwright``."""

from setuptools import find_packages, setup

FOLDERS = {
    "meshwright": "framework",
    "meshwright.models": "models",
    "meshwright.launch": "launch",
    "meshwright.configs": "configs",
}

setup(
    package_dir=FOLDERS,
    packages=[
        ".".join([package, *filter(None, [inner])])
        for package, folder in FOLDERS.items()
        for inner in ["", *find_packages(folder)]
    ],
    package_data={"meshwright.configs": ["*.toml", "clusters/*.toml"], "": ["templates/*.j2"]},
)
