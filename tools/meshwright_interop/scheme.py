"""Scheme ``hf:`` of ``model.builder`` and ``run.start``: a directory with a model of transformers."""

from meshwright_interop.huggingface.restructure.directory import vocabulary as vocabulary
from meshwright_interop.huggingface.restructure.layers import builder as builder
from meshwright_interop.start import weights as weights
