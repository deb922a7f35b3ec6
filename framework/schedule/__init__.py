"""The schedule is data: built, lowered, checked, simulated and drawn by pure functions, and run as it is."""
