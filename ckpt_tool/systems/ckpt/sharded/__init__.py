"""`sharded`: this tool's own layout. `format` is the specification."""
