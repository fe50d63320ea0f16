"""PyTorch: files of torch.save and the folders of torch.distributed.checkpoint."""
