"""Searching for better rates, judged on validation rows."""
