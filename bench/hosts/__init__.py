"""Costs and gains of the policy inside other engines' loops."""
