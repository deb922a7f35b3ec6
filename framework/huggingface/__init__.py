"""Models in the form that transformers reads and writes: theirs as ours, ours as theirs, and theirs as they are.

A model of ours and its weights, without transformers:

    bringing.py   a directory in Hugging Face's form -> a run directory of ours, ready to be trained on
    taking.py     a checkpoint of ours, of any layout -> such a directory
    families.py   which kinds of models there are: gpt2.py, decoders.py (Llama, Mistral, Qwen2, Qwen3), t5.py
    family.py     what is known of one: config.json <-> model.options, tensors <-> ours
    rules.py      one tensor of ours <-> those of theirs: order of rows, transposition, parts
    settings.py   a config.json read field by field
    companions.py tokenizer and generation files, which go along
    places.py     where it is written, and appears whole
    source.py     what lies on the disk, and what is damaged of it

Any causal LM of transformers, an optional extra, as layers of a Sequential, and back:

    restructure.py   model.builder = "hf:DIRECTORY": the layers and all that they carry
    frame.py         what a model does between its layers, done by its own code
    wide.py          float64 that stays float64
    plans.py         its own plan for tensor parallelism -> a sharding plan
    probe.py         randomness that nobody can seed by name, and who works on what
    initial.py       first values: of the directory's files, or drawn by the model's rules
    directory.py     config.json and safetensors files; what is refused of them
    back.py          a checkpoint -> a directory that transformers opens
    library.py       the one door to transformers, imported inside functions only

Nothing here opens a network connection or unpickles a file.
"""

from framework.huggingface.bringing import Brought, bring
from framework.huggingface.taking import SHARD_BYTES, Taken, take

__all__ = ["SHARD_BYTES", "Brought", "Taken", "bring", "take"]
