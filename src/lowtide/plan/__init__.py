"""Problem -> Plan: the policies, the evaluator they share, and the verifier that trusts none of them."""
