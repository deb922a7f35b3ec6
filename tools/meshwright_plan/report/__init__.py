"""HTML report of one run, or of several side by side: everything in the run directories,
in one file.
"""
