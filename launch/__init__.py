"""Where runs are put together: the command line, the start of ranks, and the ranks that tests and verify reuse."""
