"""This tool's own format."""
