"""Models of links, pipelines and allocators, one paper a file."""
