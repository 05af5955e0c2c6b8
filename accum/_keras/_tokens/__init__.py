"""Steps that give each micro-batch about as many tokens, rather than examples, and trim the time that none needs."""
