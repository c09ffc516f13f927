"""Lowtide inside the tools that people train with: one module for each, which imports its tool when it is imported."""
