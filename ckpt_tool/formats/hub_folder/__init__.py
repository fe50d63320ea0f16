"""What every folder of the hub has, whatever its weights are: which files are the model, its index, its modules."""
