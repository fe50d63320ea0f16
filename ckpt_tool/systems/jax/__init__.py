"""JAX: Orbax folders, and the names of MaxText's and Gemma's trees."""
