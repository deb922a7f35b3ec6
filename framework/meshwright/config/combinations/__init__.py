"""Combinations: the axes of a layout, the features that exclude each other, and the table of their
pairs.

axes      axes of a job, and the keys that mean something only where an axis has several ranks
layout    a layout as a value, with the words of its text form
features  names of what a layout, a configuration or a model has
refused   pairs of features that are refused, with code and reason
proven    pairs that share code, which a layout of verify proves
sizes     numbers that must divide each other

Rules of the configuration, the filter of ``plan``, the layouts of ``verify``, ``meshwright
layouts`` and docs/limits.md are derived from them.
"""
