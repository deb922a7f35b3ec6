"""Any causal LM of transformers as layers of an nn.Sequential, and its export.

layers.py     model.builder = "hf:DIRECTORY": the layers, with sharding plan, tied weights and initialisation
cut.py        the cut of the model at the modules of its pipeline plan
derived.py    the cut at module lists, of a model that declares no plan
observation.py  calls of a model's units, and the form of their outputs
proof.py      proof that such a cut computes the logits of the unmodified model
constants.py  values of constants on meta, which a model may branch on
frame.py      computations between the layers (positions, masks, scalings), run by the model's own code
marks.py      placeholders for the planned modules during such a run
float64.py    float64 runs without casts to float32
plans.py      the model's own tensor-parallel plan -> a sharding plan
probe.py      a traced forward on meta: functional dropout, and the weights that act on sharded tensors
released.py   a tensor of the files for each expert, and other names: transformers' own mapping, in both directions
initial.py    initial weights: loaded from the directory's files, or drawn by the model's rules
directory.py  validation of config.json
export.py     plan of the export of a checkpoint: config.json and the files beside the weights
library.py    the only import of transformers, inside a function
"""
