"""`python -m jaxpaged.bench`: how fast the engine is here, beside what this machine could do at most."""
