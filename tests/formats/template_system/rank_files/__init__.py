"""`toy`: a file for each of two ranks. `format` is the specification."""
