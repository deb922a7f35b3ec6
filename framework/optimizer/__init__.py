"""AdamW on flat shards, the norm of the whole gradient, and the learning rate as a function of the step."""
