"""`deepspeed`: ZeRO, pipeline and expert files. `format` is the specification."""
