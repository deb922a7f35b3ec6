"""NaN and Inf: the check of each step, the replay that finds the first layer, and the message."""
