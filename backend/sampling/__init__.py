"""How tokens are drawn: options, distributions, the rule of acceptance, grammars."""
