"""`megatron-dist`: Megatron-Core's torch_dist folders. `format` is the specification."""
