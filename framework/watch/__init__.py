"""What looks after a run: signals from outside, numbers that are none, replicas that drift apart, hangs.

Each part finds one kind of trouble and names it; what then happens is decided in the training
loop, on all ranks at once.
"""
