"""`paddle`: PaddlePaddle's files of ranks. `format` is the specification; files, rules and layout serve the other two
formats too."""
