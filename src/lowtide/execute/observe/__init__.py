"""The operators that a program runs, told to whoever watches them, without a dispatch mode."""
