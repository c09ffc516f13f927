"""Running operators again: what was called, what it takes to make a record once more, and the calls themselves."""
