"""How codes become floats, one file for each way to store them."""
