"""The pipeline axis: layers cut into stages,
and an executor that runs one rank's row of a schedule on them.
"""
