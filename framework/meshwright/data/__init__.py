"""Data: text to tokens, tokens to samples, the same in every layout.

text files --prepare--> train.bin/.idx, validation.bin/.idx, tokenizer.json, fingerprint.json
.bin/.idx  --indexed, token_files--> tokens --corpus, blend--> Corpus, window k = tokens [k S, k S + S]
(seed, epoch, index) --order--> sample number
sample indices of the run --causal, span_corruption, dataset--> read(indices) -> inputs, labels

Other rooms enter through sources (samples for a run), tokenizer, fingerprint (a corpus on the disk)
and prepare.
"""
