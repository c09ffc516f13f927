"""Where every record is: the state machine, its events, and the compiled schedule of a step. Pure: no torch."""
