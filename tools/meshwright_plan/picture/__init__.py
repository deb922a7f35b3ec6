"""Timelines as files: a figure for a paper (SVG, PNG) and a trace for a viewer."""
