"""What headers and configs say of quantised weights: schemes, their parts, the tensors that belong together."""
