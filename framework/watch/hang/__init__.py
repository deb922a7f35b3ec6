"""Hangs: heartbeats of every rank, the watchdog that ends a run that stands still, and the diagnosis it prints."""
