"""For the fork server, which can import modules and nothing else: importing this one makes it ready to fork ranks."""

from meshwright.launch.forking import preload

preload()
