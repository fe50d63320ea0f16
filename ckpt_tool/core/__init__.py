"""Values that flow through all of ckpt: boxes, keys, chunks, catalogs, meshes, layouts. No IO, no torch."""
