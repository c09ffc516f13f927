"""What decisions cost: the options of a gap, byte curves, and the sweep that predicts a step."""
