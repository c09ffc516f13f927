"""Memory that is accounted for in Python, where the native part cannot be built."""
