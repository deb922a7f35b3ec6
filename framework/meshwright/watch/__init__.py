"""Monitoring of a run: NaN and Inf, replica drift, hangs, stragglers, and the trace of a step.

Each part detects one kind of trouble and names the ranks. The training loop decides what happens
next, on all ranks at once.
"""
