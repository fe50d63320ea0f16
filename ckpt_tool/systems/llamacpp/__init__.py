"""llama.cpp: GGUF files, their names, metadata and block types."""
