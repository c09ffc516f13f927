"""Memory of the CPU, enforced by the native allocator."""
