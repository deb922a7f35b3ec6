"""The user's model: from its builder to parameters on the meta device, its requirements, and its initial values by
name."""
