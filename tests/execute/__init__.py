"""The runtime under test: its pure parts alone, and whole trainings that something tries to break."""
