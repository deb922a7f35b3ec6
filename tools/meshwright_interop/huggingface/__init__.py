"""Import and export of models in the Hugging Face directory format (config.json, safetensors,
tokenizer files).

Two halves that do not import each other:

    convert/      meshwright models and their weights <-> Hugging Face directories; transformers is not needed
    restructure/  any causal LM of transformers (an optional extra) as layers of an nn.Sequential,
    and its export

Modules that both use:

    files.py       file names of such a directory; reading, writing and copying config.json and its side files
    source.py      safetensors weights on disk, and checks for damage
    rules.py       one meshwright tensor <-> its transformers tensors: order of rows, transposition, parts
    export.py      a checkpoint -> a directory; the plan of the model comes from either half
    writing.py     weights of a checkpoint under their transformers names -> safetensors files
    destination.py output directory, published by one rename

Nothing here opens a network connection or unpickles a file.
"""
