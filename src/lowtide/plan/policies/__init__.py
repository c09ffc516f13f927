"""The built-in policies, one per file; `lowtide.registry` knows their names."""
