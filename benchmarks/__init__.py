"""Side-by-side runs of Lowtide and its alternatives."""
