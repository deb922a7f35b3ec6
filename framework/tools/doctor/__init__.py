"""What is wrong with machines and links before a run finds out: measured by the ranks that will run.

facts    each rank: versions, device, memory, clock, the run's disk
links    pairs of nodes in rounds, pairs of ranks in a node, all-reduces of each axis
judge    pure: which node or link stands out, and what else would end a run
report   the table, and the figures in the form that a planner reads
visit    all of it together, as `meshwright doctor` and a job script call it
"""
