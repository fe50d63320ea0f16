"""Values that flow through the house: boxes, keys, chunks, catalogs, meshes, layouts. No IO, no torch."""
