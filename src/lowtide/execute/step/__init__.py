"""A running step: autograd's saved tensors above, the plan that the step matches, the backend below."""
