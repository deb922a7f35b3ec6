"""Low-rank adapters (LoRA): small trained matrices beside frozen linears and embeddings."""
