"""Building blocks and conformance suites that third parties can use in their own tests."""
