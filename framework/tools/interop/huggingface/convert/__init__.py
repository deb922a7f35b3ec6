"""A model of ours and its weights <-> a directory of theirs; transformers need not be installed.

bringing.py   a directory in Hugging Face's form -> a run directory of ours, ready to be trained on
taking.py     a checkpoint of ours, of any layout -> such a directory
families.py   which kinds of models there are: gpt2.py, decoders.py (Llama, Mistral, Qwen2, Qwen3), t5.py
family.py     what is known of one: config.json <-> model.options, tensors <-> ours
settings.py   a config.json read field by field
companions.py tokenizer and generation files: whether they fit, and what is made where they are not
"""
