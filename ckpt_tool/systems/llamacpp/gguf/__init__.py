"""GGUF, the files of llama.cpp: `format.py` is the specification."""
