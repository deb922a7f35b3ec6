"""Planner: predicts memory, messages and time of a run before it starts,
and searches for the best layout.
"""
