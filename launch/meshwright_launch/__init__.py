"""Entry points of a run: the command line, the start of ranks,
and the rank pool for tests and ``verify``.
"""
