"""Prediction of a run and pictures of it: planner, dry run, calibration, reports.

It stands on the trainer, which imports nothing of it; its commands are entry points of
``meshwright.commands``.
"""
