"""A stream of samples of unknown length, with its state, and a collate function."""
