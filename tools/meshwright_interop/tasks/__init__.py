"""Evaluation tasks of lm-evaluation-harness on the ranks of any layout, without an export."""
