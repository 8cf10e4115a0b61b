"""Who carries the clients of a run: this process, or those that torchrun has started."""
