"""Megatron-LM: its three formats, names, arguments and passes. What the formats share lies here."""
