"""Self-contained HTML pages: one file, no network, readable on a phone and in dark mode."""
