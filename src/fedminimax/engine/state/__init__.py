"""What outlasts a round or a process: states of clients, checkpoints, and the run's folder."""
