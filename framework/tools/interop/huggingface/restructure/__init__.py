"""Any causal LM of transformers as layers of a Sequential, and back.

layers.py     model.builder = "hf:DIRECTORY": the layers and all that they carry
frame.py      what a model does between its layers, done by its own code
wide.py       float64 that stays float64
plans.py      its own plan for tensor parallelism -> a sharding plan
probe.py      randomness that nobody can seed by name, and who works on what
initial.py    first values: of the directory's files, or drawn by the model's rules
directory.py  what is refused of a config.json and of weights
back.py       a checkpoint -> a directory that transformers opens
library.py    the one door to transformers, imported inside functions only
"""
