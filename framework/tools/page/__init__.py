"""Pages that need nothing else: one HTML file, no network, readable on a phone and in the dark."""
