"""A schedule on a clock: simulated, measured, accounted for and drawn. Pure functions, no torch."""
