"""Expert parallelism: each of ep consecutive ranks holds E/ep experts of a layer;
an all-to-all sends it tokens.
"""
