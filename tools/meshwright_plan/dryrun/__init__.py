"""Dry run of a job: memory and communication of each kind of rank,
and a check that all ranks agree.
"""
