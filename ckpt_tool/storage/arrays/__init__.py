"""OCDBT and zarr, as Orbax keeps arrays: which bytes of which file are a value, and their checksums."""
