"""Commands of ``meshwright``: convert, config import, checkpoint export."""
