"""Everything of a run that a user may bring: model, loss, data, optimizer, schedule,
parameter groups, callbacks.
"""
