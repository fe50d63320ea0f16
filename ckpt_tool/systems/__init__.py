"""Systems: what belongs to one training or inference system is in one folder: its formats, names, config and
passes."""
