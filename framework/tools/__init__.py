"""Tools of the command line. Nothing in the core or the services imports them."""
