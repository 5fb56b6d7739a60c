"""Constrains sampling by a grammar: compiles a JSON schema, a regular expression or EBNF, and masks
the logits.

Belongs here: compilers, matchers, masks. The validation of a finished answer belongs to `checking`.
"""
