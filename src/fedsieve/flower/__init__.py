"""The same experiments over Flower: a ServerApp and a ClientApp that carry fedsieve's envelopes, and nothing else."""
