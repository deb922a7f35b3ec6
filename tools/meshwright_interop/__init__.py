"""Exchange with other frameworks: Hugging Face models, configurations of Megatron-LM,
torchtitan and nanotron.
"""
