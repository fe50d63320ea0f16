"""Adapters folded into their base: what they say, what they change, and the arithmetic."""
