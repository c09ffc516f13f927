"""What autograd holds, and when: saved tensors that stay, gradients, and the threads that run backward."""
