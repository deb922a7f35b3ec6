"""Optimizers on flat shards, gradient clipping by the global norm, and the learning rate as a function of the step."""
