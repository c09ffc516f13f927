"""What decisions cost: byte curves, the sweep that predicts a step, and operators that run again."""
