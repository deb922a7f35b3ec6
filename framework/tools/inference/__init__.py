"""A trained model in use: loaded into the ranks of any layout, evaluated, sampled from."""
