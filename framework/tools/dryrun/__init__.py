"""A job rehearsed on paper: what each kind of rank holds and says, and whether all of them agree."""
