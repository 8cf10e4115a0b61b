"""What a run is judged by: ranking (exact and federated AUC), optimality, cost."""
