"""`safetensors`: Hugging Face folders and single files. `format` is the specification."""
