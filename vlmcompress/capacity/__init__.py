"""What serving a model takes: memory, requests at once and bounds of time, from its config, before anything is run."""
