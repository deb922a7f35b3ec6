"""Check of machines and links before a run, measured by the ranks that the run will use.

facts         each rank: versions, device, memory, clock, the run's disk
connectivity  one connection per pair of nodes, before anything that would hang on a dead link
links         pairs of nodes in rounds, pairs of ranks in a node, all-reduces of each axis
findings      pure: nodes and links that stand out, and other faults that would end a run
report        the table, and the figures in the format that a planner reads
rank          the whole check on one rank, as `meshwright doctor` and a job script call it
"""
