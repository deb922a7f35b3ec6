"""Use of a trained model: loading it on the ranks of any layout, evaluation, sampling."""
