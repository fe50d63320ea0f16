"""`torch`: files of torch.save, nested training states, a file a rank. `format` is the specification; `content` serves
every format made of such files."""
