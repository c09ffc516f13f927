"""A plan on a live PyTorch training: the tide that a user holds, its steps, recomputation, and the backends below."""
