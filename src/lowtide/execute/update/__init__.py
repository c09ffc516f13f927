"""Optimizer steps whose tensors do not all fit."""
