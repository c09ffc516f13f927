"""Tests of the simulated accelerator."""
