"""Training under Lowtide is the same, bit for bit, as training without it (rules R1, R5 and R8)."""
