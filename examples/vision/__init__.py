"""Image classifiers in plain torch on synthetic images."""
