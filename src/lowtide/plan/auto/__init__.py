"""The joint optimiser: candidates, attempts, and the exchanges that improve them."""
