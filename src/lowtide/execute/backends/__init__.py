"""Fast memory with a budget, and the way to the tiers below it: the protocol, and one package for each kind."""
