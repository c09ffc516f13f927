"""A tide: what a user holds, on one device or several; how it is opened, and what it learns from its steps."""
