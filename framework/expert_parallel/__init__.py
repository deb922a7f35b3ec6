"""Expert parallelism: the experts of a layer shared by neighbouring ranks, tokens exchanged between them."""
