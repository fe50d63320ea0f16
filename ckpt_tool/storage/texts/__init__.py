"""JSON and YAML from strangers: strict, bounded, and every fault has a place."""
