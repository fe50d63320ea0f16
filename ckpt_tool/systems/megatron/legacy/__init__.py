"""`megatron`: Megatron-LM's legacy folders of ranks. `format` is the specification; names, rules and stages serve
`megatron.torch_dist` too."""
