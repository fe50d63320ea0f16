"""`paddle-flex`: .distcp folders of PaddlePaddle. `format` is the specification."""
