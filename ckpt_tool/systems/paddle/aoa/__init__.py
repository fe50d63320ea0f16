"""Paddle's any-to-any statements (AOA): `statement` reads them, `steps` and `slices` say what they do to a tensor, `program`
compiles a list of them to pieces as a family's equations are. `program` has the table of statements."""
