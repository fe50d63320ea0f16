"""The safetensors file: its header as columns, strictly checked, and the head of a new one."""
