"""Ways to map a phase over its clients: the same numbers by each of them."""
