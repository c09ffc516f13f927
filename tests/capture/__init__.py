"""Traces: built from made-up logs, and recorded from real steps."""
