"""Conversion of meshwright models and weights to and from Hugging Face directories;
transformers is not needed.

importing.py  a Hugging Face directory -> a run directory, ready for training
exporting.py  plan of the export of a checkpoint: config.json and the files beside the weights
weights.py    the tensors of the files, checked against the model
families.py   the supported model types: gpt2.py, decoders.py (Llama, Mistral, Qwen2, Qwen3) with decoder_rules.py and
              rope.py, mixtures.py (Mixtral, OLMoE, Qwen3-MoE, DeepSeek-V3) with
              mixture_rules.py, t5.py
family.py     table of one model type: config.json <-> model.options, transformers <-> meshwright tensors
mup.py        muP's multipliers, folded into exported weights
settings.py   validated access to the fields of a config.json
side_files.py tokenizer and generation files: checked against the model, written if they are missing
"""
