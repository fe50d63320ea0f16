"""Systems: what belongs to one training or inference system lies in one folder: its formats, names, config and
passes."""
