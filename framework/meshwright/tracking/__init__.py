"""Metrics of a run, step by step: ``metrics.jsonl``, the console, wandb.
No sink can stop or slow the run.
"""
