"""Sites, their data and how it is cut."""
