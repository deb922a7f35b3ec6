"""A page for a run, or for several side by side: everything that a run directory tells, in one HTML file."""
