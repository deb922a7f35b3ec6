"""What the command line calls: nothing in the core or the services imports it."""
