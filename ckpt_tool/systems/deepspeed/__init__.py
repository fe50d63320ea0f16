"""DeepSpeed: ZeRO folders and universal checkpoints. What both share lies here."""
