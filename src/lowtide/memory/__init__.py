"""The fast tier: a hard byte budget over tensor memory."""
