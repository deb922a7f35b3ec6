"""Models in the form that transformers reads and writes: theirs as ours, ours as theirs, and theirs as they are.

Two halves that do not know each other:

    convert/      a model of ours and its weights <-> a directory of theirs, without transformers
    restructure/  any causal LM of transformers, an optional extra, as layers of a Sequential, and back

What both stand on:

    files.py      the files of such a directory by name; config.json and what goes along, read, written, copied
    source.py     weights that lie on the disk, and what is damaged of them
    rules.py      one tensor of ours <-> those of theirs: order of rows, transposition, parts
    writing.py    a checkpoint's weights under the names of theirs -> safetensors files
    places.py     where it is written, and appears whole

Nothing here opens a network connection or unpickles a file.
"""
