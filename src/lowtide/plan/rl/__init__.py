"""Placement in slow memory as a game: a strategy with knobs, its environment, and agents that learn to set them."""
