"""Meta and Mistral AI: consolidated files, their names and params.json."""
