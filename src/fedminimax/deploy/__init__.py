"""Runs between real sites: what a site offers, how a run is set up, and the engines' processes."""
