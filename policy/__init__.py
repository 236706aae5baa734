"""Pure decisions: which draft and how many tokens, for every request, before every step."""
