"""Object stores and other URLs: read by ranges, written in parts."""
