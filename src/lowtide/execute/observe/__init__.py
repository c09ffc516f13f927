"""Reports the operators that a program runs to watchers, without a dispatch mode."""
