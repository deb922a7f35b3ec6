"""Pipeline schedules as data: built, lowered, checked, simulated and drawn by pure functions,
executed unchanged.
"""
