"""The nouns that flow between stages: frozen values, no torch."""
