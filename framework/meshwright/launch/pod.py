"""Entry point of ``python -m meshwright.launch.pod``,
the former name of ``python -m meshwright_launch.pod``.
"""

from meshwright.launch import run_present

if __name__ == "__main__":
    run_present("meshwright_launch.pod", "meshwright.launch.pod")
