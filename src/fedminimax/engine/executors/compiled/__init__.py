"""Phases as machine code: a graph of operations is traced, rewritten and compiled."""
