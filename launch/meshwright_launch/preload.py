"""Module for the fork server, which can only import modules:
importing it prepares the server to fork ranks.
"""

from meshwright_launch.forking import preload

preload()
