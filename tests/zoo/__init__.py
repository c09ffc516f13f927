"""Tests of the model zoo, and the small sizes that others use too."""
