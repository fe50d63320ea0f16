"""What an option is, whatever it is for: how one is stated, and the values that words of a command line become."""
