"""Placement of features on the modules and parameters of a model, by patterns of their names."""
