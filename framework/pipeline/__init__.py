"""The pipeline axis: layers cut into stages, and one executor that runs one row of a schedule on them."""
