"""Context parallelism: the tokens of each sample shared by the ranks of an axis, keys and values
exchanged between them.
"""
