"""What a run tells, step by step: ``metrics.jsonl``, the console, wandb. No sink can stop or slow the run."""
