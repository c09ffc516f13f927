"""Memory of a device, with pinned host memory and a file tier below it."""
