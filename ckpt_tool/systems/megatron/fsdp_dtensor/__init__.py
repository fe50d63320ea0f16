"""`megatron-fsdp`: Megatron-FSDP's `fsdp_dtensor` folders. `format` is the specification."""
