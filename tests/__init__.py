"""Tests of Lowtide; the folders mirror `src/lowtide`."""
