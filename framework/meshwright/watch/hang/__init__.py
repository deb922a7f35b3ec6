"""Hangs: heartbeats of every rank, the watchdog that ends a stalled run,
and the diagnosis it prints.
"""
