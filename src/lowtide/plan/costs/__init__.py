"""What decisions cost: the options of a gap, the bytes over a step, and the clock that policies predict with."""
