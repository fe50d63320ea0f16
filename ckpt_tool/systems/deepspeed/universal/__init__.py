"""`deepspeed-universal`: one folder a parameter. `format` is the specification."""
