"""A trace seen otherwise: as layers, as recipes, as pools of blocks, with other algorithms, under eviction."""
