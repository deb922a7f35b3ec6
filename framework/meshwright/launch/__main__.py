"""Entry point of ``python -m meshwright.launch``,
the former name of ``python -m meshwright_launch``.
"""

from meshwright.launch import run_present

if __name__ == "__main__":
    run_present("meshwright_launch", "meshwright.launch")
