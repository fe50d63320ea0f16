"""Hugging Face's hub: safetensors folders, PEFT adapters, the names that released models have, MLX's variants."""
