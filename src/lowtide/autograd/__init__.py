"""What autograd holds: saved tensors that stay."""
