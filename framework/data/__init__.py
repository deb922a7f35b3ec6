"""Text to tokens, tokens to samples, samples to micro-batches: the same in every layout.

text files --prepare--> train.bin/.idx, validation.bin/.idx, tokenizer.json, fingerprint.json
.bin/.idx  --indexed--> TokenStream --samples--> Corpus, window k = tokens [k S, k S + S]
(seed, epoch, index) --order--> sample number
samples_seen, dp_rank, m --samples.Feed--> Microbatch(tokens, labels, sample_indices)
"""
