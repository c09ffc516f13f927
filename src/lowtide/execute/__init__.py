"""A plan on a live PyTorch training: residency (pure), the backend below it, and the hooks above it."""
