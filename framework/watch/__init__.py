"""What looks after a run: numbers that are none, replicas that drift apart, hangs, a second job in the same directory.

Each part finds one kind of trouble and names it; what then happens is decided in the training
loop, on all ranks at once.
"""
