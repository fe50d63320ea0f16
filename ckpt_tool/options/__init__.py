"""What people may ask of a verb: each option stated once, as a field of the dataclass that carries its value."""
