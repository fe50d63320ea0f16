"""What an adapter's files say, and where in the base it belongs. `commands.adapters` folds."""
