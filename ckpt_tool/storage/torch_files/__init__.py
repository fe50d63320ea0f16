"""The containers of torch.save: the zip since torch 1.6, and the stream before it."""
