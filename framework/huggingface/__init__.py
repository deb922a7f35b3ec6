"""Models in the form that transformers reads and writes, in and out: safetensors, config.json, tokenizer files.

    bringing.py   a directory in Hugging Face's form -> a run directory of ours, ready to be trained on
    taking.py     a checkpoint of ours, of any layout -> such a directory
    families.py   which kinds of models there are: gpt2.py, decoders.py (Llama, Mistral, Qwen2, Qwen3), t5.py
    family.py     what is known of one: config.json <-> model.options, tensors <-> ours
    rules.py      one tensor of ours <-> those of theirs: order of rows, transposition, parts
    settings.py   a config.json read field by field
    places.py     where it is written, and appears whole
    source.py     what lies on the disk, and what is damaged of it

Nothing here needs transformers, opens a connection or unpickles a file.
"""
