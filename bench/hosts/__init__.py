"""What the policy costs and brings inside other engines' loops."""
