"""`paddle-unified`: unified checkpoints of PaddleNLP and PaddleFormers. `format` is the specification."""
