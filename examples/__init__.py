"""What a user brings: models and data in plain torch, and a configuration each."""
