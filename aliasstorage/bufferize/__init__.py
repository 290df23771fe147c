"""Turn the functional writes of a byte graph back into in-place writes on typed windows."""
